"""Trajectories of a single token."""

from __future__ import annotations

import numpy as np

import tl_layersim as lsim

from .. import oracles
from ..views import from_views, residuals, view


def test_one_token_has_a_path():
    x = residuals(0, tokens=1)
    found = from_views(lsim.Trajectory(window=2), [view(x)])
    expected = oracles.oracle_trajectory([x], 2)
    for name in ("values", "update_norm", "growth", "lss_mean", "expodistance_mean", "equidistance_mean", "windowed_lss"):
        np.testing.assert_allclose(getattr(found, name), expected[name], rtol=1e-9, err_msg=name)
    # Rounding under a square root.
    np.testing.assert_allclose(found.lss_std, 0, atol=1e-6)
