"""A bit that flips in a file is noticed, wherever it is; and no run goes on from such a file."""

from __future__ import annotations

import random

import pytest

import tl_layersim as lsim
from tl_layersim.core import file_format

from ..models.tiny_models import random_tokens, tiny_llama
from .helpers import CHECKPOINTS, FILES, load, read_checkpoint

KINDS = ("result", "report", "checkpoint", "stitches", "training", "remote_run")


def flipped(blob: bytes, rng: random.Random, start: int = 0) -> bytes:
    place = rng.randrange(start, len(blob))
    return blob[:place] + bytes([blob[place] ^ (1 << rng.randrange(8))]) + blob[place + 1 :]


def end_of_header(blob: bytes) -> int:
    return 8 + int.from_bytes(blob[:8], "little")


def test_a_flipped_bit_in_a_result_is_refused(tmp_path):
    blob = load(FILES / "report.safetensors").save(tmp_path / "x").read_bytes()
    rng = random.Random(0)
    path = tmp_path / "y"
    for number in range(60):
        path.write_bytes(flipped(blob, rng, end_of_header(blob) if number % 2 else 0))
        with pytest.raises(lsim.LayersimError):
            lsim.load(path)
    path.write_bytes(flipped(blob, rng, end_of_header(blob)))

    with pytest.raises(lsim.LayersimError, match=r"/y .*checksum"):
        lsim.load(path)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_flipped_bit_in_a_checkpoint_is_refused(name, tmp_path):
    header, tensors = file_format.read(FILES / name, KINDS)
    path = file_format.write(tmp_path / "x", header["kind"], header | {"format": file_format.FORMAT}, tensors)
    assert read_checkpoint(path)

    blob = path.read_bytes()
    rng = random.Random(1)
    for number in range(20):
        path.write_bytes(flipped(blob, rng, end_of_header(blob) if number % 2 else 0))
        with pytest.raises(lsim.LayersimError):
            read_checkpoint(path)


def test_no_run_goes_on_from_a_checkpoint_with_a_flipped_bit(tmp_path):
    path = tmp_path / "run"
    model = tiny_llama()
    data = random_tokens()
    lsim.analyze(model, data, "cka", checkpoint=path)
    blob = path.read_bytes()
    path.write_bytes(blob[:-3] + bytes([blob[-3] ^ 1]) + blob[-2:])

    with pytest.raises(lsim.LayersimError, match=r"/run .*checksum"):
        lsim.analyze(model, data, "cka", checkpoint=path)


def test_a_file_cannot_pass_for_one_without_a_checksum(tmp_path):
    path = load(FILES / "cka.safetensors").save(tmp_path / "x")
    blob = path.read_bytes()
    assert blob.count(b".sha256") == 1

    path.write_bytes(blob.replace(b".sha256", b".sha255"))
    with pytest.raises(lsim.LayersimError, match="checksum"):
        lsim.load(path)


@pytest.mark.parametrize("number", [b"2", b"4"])
def test_a_file_of_another_format_is_refused(number, tmp_path):
    path = load(FILES / "cka.safetensors").save(tmp_path / "x")
    path.write_bytes(path.read_bytes().replace(b'{\\"format\\": 3', b'{\\"format\\": ' + number))
    with pytest.raises(lsim.LayersimError, match=f"format {number.decode()}.*3"):
        lsim.load(path)
