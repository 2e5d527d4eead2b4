"""The warning that texts which follow each other are alike: how often independent texts have it, and alike ones do not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tl_layersim.activations.row_pools import Samples
from tl_layersim.activations.text_order import DIRECTIONS, neighbour_correlations_of_texts, neighbour_products
from tl_layersim.core import Sums
from tl_layersim.engine.report_assembly import correlation_by_chance, notes_on_order

POOL = 16
SIMULATIONS = 200


def sums_of(means: Tensor) -> Sums:
    """Sums over pools of 16 texts of the means of texts, `site text direction`."""
    total = Sums()
    for start in range(0, means.shape[1], POOL):
        pool = means[:, start : start + POOL]
        row = torch.arange(pool.shape[1])
        total = total + Sums.of(neighbour_products([pool], [()], Samples(row, torch.zeros_like(row), row, row), {}))
    return total


def warned(means: Tensor) -> bool:
    return bool(notes_on_order(sums_of(means), ["cosine"]))


def in_one_dimension(sites: int, texts: int, generator: torch.Generator) -> Tensor:
    """Means of texts that differ in one dimension, so that all directions have one correlation: those that vary most."""
    return torch.randn(sites, texts, 1, generator=generator, dtype=torch.float64).repeat(1, 1, DIRECTIONS)


@pytest.mark.parametrize("sites", [1, 25, 64])
@pytest.mark.parametrize("texts", [32, 128])
def test_independent_texts_are_rarely_called_alike_at_any_number_of_sites(sites, texts):
    generator = torch.Generator().manual_seed(0)
    rate = sum(warned(in_one_dimension(sites, texts, generator)) for _ in range(SIMULATIONS)) / SIMULATIONS
    # Of a rate of .05, more once in a thousand.
    assert rate <= 0.05 + 3.1 * math.sqrt(0.05 * 0.95 / SIMULATIONS)


def test_documents_of_four_rows_are_called_alike():
    """A document has 20 % of the variance at one of 25 sites."""
    generator = torch.Generator().manual_seed(0)
    rate = 0
    for _ in range(20):
        means = torch.randn(25, 256, DIRECTIONS, generator=generator, dtype=torch.float64)
        document = torch.randn(64, DIRECTIONS, generator=generator, dtype=torch.float64).repeat_interleave(4, 0)
        means[7] = math.sqrt(0.5) * means[7] + math.sqrt(0.5) * document
        rate += warned(means) / 20

    assert rate > 0.9


def test_the_correlation_is_that_of_neighbours_in_a_pool():
    means = torch.randn(2, 40, DIRECTIONS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    correlations = neighbour_correlations_of_texts(sums_of(means).fields)
    centred = means - means.mean(1, keepdim=True)
    # 40 texts are pools of 16, 16 and 8.
    pairs = [number for number in range(39) if number % POOL != POOL - 1]

    for site, vectors in enumerate(centred):
        of_directions = [
            sum(vectors[number, d] * vectors[number + 1, d] for number in pairs) / len(pairs) / (vectors[:, d] ** 2).mean()
            for d in range(DIRECTIONS)
        ]
        assert float(correlations[site]) == pytest.approx(float(sum(of_directions)) / DIRECTIONS, rel=1e-9)
    assert not len(neighbour_correlations_of_texts(sums_of(means[:, :2]).fields))

    means[1] = 1.0
    assert len(neighbour_correlations_of_texts(sums_of(means).fields)) == 1


def test_the_bound_grows_with_sites_and_falls_with_pairs():
    assert correlation_by_chance(100, 1) == pytest.approx(0.2)
    assert correlation_by_chance(400, 1) == pytest.approx(0.1)
    # The quantiles of the normal distribution at 1 - .05 / 10 and 1 - .05 / 1000.
    assert correlation_by_chance(100, 10) == pytest.approx(0.25758, abs=1e-5)
    assert correlation_by_chance(100, 1000) == pytest.approx(0.38906, abs=1e-5)
