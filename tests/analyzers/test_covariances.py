"""The kernels of cross-products: what is summed, shared, held out, permuted, and how much memory it takes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.activations.view import reduce
from tl_layersim.analyzers._moments import Covariances
from tl_layersim.core import Sums

from .. import oracles
from ..inputs.views import residuals, view
from ..models.tiny_models import random_tokens, tiny_llama
from ..running.options import called

EACH = [lsim.Procrustes, lsim.CCA, lsim.LinearPredictivity]


def summed(analyzer, xs, ys=None, **view_options) -> Sums:
    kernel = analyzer.kernel(Sums())
    total = Sums()
    for i, x in enumerate(xs):
        views = [view(x, row=torch.arange(x.shape[1]), **view_options)]
        if ys is not None:
            views.append(view(ys[i]))
        total = total + Sums.of(reduce({"k": kernel}, *views)[1]["k"])
    return total


def covariance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (x - x.mean(0)).T @ (y - y.mean(0)) / len(x)


@pytest.mark.parametrize("two", [False, True])
def test_covariances_of_all_pairs(two):
    xs = [residuals(seed, tokens=n) for seed, n in enumerate((9, 1, 14))]
    ys = [residuals(seed + 5, layers=3, tokens=n, width=5) for seed, n in enumerate((9, 1, 14))] if two else None

    result = Covariances(summed(lsim.Procrustes(), xs, ys))
    x = np.concatenate(xs, axis=1)
    y = np.concatenate(ys, axis=1) if two else x

    assert (result.samples, result.two_models, len(result.rows.mean), len(result.columns.mean)) == (24, two, 4, len(y))

    every = list(range(len(y)))
    for a in range(4):
        np.testing.assert_allclose(result.between(a, every), [covariance(x[a], y[b]) for b in every], atol=1e-10)
        np.testing.assert_allclose(result.rows.covariance(a), covariance(x[a], x[a]), atol=1e-10)
    for b in every:
        np.testing.assert_allclose(result.columns.covariance(b), covariance(y[b], y[b]), atol=1e-10)
        np.testing.assert_allclose(result.transposed().rows.covariance(b), covariance(y[b], y[b]), atol=1e-10)
        for a in range(4):
            np.testing.assert_allclose(result.transposed().between(b, [a])[0], covariance(y[b], x[a]), atol=1e-10)
    for sites, z in zip((result.rows, result.columns), (x, y), strict=True):
        np.testing.assert_allclose(sites.square, (z**2).sum((1, 2)) / 24, rtol=1e-12)
        np.testing.assert_allclose(sites.variance, ((z - z.mean(1, keepdims=True)) ** 2).sum((1, 2)) / 24, rtol=1e-10)


def test_pairs_of_one_model_are_computed_once():
    one_model = Covariances(summed(lsim.Procrustes(), [residuals(0, layers=3)]))
    assert one_model.pairs() == [(0, [1, 2]), (1, [2])]
    assert one_model.pairs(with_diagonal=True) == [(0, [0, 1, 2]), (1, [1, 2]), (2, [2])]

    two = Covariances(summed(lsim.Procrustes(), [residuals(0, layers=2)], [residuals(1, layers=3)]))
    assert two.pairs() == two.pairs(with_diagonal=True) == [(0, [0, 1, 2]), (1, [0, 1, 2])]
    # A triangle of pairs is kept, not a square.
    assert summed(lsim.Procrustes(), [residuals(0, layers=3)])["cross"].shape == (6, 8, 8)


def test_no_null_is_summed_without_permutations():
    assert set(summed(lsim.Procrustes(), [residuals(0)]).fields) == {"samples", "x", "cross"}
    assert set(summed(lsim.CCA(), [residuals(0)], [residuals(1)]).fields) == {"samples", "x", "y", "xx", "yy", "cross"}


def test_training_and_held_out_samples_are_summed_apart():
    x = residuals(0, tokens=30)
    y = residuals(1, layers=2, tokens=30, width=5)
    out = np.array(oracles.held_out_rows(30, 0.3, 7))
    analyzer = lsim.LinearPredictivity(test_fraction=0.3, seed=7)

    for column_views, z in ((None, x), ([y], y)):
        sums = summed(analyzer, [x], column_views)
        for name, chosen in (("train.", ~out), ("test.", out)):
            result = Covariances(sums, name)
            assert result.samples == chosen.sum()
            np.testing.assert_allclose(result.between(1, [1])[0], covariance(x[1][chosen], z[1][chosen]), atol=1e-10)
            np.testing.assert_allclose(result.rows.covariance(3), covariance(x[3][chosen], x[3][chosen]), atol=1e-10)
            np.testing.assert_allclose(result.columns.covariance(1), covariance(z[1][chosen], z[1][chosen]), atol=1e-10)


def test_analyzers_of_one_run_share_the_products_of_a_batch(monkeypatch):
    from tl_layersim.analyzers import _moments

    calls = []
    plain = _moments._products
    monkeypatch.setattr(_moments, "_products", lambda *args, **kwargs: calls.append(1) or plain(*args, **kwargs))
    sample_view = view(residuals(0))
    kernels = {"a": lsim.Procrustes().kernel(Sums()), "b": lsim.CCA().kernel(Sums())}
    reduce(kernels, sample_view)

    assert len(calls) == 1
    # Other samples are other products.
    for analyzer in (lsim.CCA(level="sequence"), lsim.CCA(level="sequence", pool="last")):
        before = len(calls)
        reduce({"c": analyzer.kernel(Sums())}, sample_view)
        assert len(calls) > before


@pytest.mark.parametrize("ratio", [1.0, 1e3, 1e5])
def test_a_mean_that_is_much_larger_than_the_spread(ratio):
    """Uncentred sums keep the digits that are needed, up to the bound at which a site is not defined."""
    x = residuals(0, tokens=60)
    expected = oracles.oracle_procrustes([x])["values"]

    covariances = Covariances(summed(lsim.Procrustes(), [x + ratio]))

    assert covariances.rows.defined.all()

    result = lsim.Procrustes().compute(summed(lsim.Procrustes(), [x + ratio]), _run(4))
    np.testing.assert_allclose(result.values, expected, atol=1e-14 * ratio**2 + 1e-12)


@pytest.mark.parametrize("cls", EACH)
def test_a_spread_that_the_sums_lose_is_refused(cls):
    with pytest.raises(lsim.LayersimError, match=rf"{cls.__name__} .* 60 .*minibatch"):
        cls().compute(summed(cls(), [residuals(0, tokens=60) + 1e8]), _run(4))


def _run(*layers: int):
    from ..inputs.views import layer_run

    return layer_run(*layers)


@pytest.mark.parametrize("cls", EACH)
def test_one_constant_site_is_named_and_nan(cls):
    x = residuals(0, tokens=60)
    x[1] = 3.7
    with pytest.warns(lsim.LayersimWarning, match=rf"{cls.__name__} is not defined at blocks\.0\.hook_resid_post, and NaN"):
        result = cls().compute(summed(cls(), [x]), _run(4))
    expected = getattr(oracles, f"oracle_{cls.name}")
    options = {"rows": list(range(60))} if cls is lsim.LinearPredictivity else {}
    selected = expected([x[[0, 2, 3]]], **options)
    defined_rows = [0, 2, 3]

    for name, axes in result.tensor_fields().items():
        value = getattr(result, name)
        if name in selected and axes == ("row", "column") and name not in oracles.no_null(1, 1):
            assert value[1].isnan().all()
            assert value[:, 1].isnan().all()
            np.testing.assert_allclose(value[defined_rows][:, defined_rows], selected[name], atol=1e-9, err_msg=name)
        if axes in (("residual",), ("column",)):
            assert value.isnan().tolist() == [False, True, False, False]
    assert repr(result)

    x[:] = 2.0
    with pytest.raises(lsim.LayersimError, match=rf"{cls.__name__} is not defined at any site"):
        cls().compute(summed(cls(), [x]), _run(4))


@pytest.mark.parametrize("cls", EACH)
def test_a_constant_site_of_the_second_model(cls):
    x = residuals(0, layers=2, tokens=60)
    y = residuals(1, layers=3, tokens=60)
    y[2] = 1.0
    with pytest.warns(lsim.LayersimWarning, match=rf"{cls.__name__} is not defined at blocks\.1\.hook_resid_post, and NaN"):
        result = cls().compute(summed(cls(), [x], [y]), _run(2, 3))

    assert result.values.isnan().tolist() == [[False, False, True]] * 2
    if cls is lsim.CCA:
        assert not result.dimensions.isnan().any()
        assert result.column_directions.isnan().tolist() == [False, False, True]

    y[:] = 1.0
    with pytest.raises(lsim.LayersimError, match="not defined at any site"):
        cls().compute(summed(cls(), [x], [y]), _run(2, 3))


def test_too_few_samples_are_refused():
    for cls in (lsim.Procrustes, lsim.CCA):
        with pytest.raises(lsim.LayersimError, match=rf"{cls.__name__} .*\b1 tokens\b"):
            cls().compute(summed(cls(), [residuals(0, tokens=1)]), _run(4))
        with pytest.raises(lsim.LayersimError, match=rf"{cls.__name__} .*\b1 sequences\b"):
            cls(level="sequence").compute(summed(cls(level="sequence"), [residuals(0, tokens=9)]), _run(4))
    for tokens in (1, 3):
        # Of rows 0 to 2 the first is held out.
        sums = summed(lsim.LinearPredictivity(), [residuals(0, tokens=tokens)])
        with pytest.raises(lsim.LayersimError, match=rf"LinearPredictivity .*\b{tokens - 1} .*\b1\b"):
            lsim.LinearPredictivity().compute(sums, _run(4))


@pytest.mark.parametrize("cls", EACH)
def test_rows_of_tokens_as_samples(cls):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 60, 4))
    options = {"rows": 20, "row": torch.arange(60) // 3}

    for pool, pooled in (("mean", x.reshape(3, 20, 3, 4).mean(2)), ("first", x[:, ::3]), ("last", x[:, 2::3])):
        analyzer = cls(level="sequence", pool=pool)
        assert analyzer.needs.whole_rows
        sums = Sums.of(reduce({"k": analyzer.kernel(Sums())}, view(x, **options))[1]["k"])
        oracle_options = {"rows": list(range(20))} if cls is lsim.LinearPredictivity else {}
        expected = getattr(oracles, f"oracle_{cls.name}")([pooled], **oracle_options)["values"]
        np.testing.assert_allclose(analyzer.compute(sums, _run(3)).values, expected, atol=1e-9)
    assert not cls().needs.whole_rows


MEMORY = {
    # Pairs of sites x width^2 numbers, three times, of 8 bytes.
    "one": (1, 10 * 32**2),
    "two": (2, 16 * 32**2 + 8 * 32**2),
    "three": (3, 6 * (16 + 8) * 32**2),
}


@pytest.mark.parametrize("models", MEMORY)
@pytest.mark.parametrize("cls", EACH)
@pytest.mark.parametrize("permutations", [0, 20])
def test_sums_must_fit(cls, models, permutations):
    count, numbers = MEMORY[models]
    parts = 2 if cls is lsim.LinearPredictivity else 1
    pairs = {1: 10, 2: 16, 3: 6 * 16}[count]
    if count == 3 and parts == 2:
        # Not symmetric: both orders.
        numbers = 9 * (16 + 8) * 32**2
        pairs = 9 * 16
    need = 24 * parts * (numbers + permutations * pairs * 32**2) / 1e9
    described = [_model() for _ in range(count)]
    cls(max_memory_gb=need * 1.001, permutations=permutations).check_sites(*described)

    with pytest.raises(lsim.LayersimError, match=f"{cls.__name__} .*`max_memory_gb`"):
        cls(max_memory_gb=need * 0.999, permutations=permutations).check_sites(*described)


def _model():
    from .helpers import _described

    return _described()


def test_a_model_of_unknown_width_is_not_refused():
    from dataclasses import replace

    lsim.Procrustes(max_memory_gb=1e-9).check_sites(replace(_model(), d_model=None, widths=()))


@pytest.mark.parametrize("cls", EACH)
def test_the_time_after_the_data_pass(cls):
    from dataclasses import replace

    large = replace(_model(), layers=tuple(f"blocks.{i}.hook_resid_post" for i in range(31)), d_model=576)
    seconds = {"Procrustes": 0.07, "CCA": 0.2, "LinearPredictivity": 0.1}[cls.__name__] * 496

    assert cls().compute_seconds(large) == pytest.approx(seconds)
    assert cls(permutations=20).compute_seconds(replace(large, d_model=1152)) == pytest.approx(8 * 21 * seconds)
    assert cls().compute_seconds(replace(large, d_model=None, widths=())) == 0


@pytest.mark.heavy("a grid of models")
@pytest.mark.parametrize("cls", EACH)
def test_a_grid_of_models_runs_each_once_and_equals_compare(cls):
    models = {"a": tiny_llama(), "b": tiny_llama(seed=1), "c": tiny_llama(seed=2)}
    data = random_tokens(16, 20)
    options = {"distance": lambda r: 1 - float(r.values[-1, -1])} if cls is lsim.LinearPredictivity else {}

    grid = called(lsim.compare_grid, models, data, cls(), batch_size=4, **options)

    for a, b in itertools.product(models, models):
        pair_result = lsim.compare(models[a], models[b], lsim.Data(data, batch_size=4), cls())
        for name in pair_result.tensor_fields():
            torch.testing.assert_close(
                getattr(grid[a, b], name), getattr(pair_result, name), equal_nan=True, rtol=1e-9, atol=1e-9
            )
        assert (grid[a, b].layers, grid[a, b].provenance.model) == (pair_result.layers, pair_result.provenance.model)
        if cls is not lsim.LinearPredictivity:
            i, j = [list(models).index(name) for name in (a, b)]
            assert float(grid.values[i, j]) == pytest.approx(pair_result.distance(), abs=1e-6)
            assert pair_result.distance() == pytest.approx(oracles.arccos_distance(pair_result.values.numpy()), abs=1e-9)


@pytest.mark.parametrize("cls", EACH)
def test_the_null_of_real_activations(cls):
    model = tiny_llama()
    data = random_tokens(16, 20)
    at = ["blocks.0.hook_resid_post", "blocks.1.hook_resid_post"]

    result = lsim.analyze(model, data, cls(permutations=19), at=at)[cls.name]
    plain = lsim.analyze(model, data, cls(), at=at)[cls.name]

    torch.testing.assert_close(result.values, plain.values)
    assert result.permutations == 19
    assert float(result.p_values[0, 1]) == pytest.approx(0.05)

    threshold = float(result.null_threshold[0, 1])
    assert float(result.calibrated[0, 1]) == pytest.approx((float(result.values[0, 1]) - threshold) / (1 - threshold))
    assert float(result.null_mean[0, 1]) < float(result.values[0, 1])
    assert float(result.max_value) == pytest.approx(float(result.values.masked_fill(torch.eye(2) > 0, -1).max()))
    assert "p-value of the maximum over pairs of layers" in result.headline()
    assert {picture.name for picture in result.pictures} >= {"values", "calibrated", "null_mean"}


@pytest.mark.light("CCA", "LinearPredictivity")
@pytest.mark.parametrize("cls", EACH)
def test_half_precision_models_are_summed_in_float64(cls):
    model = tiny_llama(dtype=torch.bfloat16)
    data = random_tokens(16, 20)

    result = lsim.analyze(model, data, cls())[cls.name]

    assert result.provenance.dtype == "torch.bfloat16"
    assert result.values.dtype == torch.float64

    from ..models.tiny_models import hidden_states

    x = np.concatenate([hidden_states(model, row).astype(np.float64) for row in data], axis=1)
    options = {"rows": [i // 20 for i in range(320)]} if cls is lsim.LinearPredictivity else {}
    expected = getattr(oracles, f"oracle_{cls.name}")([x], **options)["values"]
    np.testing.assert_allclose(result.values, expected, atol=1e-5)
