"""Naive float64 NumPy of the permutation null: the values of a measure on texts of one side in every possible order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

# From the samples of two sites, `sample d_model`, and the text of each sample.
Measure = Callable[[np.ndarray, np.ndarray, np.ndarray], float]


def positions_in_common(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each text the indices of its samples at positions that all texts have: the same place of the same row.

    Args:
        rows: numbers of samples of the rows of each text; the samples follow each other in this order.
    """
    in_common = [
        (row, place)
        for row in range(max(map(len, rows)))
        for place in range(min(text[row] if row < len(text) else 0 for text in rows))
    ]
    found, start = [], 0
    for text in rows:
        found.append([start + sum(text[:row]) + place for row, place in in_common])
        start += sum(text)
    return found


def exchanged_values(measure: Measure, x: np.ndarray, y: np.ndarray, grid: Sequence[Sequence[int]]) -> tuple[float, np.ndarray]:
    """The value of two sites in the true pairing of texts, and the values of all pairings.

    Args:
        measure: the measure.
        x: samples of the first site, `sample d_model`.
        y: samples of the second site.
        grid: for each text the indices of its samples, equally many.
    """
    text = np.repeat(np.arange(len(grid)), len(grid[0]))
    left = np.concatenate([x[list(own)] for own in grid])
    observed, values = np.nan, []
    for order in itertools.permutations(range(len(grid))):
        right = np.concatenate([y[list(grid[other])] for other in order])
        values.append(measure(left, right, text))
        if order == tuple(range(len(grid))):
            observed = values[-1]
    return observed, np.array(values)


def p_value(observed: float, values: np.ndarray) -> float:
    """Fraction of all pairings whose value is at least the observed one, which is one of them."""
    return float(np.mean(values >= observed - 1e-10))
