"""Similarities and nulls of texts of several rows against float64 loops over tuples of samples and over orders of texts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from .. import oracles
from ..inputs.populations import data_of_rows
from ..models.token_bank import opened

# Numbers of tokens of the rows of each text.
EQUAL = [[2, 1], [2, 1], [2, 1], [2, 1]]
UNEQUAL = [[2, 2], [1, 3], [3, 1], [2, 1]]
# The null leaves out the third text, without which the others have four positions in common.
ONE_SHORT = [[2, 2], [2, 2], [1], [2, 2], [3, 2]]
TEXTS = {"equal": EQUAL, "unequal": UNEQUAL, "one short": ONE_SHORT}
SITES = 3
WIDTH = 5
# All tokens are in one minibatch.
ALL = 64
# Random orders; fewer for measures that compute each of them.
PERMUTATIONS = {"Procrustes": 400, "Similarity": 400}
MOST_PERMUTATIONS = 3000


def bank_of(rows: list[list[int]], seed: int = 0) -> torch.Tensor:
    """Activations `token site width` far from the origin: each text has an effect, and sites share a part."""
    generator = torch.Generator().manual_seed(seed)
    number = torch.tensor([text for text, lengths in enumerate(rows) for _ in range(sum(lengths))])
    effect = torch.randn(len(rows), SITES, WIDTH, generator=generator, dtype=torch.float64)[number]
    sample_noise = torch.randn(len(number), SITES, WIDTH, generator=generator, dtype=torch.float64)
    return 2 + effect + sample_noise + sample_noise[:, :1]


def rsa(x: np.ndarray, y: np.ndarray, text: np.ndarray) -> float:
    return float(oracles.oracle_rsa([x[None]], [y[None]], text=[text])["values"][0, 0])


def mutual_knn(x: np.ndarray, y: np.ndarray, text: np.ndarray) -> float:
    return float(oracles.oracle_mutual_knn([x[None]], [y[None]], k=2, text=[text])["values"][0, 0])


def procrustes(x: np.ndarray, y: np.ndarray, text: np.ndarray) -> float:
    return float(oracles.oracle_procrustes([x[None]], [y[None]])["values"][0, 0])


def alignment(x: np.ndarray, y: np.ndarray, text: np.ndarray) -> float:
    return oracles.kernel_alignment(x, y)


MEASURES = {
    "CKA": (lambda **options: lsim.CKA(minibatch=ALL, **options), oracles.cka_by_tuples),
    "RSA": (lambda **options: lsim.RSA(minibatch=ALL, **options), rsa),
    "MutualKNN": (lambda **options: lsim.MutualKNN(k=2, minibatch=ALL, **options), mutual_knn),
    "Procrustes": (lambda **options: lsim.Procrustes(**options), procrustes),
    "Similarity": (lambda **options: lsim.Similarity(oracles.kernel_alignment, minibatch=ALL, **options), alignment),
}
warned = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("centred", [True, False])
def test_the_formula_of_the_docs_is_the_mean_over_tuples_of_distinct_texts(centred):
    text = np.array([0, 0, 1, 2, 2, 2, 3, 4, 4])
    generator = np.random.default_rng(0)
    x, y = (3 + generator.normal(size=(len(text), WIDTH)) for _ in range(2))
    if centred:
        x = x - x.mean(0)
        y = y - y.mean(0)
    k, m = (z @ z.T * (text[:, None] != text) for z in (x, y))
    member = (text[:, None] == np.arange(5)).astype(float)
    text_ones = np.ones(len(text))
    group_ones = np.ones(5)
    r = member.T @ k @ member
    s = member.T @ m @ member
    counts = member.sum(0)
    total = counts.sum()
    pairs = sum(a * (total - a) for a in counts)
    triples = sum(a * b * (total - a - b) for i, a in enumerate(counts) for j, b in enumerate(counts) if i != j)
    quadruples = sum(
        counts[a] * counts[b] * counts[c] * (total - counts[a] - counts[b] - counts[c])
        for a in range(5)
        for b in range(5)
        for c in range(5)
        if len({a, b, c}) == 3
    )
    formula = (
        text_ones @ (k * m) @ text_ones / pairs
        + (
            (group_ones @ r @ group_ones) * (group_ones @ s @ group_ones)
            - 4 * (r @ group_ones) @ (s @ group_ones)
            + 2 * np.trace(r @ s)
        )
        / quadruples
        - 2 * ((k @ text_ones) @ (m @ text_ones) - text_ones @ ((k @ member) * (m @ member)) @ group_ones) / triples
    )

    assert formula == pytest.approx(oracles.hsic_by_tuples(x @ x.T, y @ y.T, text), rel=1e-10)

    # Without pairs of one text, HSIC of the centred samples is that of Song et al.
    alone = np.arange(len(text))
    assert oracles.hsic_by_tuples(x @ x.T, y @ y.T, alone) == pytest.approx(oracles.hsic_1(x @ x.T, y @ y.T), rel=1e-10)


@warned
@pytest.mark.parametrize("how", ["groups", "cut"])
@pytest.mark.parametrize("estimator", ["minibatch", "exact"])
@pytest.mark.parametrize("kind", TEXTS)
def test_cka_is_the_ratio_of_means_over_tuples_of_distinct_texts(kind, estimator, how):
    rows = TEXTS[kind]
    if how == "cut":
        # All rows of a text but its last have equal lengths.
        rows = [[2] * (sum(text) // 2) + [1] * (sum(text) % 2) for text in rows]
    bank = bank_of(rows)

    result = lsim.analyze(opened(bank), data_of_rows(rows, how), lsim.CKA(estimator=estimator, minibatch=ALL))["cka"]
    text = np.repeat(np.arange(len(rows)), [sum(row_mask) for row_mask in rows])
    sites = bank.numpy().transpose(1, 0, 2)

    for first, second in ((0, 1), (1, 2)):
        expected = oracles.cka_by_tuples(sites[first], sites[second], text)
        assert float(result.values[first, second]) == pytest.approx(expected, rel=1e-9)


@warned
@pytest.mark.light("CKA-unequal", "RSA-one short", "MutualKNN-unequal", "Procrustes-unequal", "Similarity-unequal")
@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("name", MEASURES)
def test_the_null_is_that_of_all_orders_of_the_texts(name, kind):
    """Means and p-values agree with those over all orders, within what so many random orders vary."""
    make, measure = MEASURES[name]
    rows = TEXTS[kind]
    bank = bank_of(rows, seed=2)
    permutations = PERMUTATIONS.get(name, MOST_PERMUTATIONS)

    report = lsim.analyze(opened(bank), data_of_rows(rows, "groups"), make(permutations=permutations))
    [result] = report.values()
    x, _, y = bank.numpy().transpose(1, 0, 2)
    grid = oracles.positions_in_common([text for text in rows if len(text) > 1])
    if kind == "one short":
        # The samples of the third text lie between those of the second and the fourth.
        first, second, *later = grid
        grid = [first, second, *([sample + 1 for sample in text] for text in later)]
    observed, values = oracles.exchanged_values(measure, x, y, grid)

    assert float(result.observed[0, 2]) == pytest.approx(observed, abs=1e-9)

    error = values.std() / math.sqrt(permutations)
    assert float(result.null_mean[0, 2]) == pytest.approx(values.mean(), abs=5 * error + 1e-9)

    p = oracles.p_value(observed, values)
    error = math.sqrt(p * (1 - p) / permutations) + 1 / permutations
    assert float(result.p_values[0, 2]) == pytest.approx(p, abs=5 * error)
