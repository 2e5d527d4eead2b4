"""Naive float64 NumPy, written from the formulas and from nothing else. `oracle_<name>` gives every field of an analyzer.

`batches` is a list of `layer token d_model`; loops are meant.
"""

from __future__ import annotations

import numpy as np

from .common import HEAD, cosine_of, say, softmax


def oracle_intervention_effect(
    batches: list[np.ndarray], edited: list[np.ndarray], head: np.ndarray = HEAD
) -> dict[str, np.ndarray]:
    x, y = np.concatenate(batches, axis=1), np.concatenate(edited, axis=1)
    layers, tokens = x.shape[:2]
    logits = [
        [[say(side[layer, t], layer == layers - 1, True, head) for t in range(tokens)] for layer in range(1, layers)]
        for side in (x, y)
    ]
    return effect(x, y, *logits)


def effect(
    x: np.ndarray, y: np.ndarray, clean: list[list[np.ndarray]], edited: list[list[np.ndarray]]
) -> dict[str, np.ndarray]:
    """The fields from residuals `layer token d_model` and logits `block token vocabulary` of both runs."""
    sites, positions, blocks = range(len(x)), range(x.shape[1]), range(len(clean))

    def divergence(z: np.ndarray, w: np.ndarray) -> float:
        p, q = softmax(z), softmax(w)
        return float(sum(a * (np.log(a) - np.log(b)) for a, b in zip(p, q, strict=True) if a > 0))

    def saturation(logits: list[list[np.ndarray]], t: int) -> int:
        said = [int(np.argmax(logits[layer][t])) for layer in blocks]
        return min(layer for layer in blocks if all(said[m] == said[-1] for m in range(layer, len(said))))

    heads = range(len(clean[0]))
    norm = np.linalg.norm
    return {
        "values": np.array([np.mean([cosine_of(x[i, t], y[i, t]) for t in positions]) for i in sites]),
        "relative_change": np.array([np.mean([norm(y[i, t] - x[i, t]) / norm(x[i, t]) for t in positions]) for i in sites]),
        "kl_divergence": np.array([np.mean([divergence(clean[i][t], edited[i][t]) for t in heads]) for i in blocks]),
        "top_changed": np.array([np.mean([np.argmax(clean[i][t]) != np.argmax(edited[i][t]) for t in heads]) for i in blocks]),
        "saturation_shift": np.array(np.mean([saturation(edited, t) - saturation(clean, t) for t in heads])),
    }
