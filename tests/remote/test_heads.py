"""Heads of layers on a server: kernels carry them, up to a size."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.engine import run_arguments
from tl_layersim.lens import ExitHeads

from ..ndif.client import furthest, rows
from .helpers import local


def heads(**options) -> ExitHeads:
    torch.manual_seed(0)
    return ExitHeads(torch.randn(2, 100, 32), torch.randn(2, 100), **options)


@pytest.mark.parametrize("norm", ["final", "none"])
def test_layers_are_read_there_as_here(small, norm):
    own = {"norm": norm, "heads": heads(norm=norm)}
    analyzers = [lsim.Saturation(**own), lsim.LogitLens(**own), lsim.ExitCurve(**own)]
    far = lsim.analyze(lsim.open_model(small.model(), remote=small.url), lsim.Data(rows(6, 20), batch_size=4), analyzers)
    assert furthest(far, local(small, rows(6, 20), analyzers, batch_size=4)) < 1e-6
    assert far["saturation"].provenance.options["heads"] == str(own["heads"])


@pytest.mark.light
def test_a_refusal_of_the_kernel_arrives(small):
    other = ExitHeads(torch.randn(2, 90, 32))
    with pytest.raises(lsim.LayersimError, match=r"`heads`.*\(2, 90, 32\).*\(2, 100, 32\)"):
        lsim.analyze(lsim.open_model(small.model(), remote=small.url), rows(2, 8), lsim.LogitLens(heads=other))


def test_large_heads_are_refused_before_anything_is_sent(small, monkeypatch):
    monkeypatch.setattr(run_arguments, "LARGEST_HEADS", 10_000)
    with pytest.raises(lsim.LayersimError, match=r"`heads`.*Saturation.*10\.0 kB"):
        lsim.analyze(
            lsim.open_model(small.model(), remote=small.url), rows(2, 8), lsim.Saturation(heads=heads(), center="dataset")
        )
