"""Adapters trained through a server."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tl_layersim.core.errors import LayersimError
from tl_layersim.remote import requests

from ..models.tiny_models import random_tokens
from ..ndif.client import rows
from ..training.helpers import equal, hooked, train
from .helpers import here

# Random tokens have nothing in common.
pytestmark = pytest.mark.filterwarnings("ignore:On held-out data the aligned loss rose")


def test_a_server_gives_what_this_process_gives(small, capfd):
    data, held = rows(16, 20), rows(6, 20, seed=9)
    expected = train(here(small, "llama"), data, eval_data=held, steps=6)
    capfd.readouterr()
    found = train(small.model(), data, eval_data=held, steps=6, remote=small.url)
    said = capfd.readouterr().err
    assert "6 steps in at most 6 requests" in said
    assert "6.9 kB of adapters" in said
    for name in ("curves", "losses", "down", "up"):
        torch.testing.assert_close(getattr(found, name).double(), getattr(expected, name).double(), rtol=1e-5, atol=1e-6)
    assert "NDIF" in found.provenance.source
    assert found.provenance.options["remote"][0]["trusted"]
    model, tokens = small.model(), random_tokens(2, 9)
    with model.trace(tokens, remote=small.url):
        found.apply(model)
        logits = model.lm_head.output.save()
    module = here(small, "llama")._module
    with torch.no_grad(), hooked(module, list(found.blocks), found.down, found.up):
        torch.testing.assert_close(logits, module(tokens).logits, rtol=0, atol=1e-5)


def test_how_steps_are_grouped_changes_no_bit(small, monkeypatch):
    data = rows(16, 20)
    found = train(small.model(), data, steps=5, remote=small.url)
    monkeypatch.setattr(requests, "MOST_BATCHES", 1)
    small.set()
    alone = train(small.model(), data, steps=5, remote=small.url)
    # The probe, the lens, one look before and one after, and the steps.
    assert small.set()["requests"] == 2 + 2 + 5
    assert equal(found, alone)
    monkeypatch.setattr(requests, "MOST_BATCHES", 64)
    small.set(most_batches=2)
    halved = train(small.model(), data, steps=5, remote=small.url)
    assert equal(halved, alone)
    # Looks too, when they are asked for twice.
    held = rows(22, 16, seed=9)
    monkeypatch.setattr(requests, "MOST_BATCHES", 1)
    alone_at_more = train(small.model(), data, eval_data=held, remote=small.url)
    monkeypatch.setattr(requests, "MOST_BATCHES", 64)
    assert equal(train(small.model(), data, eval_data=held, remote=small.url), alone_at_more)
    small.set(faults=["", "", "", "", "evicted", "cut"])
    assert equal(train(small.model(), data, steps=5, remote=small.url), alone)


def test_a_cut_training_on_a_server_goes_on(small, tmp_path, monkeypatch):
    path, calm = tmp_path / "run.ckpt", train(small.model(), remote=small.url)
    monkeypatch.setattr(requests, "MOST_BATCHES", 2)
    small.set(faults=["", "", "", "", *["evicted"] * 5])
    with pytest.raises(LayersimError, match="does not respond") as caught:
        train(small.model(), remote=small.url, checkpoint=path)
    assert any(str(path) in note for note in caught.value.__notes__)
    small.set()
    assert equal(train(small.model(), remote=small.url, checkpoint=path), calm)


def test_a_step_that_takes_too_long_is_refused(small):
    small.set(most_batches=0)
    with pytest.raises(LayersimError, match=r"exceeds the server's time limit for a job(.|\n)*batch_size=2"):
        train(small.model(), remote=small.url)


@pytest.mark.heavy("a server with a socket")
def test_no_training_in_a_sandbox(small, monkeypatch):
    from tl_layersim.remote.source import RemoteSource

    plain = RemoteSource._ask_offer
    monkeypatch.setattr(RemoteSource, "_ask_offer", lambda self: replace(plain(self), trusted=False))
    with pytest.raises(LayersimError, match=r"`model`.*llama"):
        train(small.model(), remote=small.url)
