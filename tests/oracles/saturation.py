"""Naive float64 NumPy, written from the formulas and from nothing else. `oracle_<name>` gives every field of an analyzer.

`batches` is a list of `layer token d_model`; loops are meant.
"""

from __future__ import annotations

import numpy as np

from .common import HEAD, cosine_of, lens_by_token


def oracle_saturation(
    batches: list[np.ndarray],
    norm: bool = True,
    center: bool = False,
    head: np.ndarray = HEAD,
    heads: list[tuple[np.ndarray, np.ndarray]] | None = None,
) -> dict[str, np.ndarray]:
    x = np.concatenate(batches, axis=1)
    mean = x.mean(1, keepdims=True) if center else 0 * x[:, :1]
    table = lens_by_token(batches, [None] * x.shape[1], norm, head, heads)
    blocks = len(table[0])
    events: list[list[float]] = [[] for _ in range(blocks)]
    for t, row in enumerate(table):
        smallest = min(layer for layer in range(blocks) if all(row[m]["said"] == row[-1]["said"] for m in range(layer, blocks)))
        here, last = x[smallest + 1, t] - mean[smallest + 1, 0], x[-1, t] - mean[-1, 0]
        events[smallest].append(cosine_of(here, last))
    counts = np.array([len(one) for one in events], dtype=float)
    cosine = np.array([np.mean(one) if one else np.nan for one in events])
    early = [layer for layer in range(blocks - 1) if events[layer]]
    correlation = np.nan
    if len(early) > 2:
        a, b = counts[early] - counts[early].mean(), cosine[early] - cosine[early].mean()
        correlation = (a @ b) / np.sqrt((a @ a) * (b @ b)) if a @ a > 0 and b @ b > 0 else np.nan
    return {
        "values": counts,
        "cumulative": np.array([counts[: i + 1].sum() for i in range(blocks)]) / counts.sum(),
        "early_share": np.array(counts[:-1].sum() / counts.sum()),
        "cosine_to_last": cosine,
        "correlation": np.array(correlation),
    }
