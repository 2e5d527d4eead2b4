"""Kernels of a user's own on a server, also while their file changes."""

from __future__ import annotations

import importlib
import os
import sys
import time

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.remote import client as ndif
from tl_layersim.remote.open_model import open_source

from ..models.tiny_models import tiny_llama, tiny_tokenizer
from ..ndif.client import equal, furthest, rows
from .helpers import QUICK, local, lsim_analyzer, mean_norm


def test_an_analyzer_of_ones_own_travels(small):
    data = rows(6, 20)
    far = lsim.analyze(lsim.open_model(small.model(), remote=small.url), data, [lsim_analyzer(mean_norm)])
    assert furthest(far, local(small, data, [lsim_analyzer(mean_norm)])) < 1e-12


def test_not_a_number_there_is_named_with_its_layer(small, tmp_path):
    model = tiny_llama()
    model.model.layers[1].mlp.down_proj.weight.data.fill_(float("nan"))
    model.save_pretrained(small.folder / "broken")
    tiny_tokenizer().save_pretrained(small.folder / "broken")
    with pytest.raises(lsim.LayersimError, match=r"rows 0 to 3(.|\n)*blocks.1.hook_resid_post"):
        lsim.analyze(
            lsim.open_model(small.model("broken"), remote=small.url, tokens_per_request=1000),
            lsim.Data(rows(4, 20), batch_size=1),
            QUICK,
        )


def refuses(view):
    raise RuntimeError("the frobnicator is unavailable, try again")


def test_a_kernel_that_fails_is_not_asked_for_again(small):
    with pytest.raises(lsim.LayersimError, match=r"request failed(.|\n)*frobnicator"):
        lsim.analyze(lsim.open_model(small.model(), remote=small.url), rows(2, 8), [lsim_analyzer(refuses)])
    assert small.set()["requests"] == 2
    run = lsim.analyze(lsim.open_model(small.model(), remote=small.url), rows(2, 8), [lsim_analyzer(refuses)], blocking=False)
    with pytest.raises(lsim.LayersimError, match=r"request failed(.|\n)*frobnicator"):
        run.result(30)
    assert run.status() == {"ERROR": 1}
    assert small.set()["requests"] == 2


def test_a_refusal_of_a_kernel_keeps_its_words(small):
    labels = torch.randint(100, 200, (4, 20))
    data = {"input_ids": rows(4, 20)["input_ids"], "labels": labels}
    with pytest.raises(lsim.LayersimError, match=r"`labels` .* 1\d\d to 1\d\d\b.* 0 to 99\b"):
        lsim.analyze(lsim.open_model(small.model(), remote=small.url), data, [lsim.LogitLens(labels="data")])


OWN = """
from dataclasses import dataclass
import torch
from tl_layersim.analyzers import Analyzer
from tl_layersim.core import LayerCurve

FACTOR = 2.0


@dataclass(frozen=True)
class Own(Analyzer):
    name = "own"

    def kernel(self, first):
        return norms

    def compute(self, sums, run):
        return LayerCurve(values=sums["norm"] / sums["count"], layers=run.layers, provenance=run.provenance)


def norms(view):
    return {"norm": scaled(view), "count": torch.tensor(view.activations.shape[1])}


def scaled(view):
    return view.activations.double().norm(dim=-1).sum(1) * 2.0
"""


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    """A module of a user's own, and how to import it: as it is in the file now."""
    path = tmp_path / "own_kernels.py"
    path.write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def imported():
        sys.modules.pop("own_kernels", None)
        importlib.invalidate_caches()
        return importlib.import_module("own_kernels")

    yield path, imported
    sys.modules.pop("own_kernels", None)


def test_a_file_that_is_saved_while_a_run_goes_on(small, own_file, monkeypatch):
    path, imported = own_file
    own, data = imported().Own(), rows(8, 20)
    expected = local(small, data, [own], batch_size=1)
    plain = ndif.NdifClient._attempt

    def attempt(self, run, backend=None):
        found = plain(self, run, backend)
        path.write_text(OWN.replace("2.0", "200.0"))
        os.utime(path, (time.time() + 5, time.time() + 5))
        return found

    source = open_source(lsim.open_model(small.model(), remote=small.url, tokens_per_request=20))
    monkeypatch.setattr(ndif.NdifClient, "_attempt", attempt)
    far = lsim.analyze(source, lsim.Data(data, batch_size=1), [own])
    assert path.read_text() != OWN
    assert furthest(far, expected) < 1e-12


def test_a_file_that_was_saved_since_it_was_imported(small, own_file):
    path, imported = own_file
    own = imported().Own()
    path.write_text(OWN + "# A line more at the end changes nothing.\n")
    lsim.analyze(lsim.open_model(small.model(), remote=small.url), rows(4, 20), [own])
    # Source is found by its line, and what a kernel calls travels with it.
    for other in ("# A line more at the start.\n" + OWN, OWN.replace("* 2.0", "* 200.0"), OWN.replace("sum(1)", "sum(")):
        path.write_text(other)
        with pytest.raises(lsim.LayersimError, match=r"own_kernels.py(.|\n)*reload"):
            lsim.analyze(lsim.open_model(small.model(), remote=small.url), rows(4, 20), [own])


def test_a_checkpoint_is_of_one_kernel(own_file, tmp_path):
    path, imported = own_file
    kept = tmp_path / "own.ckpt"
    first = lsim.analyze(tiny_llama(), rows(4, 20), [imported().Own()], checkpoint=kept)
    assert equal(first, lsim.analyze(tiny_llama(), rows(4, 20), [imported().Own()], checkpoint=kept))
    path.write_text(OWN.replace("* 2.0", "* 200.0"))
    with pytest.raises(lsim.LayersimError, match=r"another run(.|\n)*own: code"):
        lsim.analyze(tiny_llama(), rows(4, 20), [imported().Own()], checkpoint=kept)
