"""A real NDIF server whose models are in bfloat16."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.training import train_adapters

from ..running.options import called
from .client import furthest, load, rows
from .conftest import ask_for, started

pytestmark = [pytest.mark.timeout(1200), pytest.mark.filterwarnings("ignore:.*:UserWarning")]
ANALYZERS = [
    lsim.Cosine(),
    lsim.CKA(minibatch=64),
    lsim.Trajectory(),
    lsim.NeuralCollapse(),
    lsim.LogitLens(),
    lsim.Saturation(),
    lsim.ExitCurve(),
]


@pytest.fixture(scope="module")
def server(hub):
    with started("half", dtype="bfloat16") as half_precision:
        yield half_precision


def test_sums_of_half_precision_are_as_here(server, monkeypatch):
    data = rows(12, 60)
    here = lsim.analyze(load("tests/llama", torch.bfloat16), lsim.Data(data, batch_size=4), ANALYZERS)
    exact = lsim.analyze(load("tests/llama", torch.float32), lsim.Data(data, batch_size=4), ANALYZERS)
    for kind in ("trusted", "sandboxed"):
        with monkeypatch.context() as patch:
            ask_for(kind, patch)
            # A sandbox starts a process for each request: few requests.
            options = {"remote": server.url, "batch_size": 4, "tokens_per_request": 4000}
            report = called(lsim.analyze, load("tests/llama"), data, ANALYZERS, **options)
        # Equal activations give equal sums only if the sums are not in bfloat16.
        assert furthest(report, here) < 1e-6
        assert report["cosine"].provenance.dtype == "torch.bfloat16"
        assert float((report["cosine"].values - exact["cosine"].values).abs().max()) < 2e-2
        assert float((report["cka"].values - exact["cka"].values).abs().max()) < 5e-2


def test_many_steps_of_adapters_in_a_request(server):
    data = rows(12, 40)
    options = {"rank": 3, "batch_size": 4, "at": [0, 2], "lr": 0.02, "steps": 12, "eval_data": rows(5, 40, seed=9)}
    there = called(train_adapters, load("tests/llama"), data, remote=server.url, **options)
    here = called(train_adapters, load("tests/llama", torch.bfloat16), data, **options)
    assert there.down.dtype == torch.float32
    assert there.provenance.dtype == "torch.bfloat16"
    # The probe, the lens, looks before and after of two batches each, and steps many of which share a request.
    assert there.provenance.options["remote"][0]["requests"] < 2 + 4 + 12
    torch.testing.assert_close(there.curves, here.curves, rtol=0, atol=2e-2)
