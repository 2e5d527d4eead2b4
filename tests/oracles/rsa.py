"""Naive float64 NumPy of RSA and of mutual nearest neighbours, sample by sample and pair by pair."""

from __future__ import annotations

import numpy as np

from .common import no_null


def apart(a: np.ndarray, b: np.ndarray, kind: str) -> float:
    if kind == "euclidean":
        return float(np.sqrt(np.sum((a - b) ** 2)))
    if kind == "squared_euclidean":
        return float(np.sum((a - b) ** 2)) / len(a)
    if kind == "correlation":
        a, b = a - a.mean(), b - b.mean()
    return 1 - float(a @ b / np.sqrt((a @ a) * (b @ b)))


def condensed(x: np.ndarray, kind: str) -> np.ndarray:
    """Dissimilarities of the pairs of samples `sample d_model`; those that differ by rounding alone are ties."""
    pairs = [apart(x[i], x[j], kind) for i in range(len(x)) for j in range(i + 1, len(x))]
    return np.array(pairs).astype(np.float32).astype(np.float64)


def ranks(values: np.ndarray) -> np.ndarray:
    return np.array([np.sum(values < one) + (np.sum(values == one) + 1) / 2 for one in values])


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a - a.mean(), b - b.mean()
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def rho_a(a: np.ndarray, b: np.ndarray) -> float:
    """Schuett et al. 2023: Spearman's correlation with the variance that ranks without ties have."""
    n = len(a)
    return float(12 * (ranks(a) @ ranks(b)) / (n**3 - n) - 3 * (n + 1) / (n - 1))


def whitened_cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Diedrichsen et al. 2021: the cosine under the inverse covariance of dissimilarities of independent samples of variance 1.

    Two dissimilarities have the covariance (c_i' c_j)^2, with the contrasts c of their pairs.
    """
    n = int((1 + np.sqrt(1 + 8 * len(a))) / 2)
    contrasts = []
    for i in range(n):
        for j in range(i + 1, n):
            contrast = np.zeros(n)
            contrast[i], contrast[j] = 1, -1
            contrasts.append(contrast)
    covariance = (np.array(contrasts) @ np.array(contrasts).T) ** 2
    precision = np.linalg.inv(covariance)
    return float(a @ precision @ b / np.sqrt((a @ precision @ a) * (b @ precision @ b)))


COMPARISONS = {
    "spearman": lambda a, b: correlation(ranks(a), ranks(b)),
    "pearson": correlation,
    "cosine": cosine,
    "rho_a": rho_a,
    "whitened_cosine": whitened_cosine,
    "whitened_pearson": lambda a, b: whitened_cosine(a - a.mean(), b - b.mean()),
}


def oracle_rsa(
    batches: list[np.ndarray],
    others: list[np.ndarray] | None = None,
    kind: str = "correlation",
    compare: str = "spearman",
    rows: int = 1,
    text: list[np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Each batch is one minibatch; correlations are averaged with the number of pairs as weight.

    `rows` tokens are of a row, which is a text; or `text` is that of each token, batch by batch.
    """
    others = batches if others is None else others
    values, weights = 0.0, 0.0
    for number, (one, other) in enumerate(zip(batches, others, strict=True)):
        row = np.arange(one.shape[1]) // rows if text is None else text[number]
        if (rows > 1 or text is not None) and len(set(row)) < 4:
            continue
        apart_rows = [row[i] != row[j] for i in range(len(row)) for j in range(i + 1, len(row))]
        both = [[condensed(layer, kind)[apart_rows] for layer in x] for x in (one, other)]
        weight = len(both[0][0])
        values = values + weight * np.array([[COMPARISONS[compare](a, b) for b in both[1]] for a in both[0]])
        weights += weight
    return {"values": values / weights} | no_null(len(batches[0]), len(others[0]))


def neighbours(x: np.ndarray, k: int, kind: str, text: np.ndarray) -> list[set[int]]:
    """The k nearest samples of other texts of each sample."""
    found = []
    for i in range(len(x)):
        order = sorted((apart(x[i], x[j], kind), j) for j in range(len(x)) if text[j] != text[i])
        found.append({j for _, j in order[:k]})
    return found


def oracle_mutual_knn(
    batches: list[np.ndarray],
    others: list[np.ndarray] | None = None,
    k: int = 10,
    kind: str = "cosine",
    rows: int = 1,
    text: list[np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Each batch in which all samples have k + 1 others of other texts is one minibatch.

    `rows` tokens are of one row, which is a text; or `text` is that of each token, batch by batch.
    """
    others = batches if others is None else others
    height, width = len(batches[0]), len(others[0])
    shared, samples, chance = np.zeros((height, width)), 0, 0.0
    for number, (one, other) in enumerate(zip(batches, others, strict=True)):
        n = one.shape[1]
        own = np.arange(n) // rows if text is None else text[number]
        others_of = [sum(own[j] != own[i] for j in range(n)) for i in range(n)]
        if min(others_of) < k + 1 or ((rows > 1 or text is not None) and len(set(own)) < 4):
            continue
        of_x, of_y = ([neighbours(layer, k, kind, own) for layer in x] for x in (one, other))
        for a in range(height):
            for b in range(width):
                shared[a, b] += sum(len(of_x[a][i] & of_y[b][i]) / k for i in range(n))
        samples += n
        chance += sum(k / count for count in others_of)
    return {"values": shared / samples, "chance": np.array(chance / samples)} | no_null(height, width)


def jaccard_of_neighbours(of_x: list[set[int]], of_y: list[set[int]]) -> float:
    return float(np.mean([len(a & b) / len(a | b) for a, b in zip(of_x, of_y, strict=True)]))


def cycle_knn(of_x: list[set[int]], of_y: list[set[int]]) -> float:
    """Fraction of samples to which a step at y and a step at x may lead back."""
    return float(np.mean([any(i in of_x[j] for j in of_y[i]) for i in range(len(of_x))]))


def cknna(x: np.ndarray, y: np.ndarray, k: int, text: np.ndarray) -> float:
    """HSIC (Song et al. 2012, equation 5) of cosines of samples that are neighbours in both, over that of each with itself."""
    n = len(x)
    of_x, of_y = neighbours(x, k, "cosine", text), neighbours(y, k, "cosine", text)

    def hsic(a: np.ndarray, of_a: list[set[int]], b: np.ndarray, of_b: list[set[int]]) -> float:
        left, right = np.zeros((n, n)), np.zeros((n, n))
        for i in range(n):
            for j in of_a[i] & of_b[i]:
                left[i, j] = 1 - apart(a[i], a[j], "cosine")
                right[i, j] = 1 - apart(b[i], b[j], "cosine")
        one = np.ones(n)
        third = 2 / (n - 2) * (one @ left @ right @ one)
        return float(np.trace(left @ right) + left.sum() * right.sum() / ((n - 1) * (n - 2)) - third)

    return hsic(x, of_x, y, of_y) / np.sqrt(hsic(x, of_x, x, of_x) * hsic(y, of_y, y, of_y))
