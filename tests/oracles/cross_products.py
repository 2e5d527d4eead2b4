"""Naive float64 NumPy of Procrustes, CCA and linear predictivity, from samples, never from covariances of batches.

`batches` is a list of `layer token d_model`; `others` are those of a second model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from .common import no_null
from .linear_probe import ROWS_OF, held_out_rows


def together(batches: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(batches, axis=1).astype(np.float64)


def of_all_pairs(x: np.ndarray, y: np.ndarray, number: Callable[[np.ndarray, np.ndarray], float]) -> np.ndarray:
    return np.array([[number(a, b) for b in y] for a in x])


def procrustes_similarity(x: np.ndarray, y: np.ndarray) -> float:
    """Nuclear norm of X'Y, for centred matrices of Frobenius norm 1."""
    x, y = x - x.mean(0), y - y.mean(0)
    return float(np.linalg.svd((x / np.linalg.norm(x)).T @ (y / np.linalg.norm(y)), compute_uv=False).sum())


def permutation_similarity(x: np.ndarray, y: np.ndarray) -> float:
    """The largest trace over all orders of the dimensions of y, one order after another; equal widths."""
    x, y = x - x.mean(0), y - y.mean(0)
    cross = (x / np.linalg.norm(x)).T @ (y / np.linalg.norm(y))
    width = range(len(cross))
    return max(float(sum(cross[i, order[i]] for i in width)) for order in itertools.permutations(width))


def procrustes_distance(x: np.ndarray, y: np.ndarray) -> float:
    """Root mean squared distance of the centred samples after the best rotation of the second site, which is applied."""
    x, y = x - x.mean(0), y - y.mean(0)
    width = max(x.shape[1], y.shape[1])
    x, y = (np.pad(z, ((0, 0), (0, width - z.shape[1]))) for z in (x, y))
    u, _, vh = np.linalg.svd(y.T @ x)
    return float(np.linalg.norm(x - y @ u @ vh) / np.sqrt(len(x)))


def oracle_procrustes(batches: list[np.ndarray], others: list[np.ndarray] | None = None) -> dict[str, np.ndarray]:
    x = together(batches)
    y = x if others is None else together(others)
    values = np.minimum(of_all_pairs(x, y, procrustes_similarity), 1)
    if others is None:
        np.fill_diagonal(values, 1)
    distances = of_all_pairs(x, y, procrustes_distance)
    return {"values": values, "angle": np.arccos(values), "euclidean": distances} | no_null(len(x), len(y))


def principal(x: np.ndarray, fraction: float = 1.0) -> np.ndarray:
    """The centred samples along the principal directions that explain a fraction of the variance, those of norm 0 left out."""
    u, s, _ = np.linalg.svd(x - x.mean(0), full_matrices=False)
    keep = s > 1e-6 * s[0]
    u, s = u[:, keep], s[keep]
    count = next(k for k in range(1, len(s) + 1) if (s[:k] ** 2).sum() >= fraction * (s**2).sum() - 1e-12)
    return u[:, :count] * s[:count]


def canonical(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Canonical correlations, and the canonical variates `sample variate` of x, by QR (Bjorck and Golub 1973)."""
    q, _ = np.linalg.qr(x)
    p, _ = np.linalg.qr(y)
    u, rho, _ = np.linalg.svd(q.T @ p, full_matrices=False)
    return np.minimum(rho, 1), q @ u


def pwcca(x: np.ndarray, y: np.ndarray) -> float:
    """Morcos et al. 2018, equation 2: weights by the first argument."""
    x = x - x.mean(0)
    rho, variates = canonical(principal(x), principal(y))
    alpha = [sum(abs(h @ column) for column in x.T) for h in variates.T]
    return float(np.dot(alpha, rho) / np.sum(alpha))


def oracle_cca(
    batches: list[np.ndarray], others: list[np.ndarray] | None = None, variance: float = 0.99
) -> dict[str, np.ndarray]:
    x = together(batches)
    y = x if others is None else together(others)
    sizes = [[principal(site, f).shape[1] for site in side] for f in (1.0, variance) for side in (x, y)]
    return {
        "values": of_all_pairs(x, y, lambda a, b: canonical(principal(a), principal(b))[0].mean()),
        "squared": of_all_pairs(x, y, lambda a, b: (canonical(principal(a), principal(b))[0] ** 2).mean()),
        "svcca": of_all_pairs(x, y, lambda a, b: canonical(principal(a, variance), principal(b, variance))[0].mean()),
        "pwcca": of_all_pairs(x, y, pwcca),
        "column_pwcca": of_all_pairs(x, y, lambda a, b: pwcca(b, a)),
        "dimensions": np.array(sizes[0]),
        "column_dimensions": np.array(sizes[1]),
        "directions": np.array(sizes[2]),
        "column_directions": np.array(sizes[3]),
    } | no_null(len(x), len(y))


def ridge_r2(x: np.ndarray, y: np.ndarray, test: np.ndarray, ridge: float) -> float:
    """R2 of y on the samples of `test`, predicted from x, standardised on the other samples, by ridge regression."""
    x = (x - x[~test].mean(0)) / x[~test].std(0)
    answers = y[~test] - y[~test].mean(0)
    covariance = x[~test].T @ x[~test] / len(answers)
    weight = np.linalg.solve(covariance + ridge * np.eye(x.shape[1]), x[~test].T @ answers / len(answers))
    predicted = x[test] @ weight + y[~test].mean(0)
    return float(1 - ((y[test] - predicted) ** 2).sum() / ((y[test] - y[test].mean(0)) ** 2).sum())


def in_sample_r2(x: np.ndarray, y: np.ndarray) -> float:
    """Kornblith et al. 2019, table 1: the share of y that lies in the span of the columns of x, both centred."""
    x = x - x.mean(0)
    y = y - y.mean(0)
    basis, _ = np.linalg.qr(x)
    return float(np.linalg.norm(basis.T @ y) ** 2 / np.linalg.norm(y) ** 2)


def oracle_linear_predictivity(
    batches: list[np.ndarray],
    others: list[np.ndarray] | None = None,
    ridge: float = 0.01,
    rows: list[int] | None = None,
    fraction: float = 0.2,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    x = together(batches)
    y = x if others is None else together(others)
    rows = rows or [t // ROWS_OF for batch in batches for t in range(batch.shape[1])]
    out = held_out_rows(max(rows) + 1, fraction, seed)
    test = np.array([out[row] for row in rows])
    return {
        "values": of_all_pairs(x, y, lambda a, b: ridge_r2(a, b, test, ridge)),
        "reverse": of_all_pairs(x, y, lambda a, b: ridge_r2(b, a, test, ridge)),
    } | no_null(len(x), len(y))
