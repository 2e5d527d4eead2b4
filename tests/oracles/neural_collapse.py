"""Naive float64 NumPy, written from the formulas and from nothing else. `oracle_<name>` gives every field of an analyzer.

`batches` is a list of `layer token d_model`; loops are meant.
"""

from __future__ import annotations

import numpy as np

from .common import next_of


def oracle_neural_collapse(
    batches: list[np.ndarray], labels: list[int | None] | None = None, classes: int = 10
) -> dict[str, np.ndarray]:
    x = np.concatenate(batches, axis=1)
    labels = labels or next_of(batches)
    counted = {c: labels.count(c) for c in labels if c is not None}
    chosen = sorted(counted, key=lambda c: (-counted[c], c))[:classes]
    nc1, within, between = [], [], []
    for layer in x:
        groups = [np.array([layer[t] for t in range(len(labels)) if labels[t] == c]) for c in chosen]
        everything = np.concatenate(groups)
        means = [group.mean(0) for group in groups]
        s_w = sum(np.outer(h - m, h - m) for group, m in zip(groups, means, strict=True) for h in group) / len(everything)
        s_b = sum(np.outer(m - everything.mean(0), m - everything.mean(0)) for m in means) / len(chosen)
        nc1.append(np.trace(s_w @ np.linalg.pinv(s_b, rcond=1e-12)) / len(chosen))
        within.append(np.trace(s_w))
        between.append(np.trace(s_b))
    return {
        "values": np.array(nc1),
        "within": np.array(within),
        "between": np.array(between),
        "samples": np.array([counted[c] for c in chosen], dtype=float),
    }
