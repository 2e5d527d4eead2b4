"""Intervals in figures of many models: grids, groups, and coupling across models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tl_layersim as lsim
from tl_layersim.many import plot_adjacency

from ..models.tiny_models import random_tokens, tiny_llama
from .helpers import bands


@pytest.fixture(scope="module")
def grid():
    models = {name: tiny_llama(layers=2, seed=seed) for seed, name in enumerate("abcd")}
    return lsim.compare_grid(
        models,
        lsim.Data(random_tokens(256, 8), batch_size=16),
        lsim.CKA(minibatch=8),
        groups=["x", "y", "x", "y"],
        intervals=True,
    )


def test_cells_of_a_grid_of_models_name_their_intervals_in_the_order_of_the_dendrogram(grid):
    _, low, high, _ = grid.interval("distance")
    heat = grid.plot().data[0]
    for row in heat.customdata:
        for first, second, text in row:
            i, j = grid.models.index(first), grid.models.index(second)
            assert text == f" ({low[i, j]:.4f} to {high[i, j]:.4f})"


def test_a_comparison_of_groups_has_intervals(grid):
    found = lsim.many.compare_groups(grid)
    inside, apart = [(0, 2), (1, 3)], [(0, 1), (0, 3), (1, 2), (2, 3)]

    def difference(one: Any) -> Tensor:
        mean = [torch.stack([one.values[pair] for pair in pairs]).mean() for pairs in (inside, apart)]
        return mean[1] - mean[0]

    expected = grid.interval(difference)
    assert float(found["difference"]) == pytest.approx(float(expected.value))
    np.testing.assert_allclose([found["difference_low"], found["difference_high"]], [expected.low, expected.high], rtol=1e-9)
    within = grid.interval(lambda one: torch.stack([one.values[p] for p in inside]).mean())
    np.testing.assert_allclose(found["mean_low"][0], within.low, rtol=1e-12)


def test_groups_by_site_have_intervals_beside_the_bands_of_the_spread(grid):
    found = lsim.many.compare_groups(grid, field="by_site")
    expected = grid.interval(lambda one: torch.stack([one["a", "c"].values.diagonal()]).mean(0))
    np.testing.assert_allclose(found["mean_low"].sel(comparison="within x"), expected.low, rtol=1e-12)
    assert len(bands(lsim.plot(found))) == 3


@pytest.fixture(scope="module")
def coupling():
    data = random_tokens(16)[:, :4]
    report = lsim.analyze(tiny_llama(layers=2), lsim.Data(data, batch_size=1), [lsim.BlockCoupling(k=2)], intervals=True)
    return report["block_coupling"]


def test_the_figure_of_block_adjacency_shows_intervals(coupling):
    plain = replace(coupling, replicates=(), block_tokens=())

    def strength(one: Any) -> Tensor:
        beyond = ((one.null - one.values) / one.null.clamp(min=1e-9)).nan_to_num(0)
        return ((beyond[0, 1] + beyond[1, 0]) / 2).clamp(0, 1)

    edge = next(trace for trace in plot_adjacency(coupling).data if trace.mode == "markers")
    own = coupling.interval(strength)
    assert edge.customdata[0][3] == f" ({own.low:.3f} to {own.high:.3f})"
    assert "%{customdata[2]:.3f}%{customdata[3]} beyond chance" in edge.hovertemplate
    assert next(t for t in plot_adjacency(plain).data if t.mode == "markers").customdata[0][3] == ""
