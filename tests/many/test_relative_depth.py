"""Fields of models of other depths at common relative depths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core import LayerMatrix
from tl_layersim.many.differences import at_depths, sites_along

from ..inputs.views import provenance


def test_rows_and_columns_have_their_own_sites():
    result = LayerMatrix(
        values=torch.zeros(2, 3, dtype=torch.float64), layers=("a", "b"), column_layers=("c", "d", "e"), provenance=provenance()
    )
    assert sites_along(result, "row") == sites_along(result, "residual") == ("a", "b")
    assert sites_along(result, "column") == ("c", "d", "e")


def test_values_are_interpolated_linearly_along_their_axis():
    values = torch.randn(3, 7, dtype=torch.float64)
    interpolated = at_depths(values, 1, 7, 5, "column")
    depth = np.linspace(0, 1, 7)

    for row, layer_values in zip(interpolated, values, strict=True):
        np.testing.assert_allclose(row, np.interp(np.linspace(0, 1, 5), depth, layer_values), rtol=1e-12)

    blocks = torch.randn(6, dtype=torch.float64)
    # Blocks have no entry at depth 0.
    np.testing.assert_allclose(
        at_depths(blocks, 0, 7, 4, "layer"), np.interp(np.linspace(0, 1, 4)[1:], depth[1:], blocks), rtol=1e-12
    )


def test_a_single_site_has_no_relative_depth():
    with pytest.raises(lsim.LayersimError, match=r"`relative_depth` is True.* 3\."):
        at_depths(torch.zeros(3).double(), 0, 3, 1, "residual")
