"""The headline of cosine similarity, and its options at their limits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import tl_layersim as lsim

from .. import oracles
from ..views import from_views, residuals, view


def test_the_headline_is_of_the_last_column():
    x = residuals(2)
    x[1] = -x[3] + 0.1 * x[0]
    found = from_views(lsim.Cosine(center="none"), [view(x)])
    expected = oracles.oracle_cosine([x], center="none")
    to_last = expected["values"][:, -1]
    rises = [b > a for a, b in itertools.pairwise(to_last)]
    # From layer 0 to 1 it falls, then it rises twice.
    assert rises == [False, True, True]
    assert list(found.headline().values()) == pytest.approx([to_last[0], to_last[2], 2 / 3, float(expected["monotone_share"])])


def test_two_bins_are_enough():
    x = residuals(0)
    found = from_views(lsim.Cosine(center="none", histogram_bins=2), [view(x)])
    # Quantiles read from two bins are at best of the right sign.
    expected = oracles.oracle_cosine([x], center="none")["adjacent"]
    assert (np.abs(found.adjacent.numpy() - expected) <= 1).all()


def test_an_update_of_zero_has_an_infinite_ratio():
    """The difference of equal vectors has norm 0, not -0, by which the ratio would be -inf."""
    x = residuals(3)
    x[1] = x[0]
    found = from_views(lsim.Cosine(center="none"), [view(x)])
    assert float(found.norm_ratio[0]) == float("inf")
    # The last bin of the histograms ends at 1e8.
    assert (found.norm_ratio_quantiles[:, 0] > 9e7).all()
    assert found.norm_ratio[1:].isfinite().all()
