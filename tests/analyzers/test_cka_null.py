"""The permutation null of CKA: against naive permutations, calibrated-similarity, and across ways to run two models."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analyzers._minibatch_pairs import draw_minibatches
from tl_layersim.analyzers._permutation_null import draw_permutations, sample_key
from tl_layersim.core import Sums
from tl_layersim.models.view import reduce

from .. import oracles
from ..tiny_models import random_tokens, tiny_llama
from ..views import from_views, residuals, view

NULL = ("calibrated", "p_values", "null_mean", "null_quantiles", "null_threshold", "max_null", "max_p_value", "max_calibrated")


def pairs_of(x: np.ndarray, biased: bool) -> float:
    return (len(x) - 1) ** 2 if biased else len(x) * (len(x) - 3)


def naive_null(analyzer, views, others=None) -> np.ndarray:
    """`permutation row column`: the permuted samples' HSIC, minibatch by minibatch and pair by pair."""
    biased = analyzer.estimator == "biased"
    hsic = oracles.hsic_0 if biased else oracles.hsic_1
    others = views if others is None else others
    rows, columns = len(views[0].activations), len(others[0].activations)
    cross = np.zeros((analyzer.permutations, rows, columns))
    own_x, own_y = np.zeros(rows), np.zeros(columns)
    for one, other in zip(views, others, strict=True):
        key = sample_key(one.tokens, analyzer.seed)
        drawn = draw_minibatches(one.tokens, one.activations.shape[1], analyzer.minibatch, analyzer.seed)
        for number, chosen in enumerate(drawn, start=1):
            xs, ys = one.activations[:, chosen].numpy(), other.activations[:, chosen].numpy()
            weight = pairs_of(xs[0], biased)
            own_x += [weight * hsic(x @ x.T, x @ x.T) for x in xs]
            own_y += [weight * hsic(y @ y.T, y @ y.T) for y in ys]
            for k, order in enumerate(draw_permutations(analyzer.permutations, len(chosen), key + number)):
                for a, x in enumerate(xs):
                    for b, y in enumerate(ys):
                        permuted = y[order]
                        cross[k, a, b] += weight * hsic(x @ x.T, permuted @ permuted.T)
    return cross / np.sqrt(np.outer(own_x, own_y))


@pytest.mark.parametrize("estimator", ["minibatch", "biased"])
@pytest.mark.parametrize("minibatch", [7, 10])
def test_the_null_is_that_of_permuted_samples(estimator, minibatch):
    """Odd and even minibatches, a batch of one smaller minibatch, and more permutations than a minibatch has samples."""
    analyzer = lsim.CKA(estimator=estimator, minibatch=minibatch, permutations=23)
    views = [view(residuals(seed, layers=3, tokens=n), np.arange(n) + seed) for seed, n in enumerate((21, 6))]
    sums = Sums()
    for one in views:
        sums = sums + Sums.of(reduce({"k": analyzer.kernel(Sums())}, one)[1]["k"])
    scale = torch.outer(sums["xx"].sqrt(), sums["yy"].sqrt())
    expected = naive_null(analyzer, views)
    np.testing.assert_allclose(sums["null xy"] / scale, expected, atol=1e-12)
    found = from_views(analyzer, views)
    mean = np.triu(expected.mean(0))
    np.testing.assert_allclose(found.null_mean, mean + np.triu(mean, 1).T, atol=1e-12)
    np.testing.assert_allclose(found.max_null, [max(one[0, 1], one[0, 2], one[1, 2]) for one in expected], atol=1e-12)
    plain = from_views(lsim.CKA(estimator=estimator, minibatch=minibatch), views)
    assert torch.equal(plain.values, found.values)


@pytest.mark.parametrize("estimator", ["minibatch", "biased"])
def test_one_minibatch_equals_calibrated_similarity(estimator):
    other = pytest.importorskip("calibrated_similarity")
    n, biased = 24, estimator == "biased"
    x = residuals(0, layers=3, tokens=n)
    analyzer = lsim.CKA(estimator=estimator, permutations=40)
    one = view(x)
    [chosen] = draw_minibatches(one.tokens, n, 256, 0)
    drawn = draw_permutations(40, n, sample_key(one.tokens, 0) + 1)
    layers = [torch.as_tensor(layer)[chosen] for layer in x]
    found = from_views(analyzer, [one])

    def similarity(a: torch.Tensor, b: torch.Tensor) -> float:
        a, b = a.numpy(), b.numpy()
        return oracles.oracle_cka([a[None]], [b[None]], biased=biased)["values"].item()

    def orders() -> object:
        following = iter(drawn)
        return lambda n, device: next(following)

    for a, b in ((0, 1), (0, 2), (1, 1)):
        expected = other.calibrate(layers[a], layers[b], similarity, K=40, perm_fn=orders())
        ours = (found.calibrated[a, b], found.p_values[a, b], found.null_threshold[a, b])
        np.testing.assert_allclose([float(z) for z in ours], [float(z) for z in expected], atol=1e-6)
    expected = other.calibrate_layers(
        layers, layers, similarity, K=40, perm_fn=orders(), agg=lambda s: max(s[0, 1], s[0, 2], s[1, 2])
    )
    ours = (found.max_calibrated, found.max_p_value, found.max_threshold)
    np.testing.assert_allclose([float(z) for z in ours], [float(z) for z in expected], atol=1e-6)


def test_float32_activations_give_the_null_of_float64():
    x = residuals(0, tokens=64)
    analyzer = lsim.CKA(minibatch=32, permutations=40)
    exact, single = (from_views(analyzer, [view(x.astype(dtype))]) for dtype in (np.float64, np.float32))
    spread = exact.null_quantiles[-1] - exact.null_quantiles[0]
    assert float(((single.null_mean - exact.null_mean) / spread).abs().max()) < 1e-5
    assert float(((single.null_threshold - exact.null_threshold) / spread).abs().max()) < 1e-5


@pytest.mark.parametrize("estimator", ["minibatch", "biased"])
def test_models_that_are_apart_have_the_null_of_models_together(estimator):
    analyzer = lsim.CKA(estimator=estimator, minibatch=16, permutations=40)
    a, b = view(residuals(0, tokens=60)), view(residuals(1, layers=3, tokens=60, width=5))
    exchange = analyzer.exchange()
    assert exchange is not None
    joined = exchange.join(*(exchange.prepare(exchange.kernel(one)) for one in (a, b)))
    together = reduce({"k": analyzer.kernel(Sums())}, a, b)[1]["k"]
    assert joined.keys() == together.keys()
    for name, value in together.items():
        torch.testing.assert_close(joined[name], value, rtol=1e-11, atol=1e-9)
    np.testing.assert_allclose(
        joined["null xy"] / torch.outer(joined["xx"].sqrt(), joined["yy"].sqrt()), naive_null(analyzer, [a], [b]), atol=1e-11
    )
    small = exchange.prepare(exchange.kernel(view(residuals(0, tokens=3))))
    assert torch.equal(exchange.join(small, small)["null xy"], torch.zeros(40, 4, 4, dtype=torch.float64))


def test_compare_and_compare_grid_use_the_same_permutations():
    models = {"a": tiny_llama(), "b": tiny_llama(seed=1), "c": tiny_llama(seed=2)}
    rows, analyzer = random_tokens(4, 16), lsim.CKA(minibatch=16, permutations=40)
    grid = lsim.compare_grid(models, rows, analyzer, batch_size=2)
    for pair in (("a", "b"), ("a", "c")):
        alone = lsim.compare(*(models[name] for name in pair), rows, analyzer, batch_size=2)
        for name in NULL:
            torch.testing.assert_close(getattr(grid[pair], name), getattr(alone, name), rtol=1e-6, atol=1e-6)
    own = lsim.analyze(models["b"], rows, [analyzer], batch_size=2)["cka"]
    # A model beside itself has no pair of a layer and itself.
    torch.testing.assert_close(grid["b", "b"].max_null, own.max_null, rtol=1e-6, atol=1e-6)
    assert float(own.max_value) < 1
    assert torch.equal(grid["b", "a"].p_values, grid["a", "b"].p_values.T)


def test_related_layers_stand_out_and_unrelated_ones_do_not():
    rng = np.random.default_rng(0)
    related = from_views(lsim.CKA(permutations=99), [view(residuals(0, tokens=100))])
    assert torch.equal(related.p_values, related.p_values.T)
    assert bool((related.p_values.diagonal(1) == 0.01).all())
    assert related.headline()["p-value of the maximum over pairs of layers"] == 0.01
    noise = from_views(lsim.CKA(estimator="biased", permutations=99), [view(rng.normal(size=(4, 40, 60)))])
    off = ~torch.eye(4, dtype=torch.bool)
    # The width alone gives 0.6.
    assert float(noise.values[off].min()) > 0.5
    assert float(noise.calibrated[off].max()) < 0.05
    assert float(noise.null_mean[off].min()) > 0.5


def test_p_values_of_unrelated_layers_are_uniform():
    rng = np.random.default_rng(0)
    analyzer = lsim.CKA(permutations=39)
    found = [from_views(analyzer, [view(rng.standard_cauchy(size=(2, 20, 3)))]) for _ in range(300)]
    for p in ([float(one.p_values[0, 1]) for one in found], [float(one.max_p_value) for one in found]):
        for level in (0.05, 0.1, 0.5):
            rate = np.mean(np.array(p) <= level + 1e-9)
            assert abs(rate - level) < 3.5 * math.sqrt(level * (1 - level) / 300), (level, rate)


def test_the_order_of_samples_on_both_sides_changes_nothing():
    """The pairing of samples matters, their order does not: the null has the same distribution, the value is the same."""
    x = residuals(0, tokens=30)
    order = np.random.default_rng(1).permutation(30)
    one, other = (from_views(lsim.CKA(permutations=999), [view(z)]) for z in (x, x[:, order]))
    np.testing.assert_allclose(one.values, other.values, atol=1e-12)
    spread = float((one.null_quantiles[-1] - one.null_quantiles[0]).max())
    np.testing.assert_allclose(one.null_mean, other.null_mean, atol=0.15 * spread)


def test_the_null_of_a_layer_without_differences_is_nan():
    x = residuals(0, tokens=30)
    x[1] = 1.0
    with pytest.warns(lsim.LayersimWarning, match="not defined"):
        found = from_views(lsim.CKA(permutations=19), [view(x)])
    assert bool(found.p_values[1].isnan().all())
    assert not bool(found.p_values[0, 2:].isnan().any())
    assert 0 < float(found.max_p_value) <= 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"permutations": 10}, r"at least 19(.|\n)*CKA\(permutations=200\)"),
        ({"permutations": -1}, "`permutations` must be 0"),
        ({"permutations": 200, "estimator": "exact"}, r"cannot be combined(.|\n)*estimator=\"minibatch\", permutations=200"),
        ({"permutations": 20.0}, "`permutations`"),
    ],
)
def test_wrong_options_are_refused(options, text):
    with pytest.raises(lsim.LayersimError, match=text):
        lsim.CKA(**options)


def test_a_null_that_does_not_fit_is_refused_before_the_run():
    with pytest.raises(lsim.LayersimError, match=r"more memory than `max_memory_gb`(.|\n)*max_memory_gb=1\)"):
        lsim.analyze(tiny_llama(), random_tokens(), lsim.CKA(permutations=100, max_memory_gb=1e-6))
    models = {name: tiny_llama(seed=n) for n, name in enumerate("abc")}
    with pytest.raises(lsim.LayersimError, match="96 pairs of layers"):
        lsim.compare_grid(models, random_tokens(), lsim.CKA(permutations=100, max_memory_gb=2e-4))
