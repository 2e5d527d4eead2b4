"""Figures of coupled Jacobians on one prompt: which side is the Jacobian, and labels of blocks and tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analysis import plot_adjacency
from tl_layersim.reporting.colour_scales import end_above
from tl_layersim.reporting.connections import connection_labels

from ..tiny_models import random_tokens, tiny_llama

TOKENS = ("Once", " upon", " a")


def test_labels_say_what_differs_and_the_rest_is_said_once():
    depth = connection_labels(("0: 2 > 2", "1: 2 > 2"), TOKENS)
    assert depth[0] == ["0", "1"]
    assert depth[2:] == ('token 2 "·a" on itself', "block")
    own = connection_labels(("3: 0 > 0", "3: 1 > 1"), TOKENS)
    assert own[0] == ["0 Once", "1 ·upon"]
    assert own[2:] == ("block 3, each token on itself", "token")
    later = connection_labels(("3: 0 > 1", "3: 0 > 2"), TOKENS)
    assert later[0] == ["1 ·upon", "2 ·a"]
    assert later[2:] == ('block 3, effect of token 0 "Once" on later tokens', "token")
    earlier = connection_labels(("1: 0 > 2", "1: 1 > 2", "2: 0 > 2"), TOKENS)
    assert earlier[0] == ["1: 0 Once", "1: 1 ·upon", "2: 0 Once"]
    assert earlier[2:] == ('effect of earlier tokens on token 2 "·a"', "block and token")
    assert earlier.full[1] == 'block 1, token 1 "·upon" on token 2 "·a"'


def test_a_row_of_tiles_is_a_jacobian_and_a_column_a_basis():
    model, row = tiny_llama(layers=2).double(), random_tokens(1, 6)[0]
    found = lsim.coupling_matrices(model, row, k=3)
    jacobians = lsim.block_jacobians(model, row).values[:, 0]
    u, _, v = torch.linalg.svd(jacobians)
    expected = (u[1][:, :3].T @ jacobians[0] @ v[1][:3].T).abs()
    fig = found.plot()
    heat = fig.data[0]
    tile = np.array(heat.z)[:3, 4:7]
    # All tiles of a row are shares of the largest singular value of its Jacobian, on one scale.
    np.testing.assert_allclose(tile, expected / torch.linalg.svdvals(jacobians[0]).max(), atol=1e-6)
    own = np.array(heat.z)[:3, :3]
    assert own.max() == pytest.approx(1.0)
    assert heat.zmax == min(1.0, end_above(max(np.nanmax(np.array(heat.z)[:3, 4:]), np.nanmax(np.array(heat.z)[4:, :3]))))
    assert fig.layout.title.text == "Do blocks share singular directions?"
    assert heat.y[0].startswith("block 0")
    assert heat.x[4].startswith("block 1")
    assert np.isnan(np.array(heat.z)[3]).all()
    assert (fig.layout.yaxis.title.text, fig.layout.xaxis.title.text) == ("Jacobian of block l", "Singular vectors of block l'")
    assert list(fig.layout.xaxis.ticktext) == ["0", "1"]
    assert fig.layout.xaxis.tickvals[1] == heat.x[5]
    assert "k = 3; mean coupling of different connections" in fig.layout.title.subtitle.text
    matrix = found.plot("coupling").data[0]
    assert matrix.z[0][1] == float(found.coupling[0, 1])
    assert np.isnan(matrix.z[0][0])
    assert matrix.customdata[0][1][0].startswith("block 0")


def test_block_coupling_names_its_sides_and_leaves_its_diagonal_out():
    found = lsim.analyze(tiny_llama(layers=2), random_tokens(4)[:, :4], lsim.BlockCoupling(k=2))["block_coupling"]
    fig = found.plot()
    assert (fig.layout.yaxis.title.text, fig.layout.xaxis.title.text) == ("Jacobian of block l", "Singular vectors of block l'")
    assert np.isnan(np.diagonal(np.array(fig.data[0].z))).all()
    assert fig.data[0].z[0][1] == float(found.coupling[0, 1])
    assert f"Random vectors give {found.mean('null_coupling'):.2f}." in fig.layout.title.subtitle.text
    network = plot_adjacency(found)
    assert any(trace.marker.colorbar.title.text == "Coupling beyond chance (1: full)" for trace in network.data)
