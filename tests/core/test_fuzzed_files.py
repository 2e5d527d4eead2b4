"""Files with flipped bytes, cut ends and edited headers: refused with `LayersimError`, or read with equal values."""

from __future__ import annotations

import json
import random
import resource

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core import file_format

from ..models.tiny_models import random_tokens, tiny_llama
from .test_malformed_files import mutated

LARGE = (0, -1, 2**31, 2**62, 10**30, "F64", "x", [], [2**40], None, {})


def flipped(blob: bytes, rng: random.Random) -> bytes:
    # Half of them in the header, which is short.
    place = rng.randrange(len(blob) if rng.random() < 0.5 else min(len(blob), 2000))
    return blob[:place] + bytes([rng.randrange(256)]) + blob[place + 1 :]


def cut(blob: bytes, rng: random.Random) -> bytes:
    return blob[: rng.randrange(len(blob))] + rng.randbytes(rng.choice((0, 8, 100)))


def edited(blob: bytes, rng: random.Random) -> bytes:
    """With another entry of the JSON that safetensors reads; its length fits."""
    end = 8 + int.from_bytes(blob[:8], "little")
    entries = json.loads(blob[8:end])
    entry = entries[rng.choice(sorted(entries))]
    key = rng.choice(sorted(entry))
    entry[key] = rng.choice(LARGE)
    if key in ("shape", "data_offsets") and rng.random() < 0.5:
        entry[key] = [rng.choice((0, 1, 2**40)) for _ in range(rng.randrange(1, 4))]
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + blob[end:]


def tensors_of(report) -> list[torch.Tensor]:
    return [getattr(result, field) for result in report.values() for field in result.tensor_fields()]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A file of each kind, and what reads it."""
    folder = tmp_path_factory.mktemp("files")
    model = tiny_llama()
    data = random_tokens(8)
    analyzers = [lsim.LogitLens(), lsim.Cosine(center="none")]
    report = lsim.analyze(model, lsim.Data(data, batch_size=2), analyzers, checkpoint=folder / "run").save(folder / "report")
    shard = lsim.analyze(model, lsim.Data(data, batch_size=2), analyzers, shard=(0, 1), save_to=folder / "shard")
    return {
        "report": (report, lambda path: tensors_of(lsim.load(path))),
        "checkpoint": (folder / "run", lambda path: list(file_format.read(path, ("checkpoint",))[1].values())),
        "shard": (shard, lambda path: tensors_of(lsim.merge(path))),
    }


def memory() -> int:
    """Most bytes that this process had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.light("report")
@pytest.mark.parametrize("kind", ["report", "checkpoint", "shard"])
def test_a_damaged_file_is_refused_or_equal(kind, files, tmp_path):
    path, reader = files[kind]
    blob = path.read_bytes()
    expected = reader(path)
    rng = random.Random(kind)
    before = memory()
    files_checked = 0
    for number in range(60):
        (tmp_path / "x").write_bytes((flipped, cut, edited)[number % 3](blob, rng))
        try:
            tensors = reader(tmp_path / "x")
        except lsim.LayersimError as error:
            files_checked += str(tmp_path / "x") in str(error)
        else:
            assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(tensors, expected, strict=True))
            files_checked += 1

    assert files_checked == 60
    assert memory() - before < 2e8


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.filterwarnings("ignore")
def test_an_edited_shard_with_a_checksum_that_fits_is_read_or_refused(files, tmp_path):
    header, tensors = file_format.read(files["shard"][0], ("shard",))
    rng = random.Random(0)
    before = memory()
    refused = 0
    worked = 0
    for _ in range(60):
        path = file_format.write(tmp_path / "x", "shard", *mutated(header, tensors, rng))
        try:
            worked += "cosine" in lsim.merge(path)
        except (lsim.LayersimError, *file_format.MALFORMED):
            refused += 1

    assert refused + worked == 60
    assert refused > 3
    assert memory() - before < 2e8
