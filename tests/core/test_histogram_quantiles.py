"""Quantiles from histograms."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tl_layersim.core.intervals import quantiles_from_histogram


@pytest.mark.parametrize("bins", [10, 2000])
def test_quantiles_are_within_a_bin(bins):
    rng = np.random.default_rng(1)
    values = rng.uniform(-1, 1, size=5000)
    histogram = torch.tensor(np.histogram(values, bins=bins, range=(-1, 1))[0])[None]
    levels = (0.0, 0.05, 0.5, 0.95, 1.0)

    quantiles = quantiles_from_histogram(histogram, -1.0, 1.0, levels)[:, 0]

    np.testing.assert_allclose(quantiles, np.quantile(values, levels, method="inverted_cdf"), atol=2 / bins)


def test_quantiles_of_ties_and_of_nothing():
    histogram = torch.tensor([[0, 7, 0, 0], [0, 0, 0, 0]])
    quantiles = quantiles_from_histogram(histogram, 0.0, 4.0, (0.0, 0.5, 1.0))
    assert ((quantiles[:, 0] >= 1) & (quantiles[:, 0] <= 2)).all()
    assert quantiles[:, 1].isnan().all()
