"""Naive float64 NumPy, written from the formulas and from nothing else. `oracle_<name>` gives every field of an analyzer.

`batches` is a list of `layer token d_model`; loops are meant.
"""

from __future__ import annotations

import numpy as np

from .common import cosine_of, next_of


def oracle_neural_collapse(
    batches: list[np.ndarray], labels: list[int | None] | None = None, classes: int = 10, weight: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    x = np.concatenate(batches, axis=1)
    labels = labels or next_of(batches)
    counted = {c: labels.count(c) for c in labels if c is not None}
    chosen = sorted(counted, key=lambda c: (-counted[c], c))[:classes]
    nc1, within, between, nc2, equinorm, nc3 = [], [], [], [], [], []
    for layer in x:
        groups = [np.array([layer[t] for t in range(len(labels)) if labels[t] == c]) for c in chosen]
        everything = np.concatenate(groups)
        means = [group.mean(0) for group in groups]
        s_w = sum(np.outer(h - m, h - m) for group, m in zip(groups, means, strict=True) for h in group) / len(everything)
        s_b = sum(np.outer(m - everything.mean(0), m - everything.mean(0)) for m in means) / len(chosen)
        m = [mean - everything.mean(0) for mean in means]
        k = len(m)
        nc2.append(np.mean([abs(cosine_of(m[a], m[b]) + 1 / (k - 1)) for a in range(k) for b in range(k) if a != b]))
        equinorm.append(np.std([np.linalg.norm(v) for v in m]) / np.mean([np.linalg.norm(v) for v in m]))
        if weight is not None:
            w = np.array([weight[c] for c in chosen])
            w = w - w.mean(0)
            nc3.append(np.sum((w / np.sqrt(np.sum(w**2)) - np.array(m) / np.sqrt(np.sum(np.array(m) ** 2))) ** 2))
        nc1.append(np.trace(s_w @ np.linalg.pinv(s_b, rcond=1e-12)) / len(chosen))
        within.append(np.trace(s_w))
        between.append(np.trace(s_b))
    return {
        "values": np.array(nc1),
        "nc2": np.array(nc2),
        "equinorm": np.array(equinorm),
        "nc3": np.array(nc3) if nc3 else np.full(len(x), np.nan),
        "within": np.array(within),
        "between": np.array(between),
        "samples": np.array([counted[c] for c in chosen], dtype=float),
    }
