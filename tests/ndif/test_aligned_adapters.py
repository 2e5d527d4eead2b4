"""Adapters trained through a real NDIF server, and applied in traces there."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.training import train_adapters

from ..running.options import called
from .client import load, rows

pytestmark = [pytest.mark.timeout(1200), pytest.mark.filterwarnings("ignore:.*:UserWarning")]
OPTIONS = {"rank": 3, "batch_size": 4, "at": [0, 2], "lr": 0.02}


@pytest.mark.parametrize("name", ["tests/llama", "tests/gpt2"])
def test_trained_there_as_here_and_applied(name, server, trust, tmp_path):
    data, held = rows(12, 40), rows(5, 40, seed=9)
    expected = called(train_adapters, load(name, torch.float32), data, steps=3, eval_data=held, **OPTIONS)
    if trust == "sandboxed":
        with pytest.raises(lsim.LayersimError, match=r"`model`.*sandbox"):
            called(train_adapters, load(name), data, steps=3, eval_data=held, remote=server.url, **OPTIONS)
    else:
        found = called(train_adapters, load(name), data, steps=3, eval_data=held, remote=server.url, **OPTIONS)
        for field in ("curves", "losses", "down", "up"):
            ours, theirs = getattr(found, field).double(), getattr(expected, field).double()
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
        assert found.provenance.options["remote"][0]["trusted"]
        again = called(train_adapters, load(name), data, steps=3, eval_data=held, remote=server.url, **OPTIONS)
        assert all(torch.equal(getattr(again, field), getattr(found, field)) for field in found.tensor_fields())
    # What was trained can be applied on either.
    expected.save(tmp_path / "adapters.safetensors")
    adapters = lsim.load(tmp_path / "adapters.safetensors")
    tokens = data["input_ids"][:2, :10]
    model, here = load(name), load(name, torch.float32)
    with torch.no_grad(), model.trace(tokens, remote=server.url):
        adapters.apply(model)
        there = model.lm_head.output.save()
    with torch.no_grad(), here.trace(tokens):
        plain = here.lm_head.output.save()
    with torch.no_grad(), here.trace(tokens):
        adapters.apply(here)
        own = here.lm_head.output.save()
    torch.testing.assert_close(there, own, rtol=0, atol=1e-5)
    assert float((own - plain).abs().max()) > 1e-3
