"""Mutual nearest neighbours: the graph, ties, chance, invariances, two models and nulls."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.activations.view import reduce
from tl_layersim.analyzers.mutual_knn import nearest_neighbours
from tl_layersim.core import Sums

from .. import oracles
from ..inputs.populations import data_of_rows
from ..inputs.views import from_views, layer_run, residuals, samples, view
from ..models.token_bank import opened


def between(analyzer, x: np.ndarray, y: np.ndarray) -> torch.Tensor:
    sums = Sums.of(reduce({"k": analyzer.kernel(Sums())}, samples(x), samples(y))[1]["k"])
    return analyzer.compute(sums, layer_run(len(x), len(y))).values


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("k", [1, 3])
def test_it_equals_its_oracle(metric, k):
    data = [residuals(seed, layers=3, tokens=n) for seed, n in enumerate((12, 20, 4))]
    expected = oracles.oracle_mutual_knn(data, k=k, kind=metric)

    result = from_views(lsim.MutualKNN(k=k, metric=metric), [samples(x) for x in data])

    for field in ("values", "chance"):
        np.testing.assert_allclose(getattr(result, field), expected[field], atol=1e-12)
    # Of four samples, all others are the three nearest.
    assert (result.samples, result.minibatches, result.k) == ((36, 3, 1) if k == 1 else (32, 2, 3))


def by_neighbours(overlap, x, y, k, text):
    if overlap == "cknna":
        return oracles.cknna(x, y, k, text)
    measure = oracles.jaccard_of_neighbours if overlap == "jaccard" else oracles.cycle_knn
    return measure(oracles.neighbours(x, k, "cosine", text), oracles.neighbours(y, k, "cosine", text))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("overlap", ["jaccard", "cycle", "cknna"])
def test_other_overlaps_equal_their_oracles(overlap, rows):
    x = residuals(0, layers=2, tokens=16)
    y = residuals(1, layers=3, tokens=16, width=5) + residuals(0, tokens=16)[:1, :, :5]
    analyzer = lsim.MutualKNN(k=4, overlap=overlap)
    views = [view(z, rows=16 // rows) for z in (x, y)]

    sums = Sums.of(reduce({"k": analyzer.kernel(Sums())}, *views)[1]["k"])
    result = analyzer.compute(sums, layer_run(2, 3))
    text = np.arange(16) // rows
    expected = np.empty((len(x), len(y)))
    for row, column in np.ndindex(expected.shape):
        expected[row, column] = by_neighbours(overlap, x[row], y[column], 4, text)

    # Cosines are rounded to float32.
    np.testing.assert_allclose(result.values, expected, atol=1e-6 if overlap == "cknna" else 1e-12)
    assert bool(result.chance.isnan())
    assert result.overlap == overlap


def test_cycles_are_looked_up_at_the_column_site_first():
    x = residuals(0, layers=3, tokens=30)
    result = from_views(lsim.MutualKNN(k=3, overlap="cycle", permutations=19), [samples(x)])

    assert float((result.values - result.values.T).abs().max()) > 0.01
    assert not lsim.MutualKNN(overlap="cycle").needs.symmetric
    assert lsim.MutualKNN(overlap="jaccard").needs.symmetric


@pytest.mark.parametrize("overlap", ["jaccard", "cycle", "cknna"])
def test_the_null_of_other_overlaps_is_that_of_exchanged_texts(overlap):
    """Five texts of two tokens have 120 orders, over all of which the mean is known."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(10, 4))
    y = rng.normal(size=(10, 4))
    bank = torch.as_tensor(np.stack([x, y], 1))
    rows = [[2]] * 5
    analyzer = lsim.MutualKNN(k=3, overlap=overlap, permutations=400, minibatch=64)

    [result] = lsim.analyze(opened(bank), data_of_rows(rows, "groups"), analyzer).values()
    grid = oracles.positions_in_common(rows)
    measure = functools.partial(by_neighbours, overlap)
    observed, values = oracles.exchanged_values(lambda a, b, text: measure(a, b, 3, text), x, y, grid)

    assert float(result.observed[0, 1]) == pytest.approx(observed, abs=1e-6)
    assert float(result.null_mean[0, 1]) == pytest.approx(values.mean(), abs=5 * values.std() / 400**0.5)


def test_the_headline_names_the_overlap():
    result = from_views(lsim.MutualKNN(k=3, overlap="jaccard"), [samples(residuals(0, tokens=20))])
    assert "Jaccard index of neighbours(embedding, last)" in result.headline()
    assert "expected for neighbours at random" not in result.headline()


def test_it_equals_scikit_learn():
    neighbors = pytest.importorskip("sklearn.neighbors")
    x = residuals(0, layers=2, tokens=40)
    k = 5
    sets = []
    for layer in x:
        unit = layer / np.linalg.norm(layer, axis=1, keepdims=True)
        sets.append(neighbors.NearestNeighbors(n_neighbors=k).fit(unit).kneighbors(return_distance=False))
    expected = np.mean([len(set(a) & set(b)) / k for a, b in zip(*sets, strict=True)])

    assert float(from_views(lsim.MutualKNN(k=k), [samples(x)]).values[0, 1]) == pytest.approx(expected, abs=1e-12)


def test_tied_samples_share_the_places_that_are_left():
    apart = torch.tensor([[[0.0, 1.0, 2.0, 2.0, 2.0], [1.0, 0, 3, 4, 5], [2, 3, 0, 3, 3], [2, 4, 3, 0, 9], [2, 5, 3, 9, 0]]])
    neighbours = nearest_neighbours(apart, None, 5, False, k=2)
    rows = neighbours.terms.reshape(5, 5)

    # One nearer, one place for three; two without ties; one nearer, one place for three; then two without ties each.
    assert rows[0].tolist() == pytest.approx([0, 1, 1 / 3, 1 / 3, 1 / 3])
    assert rows[1].tolist() == [1, 0, 1, 0, 0]
    assert rows[2].tolist() == pytest.approx([1, 1 / 3, 0, 1 / 3, 1 / 3])
    assert rows[3].tolist() == [1, 0, 1, 0, 0]
    assert neighbours.numbers["chance_{}"].tolist() == [2.5]


def test_ties_give_the_expected_overlap_of_random_choices():
    """Six samples of which pairs are equal: k = 2 leaves one place for two tied ones."""
    x = np.repeat(residuals(0, layers=1, tokens=3), 2, axis=1)
    overlap = float(from_views(lsim.MutualKNN(k=2), [samples(x)]).values)

    # The twin is the first neighbour; the second is one of the nearer other pair, chosen at random twice: 1/2 that it agrees.
    assert overlap == pytest.approx((1 + 0.5) / 2, abs=1e-12)

    result = from_views(lsim.MutualKNN(k=2), [samples(np.ones((2, 9, 4)))])
    np.testing.assert_allclose(result.values, float(result.chance), atol=1e-12)


def test_unrelated_layers_share_as_many_as_chance():
    rng = np.random.default_rng(0)
    result = from_views(lsim.MutualKNN(k=10), [samples(rng.normal(size=(2, 200, 20))) for _ in range(4)])

    assert float(result.values[0, 1]) == pytest.approx(float(result.chance), abs=0.01)
    assert float(result.chance) == pytest.approx(10 / 199)
    np.testing.assert_allclose(result.values.diagonal(), 1, atol=1e-12)
    assert result.headline()["expected for neighbours at random"] == float(result.chance)


ROTATION = np.linalg.qr(np.random.default_rng(0).normal(size=(8, 8)))[0]
CHANGES = {
    "scale": lambda x: 7 * x,
    "translation": lambda x: x + 9 * np.arange(8.0),
    "rotation": lambda x: x @ ROTATION,
    "norms": lambda x: x * np.linspace(0.2, 5, x.shape[1])[:, None],
    "shear": lambda x: x * np.arange(1, 9) ** 2,
}
INVARIANT = {"cosine": {"scale", "rotation", "norms"}, "euclidean": {"scale", "rotation", "translation"}}


@pytest.mark.parametrize(("metric", "change"), itertools.product(INVARIANT, CHANGES))
def test_invariances(metric, change):
    x = residuals(0, tokens=60)[-1:]
    similarity = float(between(lsim.MutualKNN(k=5, metric=metric), x, CHANGES[change](x)))
    assert (similarity == 1) == (change in INVARIANT[metric]), similarity


def test_the_order_of_samples_on_both_sides_changes_nothing_and_on_one_side_all():
    x = residuals(0, tokens=50)
    order = np.random.default_rng(1).permutation(50)
    # Equal samples too.
    x[:, 10:20] = x[:, :10]
    analyzer = lsim.MutualKNN(k=4)

    np.testing.assert_allclose(between(analyzer, x[:, order], x[:, order]), between(analyzer, x, x), atol=1e-12)
    assert float(between(analyzer, x, x[:, order]).max()) < 0.3


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"k": 0}, "`k`.* 0"),
        ({"k": 10, "minibatch": 11}, "`minibatch`.* 11; .* 12"),
        ({"k": 100, "minibatch": 64}, "`minibatch`.* 64; .* 102"),
        ({"k": 1, "minibatch": 3}, "`minibatch`.* 3; .* 4"),
        ({"permutations": 3}, "`permutations`.* 3"),
        ({"overlap": "cknna", "k": 1}, "`k`.* 1"),
        ({"overlap": "cknna", "metric": "euclidean"}, "`metric`.* 'euclidean'"),
    ],
)
def test_wrong_options_are_refused(options, text):
    with pytest.raises(lsim.LayersimError, match=text):
        lsim.MutualKNN(**options)


def test_the_smallest_minibatch():
    lsim.MutualKNN(k=10, minibatch=12)
    from_views(lsim.MutualKNN(k=3), [samples(residuals(0, tokens=5))])
    with pytest.raises(lsim.LayersimError, match=r"MutualKNN needs 5 tokens"):
        from_views(lsim.MutualKNN(k=3), [samples(residuals(0, tokens=4))])
