"""Quantiles from histograms: counts add up over batches, quantiles do not."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .argument_checks import typed

# The quantiles that results report.
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@typed
def quantiles_from_histogram(histogram: Tensor, low: float, high: float, quantiles: tuple[float, ...]) -> Tensor:
    """Compute quantiles of values that were counted in equal bins between `low` and `high`.

    Values are assumed to be uniform within a bin, so the error is below one bin width.

    Args:
        histogram: counts, `... bin`.
        low: left edge of the first bin.
        high: right edge of the last bin.
        quantiles: each between 0 and 1.

    Returns:
        `quantile ...`, float64; NaN where a histogram is empty.

    Examples:
        >>> quantiles_from_histogram(torch.tensor([[1, 1, 1, 1]]), 0.0, 4.0, (0.5,))
        tensor([[2.]], dtype=torch.float64)
    """
    bins = histogram.shape[-1]
    counts = histogram.to(torch.float64)
    cumulative = counts.cumsum(-1)
    total = cumulative[..., -1:]
    out = []
    for quantile in quantiles:
        target = quantile * total
        # The first bin that is not empty and whose cumulative count reaches the target.
        index = ((cumulative < target) | (cumulative == 0)).sum(-1, keepdim=True).clamp(max=bins - 1)
        before = cumulative.gather(-1, index) - counts.gather(-1, index)
        fraction = (target - before) / counts.gather(-1, index)
        out.append((low + (index + fraction) * ((high - low) / bins)).squeeze(-1).masked_fill(total.squeeze(-1) == 0, math.nan))
    return torch.stack(out)
