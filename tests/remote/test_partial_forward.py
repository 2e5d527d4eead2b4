"""Stitching models on a server."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim

from ..ndif.client import rows
from ..running.options import called
from .helpers import here


@pytest.mark.parametrize("at", [("blocks.0.hook_resid_pre", "blocks.0.hook_resid_pre"), (1, 0), (-1, -1)])
def test_stitched_there_as_here(small, at, capfd):
    options = {"at": at, "adapter": "affine", "fit": "lstsq", "batch_size": 8}
    data = rows(24, 20)
    expected = called(lsim.stitch, here(small, "llama"), here(small, "gpt2"), data, **options)
    capfd.readouterr()
    found = called(lsim.stitch, small.model("llama"), small.model("gpt2"), data, remote=small.url, **options)
    assert "kB of activations" in capfd.readouterr().err
    assert found.loss == pytest.approx(expected.loss, abs=1e-6)
    assert found.back_loss == pytest.approx(expected.back_loss, abs=1e-6)
    torch.testing.assert_close(found.weight, expected.weight, rtol=1e-4, atol=1e-5)
    assert "NDIF" in found.provenance.source
    # Each side does the same here as in the first call, and there as in the second.
    for sides in ((True, False), (False, True)) if at == (1, 0) else ():
        models = [
            (small.model if far else lambda name: here(small, name))(name)
            for far, name in zip(sides, ("llama", "gpt2"), strict=True)
        ]
        mixed = called(lsim.stitch, *models, data, remote=tuple(small.url if far else False for far in sides), **options)
        assert mixed.loss == pytest.approx(expected.loss, abs=1e-6)


@pytest.mark.heavy("a server with a socket")
def test_an_adapter_is_trained_through_a_trusted_server(small):
    options = {"at": (1, 1), "adapter": "affine-norm", "fit": "sgd", "batch_size": 8}
    options |= {"training": lsim.stitching.StitchTraining(steps=6, warmup=2)}
    data = rows(24, 20)
    expected = called(lsim.stitch, here(small, "llama"), here(small, "gpt2"), data, **options)
    small.set()
    found = called(lsim.stitch, small.model("llama"), small.model("gpt2"), data, remote=small.url, **options)
    torch.testing.assert_close(found.curve, expected.curve, rtol=1e-5, atol=1e-5)
    assert found.loss == pytest.approx(expected.loss, abs=1e-5)


def test_no_training_through_a_sandbox(small, monkeypatch):
    from dataclasses import replace

    from tl_layersim.remote.source import RemoteSource

    plain = RemoteSource._ask_offer
    monkeypatch.setattr(RemoteSource, "_ask_offer", lambda self: replace(plain(self), trusted=False))
    with pytest.raises(lsim.LayersimError, match=r"`fit`.*sandbox.*fit='lstsq'"):
        lsim.stitch(
            here(small, "llama"), lsim.open_model(small.model("gpt2"), remote=small.url), rows(24, 20), at=(0, 0), fit="sgd"
        )
    found = lsim.stitch(
        here(small, "llama"),
        lsim.open_model(small.model("gpt2"), remote=small.url),
        lsim.Data(rows(24, 20), batch_size=4),
        at=(0, 0),
    )
    assert found.fit == "lstsq"
