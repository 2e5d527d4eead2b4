"""Intervals in figures of many models: grids, groups, and coupling across models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tl_layersim as lsim
from tl_layersim.analysis import plot_adjacency
from tl_layersim.core.intervals import headline_lines, headline_margins, margin_text

from ..tiny_models import random_tokens, tiny_llama
from .helpers import assert_whiskers, bands, line_of, texts


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
    for i, row in zip(grid.order, heat.customdata, strict=True):
        for j, cell in zip(grid.order, row, strict=True):
            assert cell[2] == f" ({low[i, j]:.4f} to {high[i, j]:.4f})"
            assert tuple(cell[:2]) == (grid.models[i], grid.models[j])
    assert f"largest = {margin_text(grid.headline()['largest'], headline_margins(grid)['largest'])}" in repr(grid)


def test_a_comparison_of_groups_has_intervals_and_one_p_value(grid):
    found = grid.compare_groups()
    inside, apart = [(0, 2), (1, 3)], [(0, 1), (0, 3), (1, 2), (2, 3)]

    def difference(one: Any) -> Tensor:
        mean = [torch.stack([one.values[pair] for pair in pairs]).mean() for pairs in (inside, apart)]
        return mean[1] - mean[0]

    expected = grid.interval(difference)
    assert found.difference == pytest.approx(float(expected.value))
    margins = headline_margins(found)
    assert margins["difference"] == pytest.approx(float(expected.high - expected.low) / 2)
    # All data has one p-value.
    assert "±" not in repr(found).split("  p (")[1]
    fig = found.plot()
    note = fig.layout.title.subtitle.text.replace("<br>", " ")
    assert f"Difference of means {found.difference:.3g} ± {margins['difference']:.2g} (" in note
    assert f"p = {found.p_value:.2g} (" in note
    _, low, high, _ = found.interval("distances")
    box = next(trace for trace in fig.data if trace.name == "x and y")
    assert list(box.customdata) == [f" ({low[i, j]:.4f} to {high[i, j]:.4f})" for i, j in apart]
    assert box.hovertemplate == "%{y:.4f}%{customdata}<extra></extra>"
    means = found.interval("mean")
    np.testing.assert_allclose(
        means.low[0], grid.interval(lambda one: torch.stack([one.values[p] for p in inside]).mean()).low, rtol=1e-12
    )


def test_groups_by_layer_have_whiskers_beside_the_bands_of_the_spread(grid):
    curves = grid.groups_by_layer()
    expected = grid.interval(lambda one: torch.stack([one["a", "c"].values.diagonal()]).mean(0))
    found = curves.interval("mean")
    np.testing.assert_allclose(found.low[0], expected.low, rtol=1e-12)
    fig = curves.plot()
    assert len(bands(fig)) == 3
    for n, name in enumerate(curves.comparisons):
        line = line_of(fig, name)
        assert_whiskers(line.error_y, line.y, found.low[n].numpy(), found.high[n].numpy())
        assert [own[1] for own in line.customdata] == texts(found.low[n].numpy(), found.high[n].numpy())
    assert repr(curves).splitlines()[1:] == [f"  {line}" for line in headline_lines(curves)]


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
