"""Naive float64 NumPy of a user's function of samples, averaged over minibatches."""

from __future__ import annotations

import numpy as np

from .common import no_null


def kernel_alignment(x: np.ndarray, y: np.ndarray) -> float:
    """Inner product of two kernels over the power of the first: not symmetric, and the same in any order of samples."""
    numerator = 0.0
    power = 0.0
    for i in range(len(x)):
        for j in range(len(x)):
            numerator += (x[i] @ x[j]) * (y[i] @ y[j])
            power += (x[i] @ x[j]) ** 2
    return numerator / power


def oracle_similarity(
    batches: list[np.ndarray], others: list[np.ndarray] | None = None, rows: int = 1
) -> dict[str, np.ndarray]:
    """Each batch of four texts or more, of `rows` tokens each, is one minibatch; its weight is its number of samples."""
    others = batches if others is None else others
    height, width = len(batches[0]), len(others[0])
    total, samples = np.zeros((height, width)), 0
    for batch, other in zip(batches, others, strict=True):
        count = batch.shape[1]
        if -(-count // rows) < 4:
            continue
        for a in range(height):
            for b in range(width):
                total[a, b] += count * kernel_alignment(batch[a], other[b])
        samples += count
    return {"values": total / samples} | no_null(height, width)
