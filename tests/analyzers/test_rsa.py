"""RSA: dissimilarities, ranks, invariances, two models and nulls, against loops, scipy and rsatoolbox."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.activations.view import reduce
from tl_layersim.analyzers._pairwise import average_ranks, dissimilarities
from tl_layersim.analyzers.rsa import scaled_dissimilarities
from tl_layersim.core import Sums

from .. import oracles
from ..inputs.views import from_views, layer_run, residuals, samples, view
from ..models.tiny_models import random_tokens, tiny_llama
from ..oracles.rsa import apart

KINDS = ["correlation", "cosine", "euclidean", "squared_euclidean"]
# By their names in rsatoolbox.
COMPARISONS = {
    "spearman": "spearman",
    "pearson": "corr",
    "cosine": "cosine",
    "rho_a": "rho-a",
    "whitened_cosine": "cosine_cov",
    "whitened_pearson": "corr_cov",
}


def between(analyzer, x: np.ndarray, y: np.ndarray) -> torch.Tensor:
    sums = Sums.of(reduce({"k": analyzer.kernel(Sums())}, samples(x), samples(y))[1]["k"])
    return analyzer.compute(sums, layer_run(len(x), len(y))).values


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compare", COMPARISONS)
def test_it_equals_its_oracle(kind, compare):
    """Minibatches of several sizes, weighted by their pairs."""
    data = [residuals(seed, layers=3, tokens=n) for seed, n in enumerate((12, 20, 5))]
    expected = oracles.oracle_rsa(data, kind=kind, compare=compare)

    result = from_views(lsim.RSA(dissimilarity=kind, compare=compare), [samples(x) for x in data])

    np.testing.assert_allclose(result.values, expected["values"], atol=1e-9)
    assert (result.samples, result.minibatches) == (37, 3)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_it_equals_scipy(kind):
    spatial = pytest.importorskip("scipy.spatial.distance")
    stats = pytest.importorskip("scipy.stats")
    x = residuals(0, layers=2, tokens=15)
    rdms = [spatial.pdist(layer, kind) for layer in x]

    for compare, expected in (("spearman", stats.spearmanr(*rdms)[0]), ("pearson", stats.pearsonr(*rdms)[0])):
        result = from_views(lsim.RSA(dissimilarity=kind, compare=compare), [samples(x)])
        assert float(result.values[0, 1]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("compare", COMPARISONS)
def test_it_equals_rsatoolbox(compare):
    rsatoolbox = pytest.importorskip("rsatoolbox")
    x = residuals(0, layers=2, tokens=15)
    # Equal dissimilarities, which only rho_a counts.
    x[:, 10:] = x[:, 5:10]

    for kind, method in (("correlation", "correlation"), ("squared_euclidean", "euclidean")):
        rdms = rsatoolbox.rdm.calc_rdm([rsatoolbox.data.Dataset(layer) for layer in x], method=method)
        # Dissimilarities that differ by rounding alone are ties here.
        rdms.dissimilarities = rdms.dissimilarities.round(9)
        expected = rsatoolbox.rdm.compare(rdms[0], rdms[1], method=COMPARISONS[compare]).item()
        result = from_views(lsim.RSA(dissimilarity=kind, compare=compare), [samples(x)])
        assert float(result.values[0, 1]) == pytest.approx(expected, abs=1e-6)


def test_whitened_squared_distances_are_biased_cka():
    """Diedrichsen et al. 2021."""
    x = residuals(0, layers=3, tokens=20)
    whitened = from_views(lsim.RSA(dissimilarity="squared_euclidean", compare="whitened_cosine"), [samples(x)])
    np.testing.assert_allclose(whitened.values, oracles.oracle_cka([x], biased=True)["values"], atol=1e-6)


def test_rho_a_of_ties_is_below_one_and_has_a_null():
    x = np.repeat(residuals(0, layers=2, tokens=6), 2, axis=1)
    result = from_views(lsim.RSA(compare="rho_a", permutations=19), [samples(x)])
    expected = oracles.oracle_rsa([x], compare="rho_a")["values"]

    np.testing.assert_allclose(result.values, expected, atol=1e-9)
    np.testing.assert_allclose(result.observed, expected, atol=1e-9)
    assert float(result.values[0, 0]) < 0.999


def test_comparisons_that_do_not_fit_are_refused():
    with pytest.raises(lsim.LayersimError, match=r"`compare`.*whitened"):
        from_views(lsim.RSA(compare="whitened_cosine"), [view(residuals(0, tokens=20), rows=5)])
    from_views(lsim.RSA(compare="whitened_cosine", unit="token"), [view(residuals(0, tokens=20), rows=5)])
    with pytest.raises(lsim.LayersimError, match=r"`deconfound`.*rho_a"):
        lsim.RSA(compare="rho_a", deconfound="input")


@pytest.mark.parametrize("kind", KINDS)
def test_dissimilarities_of_each_pair(kind):
    x = residuals(0, layers=2, tokens=9)
    matrices = dissimilarities(torch.as_tensor(x), (), kind=kind)
    expected = np.zeros((2, 9, 9))
    for layer, samples_of_layer in enumerate(x):
        for i, j in itertools.permutations(range(9), 2):
            expected[layer, i, j] = apart(samples_of_layer[i], samples_of_layer[j], kind)

    np.testing.assert_allclose(matrices, expected, atol=1e-6)
    assert matrices.dtype == torch.float32
    assert torch.equal(matrices, matrices.transpose(1, 2))


def test_distances_far_from_the_origin_keep_their_digits():
    x = torch.as_tensor(residuals(0, layers=2, tokens=9))
    expected = torch.cdist(x, x)
    # Squared norms of 10^18 leave nothing of squared distances of 10: the mean is taken off first.
    np.testing.assert_allclose(dissimilarities(x + 1e9, (), kind="euclidean"), expected, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_narrow_layers_are_not_read_beyond_their_width(kind):
    x = residuals(0, layers=2, tokens=9)
    padded = torch.as_tensor(x.copy())
    padded[1, :, 5:] = 0

    matrices = dissimilarities(padded, (8, 5), kind=kind)

    assert torch.equal(matrices[1], dissimilarities(torch.as_tensor(x[1:, :, :5].copy()), (), kind=kind)[0])
    assert torch.equal(matrices[0], dissimilarities(torch.as_tensor(x[:1]), (), kind=kind)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_equal_samples_have_equal_dissimilarities(kind):
    x = np.repeat(residuals(0, layers=1, tokens=6, width=37), 3, axis=1) * 1e3
    matrix = dissimilarities(torch.as_tensor(x), (), kind=kind)[0]

    for i in range(18):
        for j in range(18):
            assert matrix[i, j] == matrix[3 * (i // 3), 3 * (j // 3)], (i, j)
    assert float(matrix[0, 1]) == 0 < float(matrix[0, 3])


def test_vectors_without_direction_are_like_no_other():
    # The means of these constants are rounded, so that the centred vectors are not zero.
    x = torch.as_tensor(residuals(0, layers=1, tokens=4, width=7))
    x[0, 0] = 1000000.1
    x[0, 1] = 1000000.3

    matrix = dissimilarities(x, (), kind="correlation")[0]

    assert matrix[0].tolist() == [0, 1, 1, 1]
    assert matrix[1].tolist() == [1, 0, 1, 1]

    x[0, 0] = 0.0
    assert dissimilarities(x, (), kind="cosine")[0][0].tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("compare", ["spearman", "pearson", "rho_a"])
def test_equal_dissimilarities_have_no_relation(compare):
    matrix = torch.full((1, 7, 7), 0.1)
    relation = scaled_dissimilarities(matrix, None, 7, False, compare=compare)
    assert torch.equal(relation.terms, torch.zeros(1, 49, dtype=torch.float64))


def test_equal_values_share_the_mean_of_their_ranks():
    values = torch.tensor([[3.0, 1.0, 2.0, 1.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]])
    expected = [[5, 1.5, 3, 1.5, 5, 5], [3.5] * 6, [6, 5, 4, 3, 2, 1]]

    assert average_ranks(values).tolist() == expected

    stats = pytest.importorskip("scipy.stats")
    many = torch.randint(0, 9, (4, 60), generator=torch.Generator().manual_seed(0)).float()
    np.testing.assert_array_equal(average_ranks(many), stats.rankdata(many, axis=1))


ROTATION = np.linalg.qr(np.random.default_rng(0).normal(size=(8, 8)))[0]
CHANGES = {
    "scale": lambda x: 7 * x,
    "translation": lambda x: x + np.arange(8.0),
    "constant": lambda x: x + 3.0,
    "rotation": lambda x: x @ ROTATION,
    "norms": lambda x: x * np.linspace(0.5, 3, x.shape[1])[:, None],
    "shear": lambda x: x * np.arange(1, 9),
}
INVARIANT = {
    "correlation": {"scale", "constant", "norms"},
    "cosine": {"scale", "rotation", "norms"},
    "euclidean": {"scale", "rotation", "translation", "constant"},
    "squared_euclidean": {"scale", "rotation", "translation", "constant"},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_invariances(kind, change):
    x = residuals(0, tokens=30)
    similarity = float(between(lsim.RSA(dissimilarity=kind), x[-1:], CHANGES[change](x[-1:])))
    assert (similarity > 0.99999) == (change in INVARIANT[kind]), similarity


def test_the_order_of_samples_on_both_sides_changes_nothing_and_on_one_side_all():
    x = residuals(0, tokens=30)
    order = np.random.default_rng(1).permutation(30)
    analyzer = lsim.RSA()

    unpermuted = between(analyzer, x, x)

    np.testing.assert_allclose(between(analyzer, x[:, order], x[:, order]), unpermuted, atol=1e-9)
    assert float(between(analyzer, x, x[:, order]).abs().max()) < 0.3


def test_two_models_apart_and_in_a_grid():
    models = {"a": tiny_llama(), "b": tiny_llama(seed=1), "c": tiny_llama(layers=2, seed=2)}
    rows = random_tokens(4, 16)
    analyzer = lsim.RSA(minibatch=16, permutations=20)

    grid = lsim.compare_grid(
        models, lsim.Data(rows, batch_size=2), analyzer, distance=lambda result: 1 - float(result.values[-1, -1])
    )
    alone = lsim.compare(models["a"], models["c"], lsim.Data(rows, batch_size=2), analyzer)

    for name in alone.tensor_fields():
        torch.testing.assert_close(getattr(grid["a", "c"], name), getattr(alone, name), rtol=1e-4, atol=1e-4, equal_nan=True)
    assert alone.values.shape == (4, 3)


def test_a_layer_of_equal_samples_is_nan_and_named():
    x = residuals(0, tokens=20)
    x[1] = 1.0

    with pytest.warns(lsim.LayersimWarning, match=r"RSA is not defined at blocks\.0\.hook_resid_post"):
        result = from_views(lsim.RSA(permutations=19), [samples(x)])

    for field in (result.values, result.p_values, result.calibrated):
        assert bool(field[1].isnan().all() and field[:, 1].isnan().all())
        assert not bool(field[0, 2:].isnan().any())

    x[:] = 1.0
    with pytest.raises(lsim.LayersimError, match=r"^RSA .*hook_resid_pre"):
        from_views(lsim.RSA(), [samples(x)])


def test_too_few_samples_are_refused():
    with pytest.raises(lsim.LayersimError, match=r"RSA needs 4 tokens"):
        from_views(lsim.RSA(), [samples(residuals(0, tokens=3))])
    with pytest.raises(lsim.LayersimError, match=r"`minibatch`.* 4"):
        lsim.RSA(minibatch=3)

    lsim.RSA(minibatch=4)
    with pytest.raises(lsim.LayersimError, match="`permutations`"):
        lsim.RSA(permutations=3)


def test_headline_and_sequences():
    x = residuals(0, tokens=60)
    result = from_views(lsim.RSA(level="sequence", pool="last", permutations=19), [view(x, rows=12)])

    assert result.samples == 12
    assert result.headline()["RSA(embedding, last)"] == float(result.values[0, -1])
    assert result.headline()["RSA(last but one, last)"] == float(result.values[-2, -1])
    assert "p-value of the maximum over pairs of layers" in result.headline()


def test_a_minibatch_of_equal_dissimilarities_is_left_out_of_the_average():
    """Layer 0 is constant in the first batch, as first tokens are where all rows of a batch begin alike."""
    first = residuals(1, layers=3, tokens=12)
    two = residuals(2, layers=3, tokens=10)
    first[0] = 1.0
    analyzer = lsim.RSA(minibatch=12, permutations=19)

    alone = from_views(analyzer, [samples(two, np.arange(10))])
    result = from_views(analyzer, [samples(first, np.arange(12) + 50), samples(two, np.arange(10))])

    assert torch.allclose(result.values[0], alone.values[0], atol=1e-12)
    assert torch.allclose(result.null_mean[0], alone.null_mean[0], atol=1e-12)

    later = oracles.oracle_rsa([first[1:], two[1:]])["values"]
    assert np.allclose(result.values[1:, 1:], later, atol=1e-9)


def test_layers_that_never_vary_together_have_no_correlation():
    first = residuals(1, layers=3, tokens=12)
    two = residuals(2, layers=3, tokens=12)
    first[0] = 1.0
    two[1] = 1.0

    result = from_views(lsim.RSA(permutations=19), [samples(first, np.arange(12)), samples(two, np.arange(12) + 50)])

    assert result.values.isnan().tolist() == [[False, True, False], [True, False, False], [False, False, False]]
    assert torch.equal(result.p_values.isnan(), result.values.isnan())
    assert not bool(result.max_p_value.isnan())
