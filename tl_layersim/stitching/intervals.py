"""Means over tokens with confidence intervals over batches."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor


class Interval(NamedTuple):
    """A mean over tokens with its confidence interval over batches."""

    value: float
    low: float
    high: float


def over_batches(sums: Tensor, tokens: Tensor, confidence: float) -> Interval:
    """A ratio of sums over batches, and its confidence interval.

    Batches are the independent units: the variance is that of a ratio of sums (linearised), with Student's t for their number;
    NaN for fewer than two.

    Args:
        sums: `batch`, sums of the averaged quantity.
        tokens: `batch`, numbers of tokens.
        confidence: the level, such as 0.95.

    Source:
        Cochran 1977, Sampling Techniques, section 2.11.

    Examples:
        >>> import torch
        >>> over_batches(torch.tensor([2.0, 4.0]).double(), torch.tensor([2.0, 2.0]).double(), 0.95).value
        1.5
    """
    from scipy.stats import t

    count = len(tokens)
    value = float(sums.sum() / tokens.sum())
    if count < 2:
        return Interval(value, math.nan, math.nan)
    spread = (sums - value * tokens).square().sum() * count / (count - 1)
    margin = float(t.ppf(0.5 + confidence / 2, count - 1)) * float(spread.sqrt() / tokens.sum())
    return Interval(value, value - margin, value + margin)
