"""Naive float64 NumPy, written from the formulas and from nothing else. `oracle_<name>` gives every field of an analyzer.

`batches` is a list of `layer token d_model`; loops are meant.
"""

from __future__ import annotations

import functools

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


def sums_over_tuples(k: np.ndarray, m: np.ndarray, apart: np.ndarray) -> tuple[float, float, float]:
    """Sums of k_ij m_ij over pairs, k_ij m_ir over triples and k_ij m_qu over quadruples of samples that are apart."""
    k, m = k * apart, m * apart
    of_quadruples = 0.0
    for i in range(len(k)):
        others = apart[i] * apart
        of_quadruples += k[i] @ np.sum((others @ m) * others, 1)
    return float(np.sum(k * m)), float(np.einsum("ij,ir,jr->", k, m, apart)), float(of_quadruples)


@functools.cache
def numbers_of_tuples(row: tuple[int, ...]) -> tuple[float, float, float]:
    """Numbers of pairs, triples and quadruples of samples of distinct rows, which all pairs of sites share."""
    apart = (np.array(row)[:, None] != np.array(row)).astype(float)
    return sums_over_tuples(apart, apart, apart)


def hsic_of_rows(k: np.ndarray, m: np.ndarray, row: np.ndarray) -> tuple[float, int]:
    """HSIC as means over pairs, triples and quadruples of samples of distinct rows, and the number of pairs."""
    sums = sums_over_tuples(k, m, (row[:, None] != row).astype(float))
    pairs, triples, quadruples = numbers_of_tuples(tuple(row.tolist()))
    return sums[0] / pairs + sums[2] / quadruples - 2 * sums[1] / triples, int(pairs)


def hsic_by_tuples(k: np.ndarray, m: np.ndarray, text: np.ndarray) -> float:
    """HSIC as three means, over all ordered pairs, triples and quadruples of samples of distinct texts, one after another."""
    n = len(k)
    pairs, triples, quadruples = [], [], []
    for i in range(n):
        for j in range(n):
            if text[i] == text[j]:
                continue
            pairs.append(k[i, j] * m[i, j])
            for q in range(n):
                if text[q] in (text[i], text[j]):
                    continue
                triples.append(k[i, j] * m[i, q])
                for u in range(n):
                    if text[u] not in (text[i], text[j], text[q]):
                        quadruples.append(k[i, j] * m[q, u])
    return float(np.mean(pairs) + np.mean(quadruples) - 2 * np.mean(triples))


def cka_by_tuples(x: np.ndarray, y: np.ndarray, text: np.ndarray) -> float:
    """CKA of two sites, `sample d_model`, from `hsic_by_tuples` of the samples minus their mean."""
    x, y = x - x.mean(0), y - y.mean(0)
    k, m = x @ x.T, y @ y.T
    return hsic_by_tuples(k, m, text) / float(np.sqrt(hsic_by_tuples(k, k, text) * hsic_by_tuples(m, m, text)))


def rbf_kernel(x: np.ndarray, bandwidth: float) -> np.ndarray:
    """exp(-|a - b|^2 / 2 s^2), with s a fraction of the median distance between two samples."""
    count = len(x)
    distances = np.array([[np.linalg.norm(a - b) for b in x] for a in x])
    median = np.median([distances[i, j] for i in range(count) for j in range(i + 1, count)])
    return np.exp(-(distances**2) / (2 * (bandwidth * median) ** 2))


def rbf_cka(xs: list[np.ndarray], ys: list[np.ndarray], bandwidth: float, biased: bool, text: np.ndarray) -> float:
    """CKA with an RBF kernel of two sites, from the mean HSIC over minibatches of one size, `sample d_model` each."""

    def mean_hsic(left: list[np.ndarray], right: list[np.ndarray]) -> float:
        values = []
        for x, y in zip(left, right, strict=True):
            k = rbf_kernel(x, bandwidth)
            m = rbf_kernel(y, bandwidth)
            values.append(hsic_0(k, m) if biased else hsic_of_rows(k, m, text)[0])
        return float(np.mean(values))

    return mean_hsic(xs, ys) / np.sqrt(mean_hsic(xs, xs) * mean_hsic(ys, ys))


def oracle_cka(
    batches: list[np.ndarray],
    others: list[np.ndarray] | None = None,
    biased: bool = False,
    exact: bool = False,
    rows: int = 1,
    row: list[np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Each batch is one minibatch; exact takes all of them together as one.

    `rows` tokens are of one row, or `row` is that of each token, batch by batch.
    """
    others = batches if others is None else others
    if row is None:
        row = [np.arange(batch.shape[1]) // rows + 1000 * number for number, batch in enumerate(batches)]
    else:
        rows = 2
    if exact:
        batches, others, row = [np.concatenate(batches, axis=1)], [np.concatenate(others, axis=1)], [np.concatenate(row)]
    elif rows > 1 and not biased:
        kept = [number for number, own in enumerate(row) if len(set(own)) >= 4]
        batches, others, row = ([side[number] for number in kept] for side in (batches, others, row))

    def weighted(x: np.ndarray, y: np.ndarray, of: np.ndarray) -> tuple[float, float]:
        x, y = x - x.mean(0), y - y.mean(0)
        if biased:
            return hsic_0(x @ x.T, y @ y.T), (len(x) - 1) ** 2
        return (hsic_1(x @ x.T, y @ y.T), len(x) * (len(x) - 3)) if rows == 1 else hsic_of_rows(x @ x.T, y @ y.T, of)

    def mean_hsic(xs: list[np.ndarray], ys: list[np.ndarray]) -> float:
        """The mean over minibatches; where they differ in size, each weighs as many pairs of samples as it has."""
        each = [weighted(x, y, of) for x, y, of in zip(xs, ys, row, strict=True)]
        return sum(weight * hsic for hsic, weight in each) / sum(weight for _, weight in each)

    height, width = len(batches[0]), len(others[0])
    values = np.zeros((height, width))
    xs, ys = ([[batch[layer] for batch in side] for layer in range(len(side[0]))] for side in (batches, others))
    own_x, own_y = ([mean_hsic(layer, layer) for layer in side] for side in (xs, ys))
    for a in range(height):
        for b in range(width):
            values[a, b] = mean_hsic(xs[a], ys[b]) / np.sqrt(own_x[a] * own_y[b])

    def effective(parts: list[np.ndarray], layer: int) -> float:
        r = [np.sum((token - part[layer].mean(0)) ** 2) for part in parts for token in part[layer]]
        return sum(r) ** 2 / sum(one**2 for one in r)

    whole = np.full((height, width), np.nan)
    if exact:
        whole = oracle_cka(batches, others, biased=True, row=row)["values"]
    return {
        "values": values,
        "biased": whole,
        "effective_samples": np.array([effective(batches, a) for a in range(height)]),
        "column_effective_samples": np.array([effective(others, b) for b in range(width)]),
    } | no_null(height, width)


def arccos_distance(values: np.ndarray) -> float:
    """Brown et al. 2023, equation 2, over the outputs of blocks."""
    return float(np.sqrt(sum(np.arccos(np.clip(values[i, i], -1, 1)) ** 2 for i in range(1, len(values)))))
