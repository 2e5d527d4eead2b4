"""Naive float64 NumPy, written from the formulas and from nothing else. `oracle_<name>` gives every field of an analyzer.

`batches` is a list of `layer token d_model`; loops are meant.
"""

from __future__ import annotations

import numpy as np

from .common import no_null


def hsic_1(k: np.ndarray, m: np.ndarray) -> float:
    """Song et al. 2012, equation 5, term by term."""
    n = len(k)
    k, m = k.copy(), m.copy()
    for i in range(n):
        k[i, i] = m[i, i] = 0.0
    one = np.ones(n)
    first = np.trace(k @ m)
    second = (one @ k @ one) * (one @ m @ one) / ((n - 1) * (n - 2))
    third = 2 / (n - 2) * (one @ k @ m @ one)
    return (first + second - third) / (n * (n - 3))


def hsic_0(k: np.ndarray, m: np.ndarray) -> float:
    """The classical biased estimator tr(K H M H) / (n - 1)^2."""
    n = len(k)
    h = np.eye(n) - np.ones((n, n)) / n
    return float(np.trace(k @ h @ m @ h)) / (n - 1) ** 2


def oracle_cka(
    batches: list[np.ndarray], others: list[np.ndarray] | None = None, biased: bool = False, exact: bool = False
) -> dict[str, np.ndarray]:
    """Each batch is one minibatch; exact takes all of them together as one."""
    others = batches if others is None else others
    if exact:
        batches, others = [np.concatenate(batches, axis=1)], [np.concatenate(others, axis=1)]
    hsic = hsic_0 if biased else hsic_1

    def mean_hsic(xs: list[np.ndarray], ys: list[np.ndarray]) -> float:
        """The mean over minibatches; where they differ in size, each weighs as many pairs of samples as it has."""
        weight = [(len(x) - 1) ** 2 if biased else len(x) * (len(x) - 3) for x in xs]
        return sum(w * hsic(x @ x.T, y @ y.T) for w, x, y in zip(weight, xs, ys, strict=True)) / sum(weight)

    rows, columns = len(batches[0]), len(others[0])
    values = np.zeros((rows, columns))
    for a in range(rows):
        for b in range(columns):
            x, y = [batch[a] for batch in batches], [batch[b] for batch in others]
            values[a, b] = mean_hsic(x, y) / np.sqrt(mean_hsic(x, x) * mean_hsic(y, y))

    def effective(parts: list[np.ndarray], layer: int) -> float:
        r = [np.sum((token - part[layer].mean(0)) ** 2) for part in parts for token in part[layer]]
        return sum(r) ** 2 / sum(one**2 for one in r)

    return {
        "values": values,
        "effective_samples": np.array([effective(batches, a) for a in range(rows)]),
        "column_effective_samples": np.array([effective(others, b) for b in range(columns)]),
    } | no_null(rows, columns)


def arccos_distance(values: np.ndarray) -> float:
    """Brown et al. 2023, equation 2, over the outputs of blocks."""
    return float(np.sqrt(sum(np.arccos(np.clip(values[i, i], -1, 1)) ** 2 for i in range(1, len(values)))))
