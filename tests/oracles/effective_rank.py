"""Naive float64 NumPy, written from the formulas and from nothing else. `oracle_<name>` gives every field of an analyzer.

`batches` is a list of `layer token d_model`; loops are meant.
"""

from __future__ import annotations

import numpy as np


def exp_entropy(values: np.ndarray) -> float:
    p = [v / values.sum() for v in values]
    return float(np.exp(-sum(q * np.log(q) for q in p if q > 1e-15)))


def oracle_effective_rank(batches: list[np.ndarray], center: str = "dataset", top: int = 64) -> dict[str, np.ndarray]:
    out: dict[str, list] = {}
    for layer in np.concatenate(batches, axis=1):
        x = layer - layer.mean(0) if center == "dataset" else layer
        sigma = np.linalg.svd(x, compute_uv=False)
        # More directions than samples have no variance.
        sigma = np.concatenate([sigma, np.zeros(max(0, x.shape[1] - len(sigma)))])
        variance = sigma**2 / len(x)
        share = [sum(variance[: k + 1]) / sum(variance) for k in range(len(variance))]
        for name, value in {
            "values": exp_entropy(sigma),
            "eigenvalue_rank": exp_entropy(variance),
            "participation_ratio": sum(variance) ** 2 / sum(variance**2),
            "stable_rank": np.linalg.norm(x, "fro") ** 2 / np.linalg.norm(x, 2) ** 2,
            "directions_90": float(next(k for k, s in enumerate(share, 1) if s >= 0.9)),
            "spectrum": (variance / sum(variance))[:top],
        }.items():
            out.setdefault(name, []).append(value)
    return {name: np.array(values) for name, values in out.items()}
