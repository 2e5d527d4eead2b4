"""Naive float64 NumPy, written from the formulas and from nothing else. `oracle_<name>` gives every field of an analyzer.

`batches` is a list of `layer token d_model`; loops are meant.
"""

from __future__ import annotations

import itertools

import numpy as np

from .common import LEVELS


def line_shape_score(path: np.ndarray) -> float:
    """Aubry et al. 2025, equations 15 and 16: the path made of unit steps, and how far it comes."""
    tilde = path[0].copy()
    for before, after in itertools.pairwise(path):
        tilde = tilde + (after - before) / np.sqrt(((after - before) ** 2).sum())
    return (len(path) - 1) / np.sqrt(((tilde - path[0]) ** 2).sum())


def turning_angles(row: np.ndarray) -> np.ndarray:
    """`layer triple`: angles between the steps from token to token of one row of tokens, `layer token d_model`."""
    angles = []
    for layer in row:
        steps = [after - before for before, after in itertools.pairwise(layer)]
        angles.append([np.arccos(a @ b / np.sqrt((a @ a) * (b @ b))) for a, b in itertools.pairwise(steps)])
    return np.array(angles)


def oracle_trajectory(batches: list[np.ndarray], window: int = 0) -> dict[str, np.ndarray]:
    x = np.concatenate(batches, axis=1)
    paths = [x[:, t] for t in range(x.shape[1])]
    norm = np.array([[np.sqrt((v**2).sum()) for v in path] for path in paths])
    update = np.array([[np.sqrt(((b - a) ** 2).sum()) for a, b in itertools.pairwise(path)] for path in paths])
    alpha = np.log(norm[:, 1:] / norm[:, :-1])
    numbers = {
        "lss": np.array([line_shape_score(path) for path in paths]),
        "expodistance": np.array([np.var(a) / np.mean(a) ** 2 for a in alpha]),
        "equidistance": np.array([np.std(u) / np.mean(u) for u in update]),
    }

    line = [[(1 - at) * path[0] + at * path[-1] for at in np.linspace(0, 1, len(path))] for path in paths]
    away = [
        [np.linalg.norm(v - w) / np.linalg.norm(path[-1] - path[0]) for v, w in zip(path, straight, strict=True)]
        for path, straight in zip(paths, line, strict=True)
    ]

    def quantiles(values: np.ndarray) -> np.ndarray:
        return np.array([np.quantile(values, q, axis=0, method="inverted_cdf") for q in LEVELS])

    angles = [turning_angles(batch) for batch in batches]
    curvature = np.concatenate(angles, axis=1)
    windows = [[line_shape_score(path[i : i + window + 1]) for i in range(len(x) - window)] if window else [] for path in paths]
    out = {
        "values": norm.mean(0),
        "norm_quantiles": quantiles(norm),
        "update_norm": update.mean(0),
        "update_norm_quantiles": quantiles(update),
        "geodesic_deviation": np.mean(away, axis=0),
        "growth": alpha.mean(0),
        "windowed_lss": np.array(windows).mean(0),
        "curvature": np.array([np.mean(a) if len(a) else np.nan for a in curvature]),
        # Values by prompt are an option.
        **dict.fromkeys(("prompt_lss", "prompt_expodistance", "prompt_equidistance"), np.zeros(0)),
        "prompt_norm": np.zeros((0, len(x))),
        "prompt_tokens": np.zeros(0),
    }
    for name, values in numbers.items():
        out |= {f"{name}_mean": values.mean(), f"{name}_std": values.std(), f"{name}_quantiles": quantiles(values)}
    return {name: np.asarray(value) for name, value in out.items()}
