"""A file of every kind is read, with the numbers that it holds."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch
from safetensors import safe_open

import tl_layersim as lsim
from tl_layersim.analyzers.cka import CKAResult
from tl_layersim.core import file_format
from tl_layersim.core.result_declarations import below, kind_of

from ..inputs.views import worst
from .helpers import CHECKPOINTS, FILES, RESULTS, load, read_checkpoint


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_read_and_saved_again(name, tmp_path):
    old = lsim.load(FILES / name)
    with safe_open(FILES / name, "pt") as file:
        for key in file.keys():  # noqa: SIM118 (not a dict)
            owner, field = (old[key.split("/")[0]], key.split("/")[1]) if isinstance(old, lsim.Report) else (old, key)
            field = type(owner).former_names.get(field, field)
            torch.testing.assert_close(getattr(owner, field), file.get_tensor(key), rtol=0, atol=0, equal_nan=True)

    again = lsim.load(old.save(tmp_path / "again"))

    for result, saved_result in (
        zip(old.values(), again.values(), strict=True) if isinstance(old, lsim.Report) else [(old, again)]
    ):
        assert type(result) is type(saved_result)
        assert worst(result, saved_result) == 0
        assert (result.provenance, result.layers) == (saved_result.provenance, saved_result.layers)


def test_every_class_of_results_has_a_kind_of_its_own():
    for module in pkgutil.walk_packages(lsim.__path__, "tl_layersim."):
        importlib.import_module(module.name)
    classes = [cls for cls in below(lsim.Result) if cls.__module__.startswith("tl_layersim.")]
    kinds = [kind_of(cls) for cls in classes]

    assert all(kind.replace("_", "").islower() for kind in kinds)
    assert len(set(kinds)) == len(kinds)


@pytest.mark.parametrize(("file", "name", "former"), [("cka", "texts", "rows"), ("stitch", "text_loss", "batch_loss")])
def test_fields_of_former_names_are_read(file, name, former, tmp_path):
    path = FILES / f"{file}.safetensors"
    header, tensors = file_format.read(path, ("result",))
    for fields in (header["fields"], tensors):
        if name in fields:
            fields[former] = fields.pop(name)
    del header["format"]
    del header["kind"]

    old = file_format.write(tmp_path / "old", "result", header, tensors)

    assert worst(lsim.load(old), lsim.load(path)) == 0
    assert torch.equal(*(torch.as_tensor(getattr(lsim.load(saved), name)) for saved in (old, path)))


def test_a_file_survives_the_rename_of_a_module(tmp_path, monkeypatch):
    path = load(FILES / "cka.safetensors").save(tmp_path / "x")
    assert b"tl_layersim.analyzers" not in path.read_bytes()
    monkeypatch.setattr(CKAResult, "__module__", "tl_layersim.analyzers.renamed")
    assert type(lsim.load(path)) is CKAResult
    assert type(load(FILES / "cka.safetensors")) is CKAResult


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_is_read(name):
    checkpoint = read_checkpoint(FILES / name)
    assert checkpoint

    if name == "analysis.checkpoint":
        assert (checkpoint["main"].tokens, checkpoint["main"].done) == (64, True)
        assert {"cka", "cosine"} <= set(checkpoint["main"].tree.total().sums)
    if name == "finetune.checkpoint":
        assert len(checkpoint) == 2
        assert {"look/0", "look/2", "weight/module.lm_head.weight"} <= set(file_format.read(FILES / name, ("training",))[1])
    if name == "remote_run.run":
        _, models, _, jobs = checkpoint
        assert [len(model.layers) for model in models.values()] == [4]
        assert jobs[0].state == "COMPLETED"
        assert [len(job.batches) for job in jobs] == [0, 2, 0]


def test_heads_are_read():
    assert torch.equal(file_format.read(FILES / "heads.safetensors", ("heads",))[1]["layer 1"], torch.eye(3))
