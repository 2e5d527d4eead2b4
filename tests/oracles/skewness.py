"""Uncertainty of a jackknifed statistic, block by block in plain Python: moments, and Hall's interval by bisection."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy import stats


def moments(without: Sequence[float], changed: int | None = None) -> tuple[float, float, float]:
    """Standard error, skewness and effective degrees of freedom of a statistic.

    Args:
        without: the statistic without each block.
        changed: number of blocks that change the statistic; None for all.
    """
    blocks = len(without)
    changed = blocks if changed is None else changed
    middle = sum(without) / blocks
    contributions = [middle - one for one in without]
    second = sum(d**2 for d in contributions)
    third = sum(d**3 for d in contributions)
    fourth = sum(d**4 for d in contributions)
    kurtosis = changed * fourth / second**2
    effective = 2 * changed / (kurtosis - 1) if kurtosis > 1 else math.inf
    return math.sqrt((blocks - 1) / blocks * second), third / second**1.5, min(changed - 1, effective)


def transformed(ratio: float, skew: float) -> float:
    """Hall's cubic transformation of the studentised statistic (Hall 1992)."""
    return ratio + skew * ratio**2 / 3 + skew**2 * ratio**3 / 27 + skew / 6


def inverse(quantile: float, skew: float) -> float:
    """The ratio whose transformation is the quantile, by bisection: the cubic is monotone."""
    low, high = -1e6, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if transformed(middle, skew) < quantile else (low, middle)
    return (low + high) / 2


def ends(value: float, error: float, degrees: float, skew: float, effective: float, level: float = 0.95) -> tuple[float, float]:
    """Ends of the interval without bounds: on each side the farther one of Student's t and of Hall's."""
    t = stats.t.ppf((1 + level) / 2, degrees) * error
    quantile = stats.t.ppf((1 + level) / 2, effective)
    low = value - inverse(quantile, skew) * error
    high = value - inverse(-quantile, skew) * error
    return min(value - t, low), max(value + t, high)


def p_value(value: float, error: float, degrees: float, skew: float, effective: float) -> float:
    """The larger of the p-values of Student's t and of Hall's test that the statistic is 0."""
    ratio = value / error
    plain = 2 * stats.t.sf(abs(ratio), degrees)
    corrected = transformed(ratio, skew)
    return max(plain, 2 * stats.t.sf(max(corrected * math.copysign(1, ratio), 0), effective))
