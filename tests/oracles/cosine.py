"""Naive float64 NumPy, written from the formulas and from nothing else. `oracle_<name>` gives every field of an analyzer.

`batches` is a list of `layer token d_model`; loops are meant.
"""

from __future__ import annotations

import numpy as np

from .common import LEVELS, cosine_of


def oracle_cosine(batches: list[np.ndarray], center: str = "dataset") -> dict[str, np.ndarray]:
    x = np.concatenate(batches, axis=1)
    layers, tokens, _ = x.shape
    mean = np.array([sum(x[layer]) / tokens for layer in range(layers)])
    c = x - mean[:, None] if center == "dataset" else x
    cos = np.array([[[cosine_of(c[a, t], c[b, t]) for t in range(tokens)] for b in range(layers)] for a in range(layers)])
    ratio = [
        [np.linalg.norm(x[a, t]) / np.linalg.norm(x[a + 1, t] - x[a, t]) for t in range(tokens)] for a in range(layers - 1)
    ]
    raw = np.array([[[cosine_of(x[a, t], x[b, t]) for t in range(tokens)] for b in range(layers)] for a in range(layers)])
    angle = [[sum(np.arccos(raw[a, b])) / tokens / np.pi if a != b else 0 for b in range(layers)] for a in range(layers)]
    rises = [all(cos[a, -1, t] < cos[a + 1, -1, t] for a in range(layers - 1)) for t in range(tokens)]
    steps = [[cos[a, -1, t] < cos[a + 1, -1, t] for t in range(tokens)] for a in range(layers - 1)]
    triples: list[list[bool]] = [[] for _ in range(layers - 1)]
    for third in range(1, layers):
        for second in range(third):
            for first in range(second):
                triples[third - 1] += [cos[first, third, t] < cos[second, third, t] for t in range(tokens)]
    whiskers = [np.quantile(cos[a, -1], (0.25, 0.75), method="inverted_cdf") for a in range(layers)]
    outside = [
        [c < q1 - 1.5 * (q3 - q1) or c > q3 + 1.5 * (q3 - q1) for c in cos[a, -1]] for a, (q1, q3) in enumerate(whiskers)
    ]
    # Of itself, the last layer has a cosine of 1, however it rounds.
    outside[-1] = [False] * tokens
    return {
        "to_last_minimum": np.array([*(np.floor(1000 * cos[a, -1].min()) / 1000 for a in range(layers - 1)), 1.0]),
        "to_last_outliers": np.array([sum(o) / tokens for o in outside]),
        "norm_ratio_quantiles": np.array([np.quantile(row, LEVELS, method="inverted_cdf") for row in ratio]).T,
        "step_share": np.array([sum(step) / tokens for step in steps]),
        "triple_share": np.array([sum(own) / len(own) if own else np.nan for own in triples]),
        "values": np.array([[sum(cos[a, b]) / tokens for b in range(layers)] for a in range(layers)]),
        "std": np.array([[np.std(cos[a, b]) for b in range(layers)] for a in range(layers)]),
        # The diagonal is 1 by definition, however it rounds.
        "below_zero": np.array([[sum(cos[a, b] < 0) / tokens for b in range(layers)] for a in range(layers)]),
        "to_last": np.array([[np.quantile(cos[a, -1], q, method="inverted_cdf") for a in range(layers)] for q in LEVELS]),
        "adjacent": np.array(
            [[np.quantile(cos[a, a + 1], q, method="inverted_cdf") for a in range(layers - 1)] for q in LEVELS]
        ),
        "norm_ratio": np.array([sum(row) / tokens for row in ratio]),
        "angular": np.array(angle),
        "block_influence": np.array([1 - sum(raw[a, a + 1]) / tokens for a in range(layers - 1)]),
        "monotone_share": np.array(sum(rises) / tokens),
        "mean": mean if center == "dataset" else np.zeros((layers, 0)),
    }
