"""Whether texts that follow each other in the data are alike: sums for their lag-1 correlation.

Plain functions of torch: they are serialised by value with the kernels that call them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from .norms import unit_vectors
from .row_pools import TEXTS_OF_POOL, Draws, PoolKernel, Samples
from .view import View

# Random directions on which the activations of a text are projected.
DIRECTIONS = 8


def text_order_kernel() -> PoolKernel:
    """Kernel whose sums give the correlation between the mean activations of texts that follow each other."""
    return PoolKernel(row_means, True, TEXTS_OF_POOL, no_draws, partial(neighbour_products))


def row_means(view: View) -> Tensor:
    """Mean direction of the activations of each row, on `DIRECTIONS` random directions (`site row direction`).

    Args:
        view: activations of one forward pass.
    """
    width = view.activations.shape[-1]
    directions = torch.randn(width, DIRECTIONS, generator=torch.Generator().manual_seed(width))
    row, counts = torch.unique_consecutive(view.sequence, return_inverse=True, return_counts=True)[1:]
    means = []
    for x in view.activations:
        projected = unit_vectors(x)[0].float() @ directions.to(x.device)
        total = projected.new_zeros(len(counts), DIRECTIONS).index_add_(0, row.to(x.device), projected)
        means.append(total / counts.to(x.device)[:, None])
    return torch.stack(means)


def no_draws(samples: Samples) -> Draws:
    """All samples of a pool."""
    return {"all": [torch.arange(len(samples.row))]}


def neighbour_products(
    sides: Sequence[Tensor], widths: Sequence[tuple[int, ...]], samples: Samples, draws: Draws
) -> dict[str, Tensor]:
    """Sums over the texts of a pool, and over its pairs of texts that follow each other.

    Args:
        sides: means of rows of each model, `site row direction`.
        widths: widths of the sites.
        samples: the rows.
        draws: output of `no_draws`.

    Returns:
        `texts` and `pairs`, their numbers; `sum` and `square`, sums over texts, and `first`, `second` and `product`, sums over
        pairs, each `site direction`.
    """
    text, counts = torch.unique_consecutive(samples.text, return_inverse=True, return_counts=True)[1:]
    x = torch.cat([side.cpu().double() for side in sides])
    total = x.new_zeros(len(x), len(counts), x.shape[-1]).index_add_(1, text, x)
    means = total / counts[:, None]
    first = means[:, :-1]
    second = means[:, 1:]
    return {
        "texts": torch.tensor(len(counts)),
        "pairs": torch.tensor(len(counts) - 1),
        "sum": means.sum(1),
        "square": means.square().sum(1),
        "first": first.sum(1),
        "second": second.sum(1),
        "product": (first * second).sum(1),
    }


def bytes_of_neighbour_products(sites: int) -> int:
    """Size in bytes of the output of `neighbour_products`, as float64 and int64: two counts, and five sums.

    Args:
        sites: number of sites of all models.
    """
    return 8 * (2 + 5 * sites * DIRECTIONS)


def neighbour_correlations_of_texts(sums: Mapping[str, Tensor]) -> Tensor:
    """Correlation between texts that follow each other: the mean over directions, at each `site` where texts differ.

    It is near 0 for texts in random order, with a standard deviation of at most 1 / sqrt(number of pairs).

    Args:
        sums: summed output of `neighbour_products`.

    Returns:
        float64; empty for fewer than two pairs, or if all texts are alike.
    """
    texts = int(sums["texts"])
    pairs = int(sums["pairs"])
    mean = sums["sum"] / max(texts, 1)
    if pairs < 2:
        return mean.new_zeros(0)
    variance = sums["square"] / texts - mean.square()
    covariance = sums["product"] - mean * (sums["first"] + sums["second"]) + pairs * mean.square()
    # Below this share of the squared mean, the variance is rounding error: all texts are alike.
    differs = variance > 1e-12 * mean.square()
    correlations = (covariance / pairs / variance).where(differs, torch.nan).nanmean(1)
    return correlations[~correlations.isnan()]
