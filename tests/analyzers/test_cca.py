"""CCA, SVCCA and PWCCA: invariances, other implementations, theory, few samples and ill-conditioned covariances."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.cross_decomposition import CCA as SklearnCCA
from statsmodels.multivariate.cancorr import CanCorr

import tl_layersim as lsim

from .. import oracles
from ..inputs.views import from_views, residuals, view
from .helpers import between, map_of_condition, rotation

SUMMARIES = ("values", "squared", "svcca", "pwcca", "column_pwcca")


@pytest.mark.parametrize("widths", [(8, 8), (8, 5), (3, 8)])
def test_between_two_models_of_other_width_and_depth(widths):
    xs = [residuals(seed, tokens=30, width=widths[0]) for seed in range(3)]
    ys = [residuals(seed + 9, layers=3, tokens=30, width=widths[1]) for seed in range(3)]

    result = between(lsim.CCA(variance=0.8), xs, ys)
    expected = oracles.oracle_cca(xs, ys, variance=0.8)

    for field, value in expected.items():
        np.testing.assert_allclose(getattr(result, field), value, atol=1e-9, err_msg=field)
    assert result.samples == 90

    swapped = between(lsim.CCA(variance=0.8), ys, xs)
    turned = result.transposed()
    for field in expected:
        np.testing.assert_allclose(getattr(turned, field), getattr(swapped, field), atol=1e-9, err_msg=field)
    assert (turned.layers, turned.column_layers) == (swapped.layers, swapped.column_layers)


def test_the_correlations_are_those_of_statsmodels_and_scikit_learn():
    x = residuals(0, tokens=80, width=4)[1]
    y = residuals(1, tokens=80, width=3)[1] + residuals(0, tokens=80, width=3)[2]

    result = between(lsim.CCA(), [x[None]], [y[None]])
    rho = np.array(CanCorr(y, x).cancorr)

    assert float(result.values) == pytest.approx(rho.mean(), abs=1e-9)
    assert float(result.squared) == pytest.approx((rho**2).mean(), abs=1e-9)

    scores = SklearnCCA(n_components=3, max_iter=20000, tol=1e-12).fit(x, y).transform(x, y)
    by_sklearn = [np.corrcoef(a, b)[0, 1] for a, b in zip(scores[0].T, scores[1].T, strict=True)]
    assert float(result.values) == pytest.approx(np.mean(by_sklearn), abs=1e-4)


def test_invariances():
    rng = np.random.default_rng(0)
    x = residuals(0, tokens=90)
    y = residuals(3, tokens=90) + 0.5 * residuals(0, tokens=90)

    plain = between(lsim.CCA(), [x], [y])
    order = rng.permutation(90)

    for changed, columns in ((y @ rotation(8), False), (7 * y, True), (y + rng.normal(size=8), True)):
        result = between(lsim.CCA(), [x], [changed])
        for name in SUMMARIES:
            # Weights of PWCCA are sums of absolute values over the dimensions of a site, which a rotation changes.
            if columns or name != "column_pwcca":
                np.testing.assert_allclose(getattr(result, name), getattr(plain, name), atol=1e-9, err_msg=name)
    assert (between(lsim.CCA(), [x], [y @ rotation(8)]).column_pwcca - plain.column_pwcca).abs().max() > 1e-4

    sheared = between(lsim.CCA(), [x], [y @ map_of_condition(8, 1000)])
    for name in ("values", "squared", "pwcca"):
        np.testing.assert_allclose(getattr(sheared, name), getattr(plain, name), atol=1e-9, err_msg=name)
    assert (sheared.svcca - plain.svcca).abs().max() > 0.01

    permuted = between(lsim.CCA(), [x[:, order]], [y[:, order]])
    np.testing.assert_allclose(permuted.values, plain.values, atol=1e-9)
    assert (between(lsim.CCA(), [x[:, order]], [y]).values - plain.values).abs().max() > 0.1


def test_a_site_with_itself_reads_one():
    x = residuals(0, tokens=60)
    result = from_views(lsim.CCA(), [view(x)])

    for name in SUMMARIES:
        assert getattr(result, name).diagonal().tolist() == [1] * 4
        assert getattr(result, name).max() <= 1

    two = between(lsim.CCA(), [x], [x @ map_of_condition(8, 1000) + 5])
    np.testing.assert_allclose(two.values.diagonal(), 1, atol=1e-9)
    np.testing.assert_allclose(two.pwcca.diagonal(), 1, atol=1e-9)
    assert two.distance() == pytest.approx(0, abs=1e-4)
    np.testing.assert_allclose(result.pwcca, result.column_pwcca.T, atol=0)
    assert (result.pwcca - result.pwcca.T).abs().max() > 1e-4


def test_independent_gaussians_read_dimensions_over_samples():
    rng = np.random.default_rng(0)
    result = between(lsim.CCA(), [rng.normal(size=(1, 4000, 40))], [rng.normal(size=(1, 4000, 20))])
    # sum rho^2 has the mean 40 * 20 / (n - 1).
    assert float(result.squared) == pytest.approx(40 / 3999, rel=0.1)


def test_a_known_correlation():
    """Y has one dimension that correlates by 0.6 with one of x."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4000, 3))
    noise = rng.normal(size=(4000, 3))
    y = noise.copy()
    y[:, 0] = 0.6 * x[:, 0] + 0.8 * noise[:, 0]

    result = between(lsim.CCA(), [x[None]], [y[None]])

    assert float(result.values) == pytest.approx(0.6 / 3, abs=0.03)
    assert float(result.squared) == pytest.approx(0.36 / 3, abs=0.03)


def test_svcca_keeps_the_directions_that_explain_the_variance():
    rng = np.random.default_rng(0)
    scales = np.sqrt([60.0, 30.0, 9.0, 1.0])
    samples = np.linalg.qr(rng.normal(size=(200, 4)) - 0)[0]
    samples -= samples.mean(0)
    samples = np.linalg.qr(samples)[0] * scales

    for variance, dimensions in ((0.5, 1), (0.6, 1), (0.61, 2), (0.9, 2), (0.91, 3), (0.99, 3), (0.995, 4), (1, 4), (1.0, 4)):
        result = between(lsim.CCA(variance=variance), [samples[None]], [samples[None, :, ::-1].copy() @ rotation(4)])
        assert (float(result.directions), float(result.column_directions), float(result.dimensions)) == (
            dimensions,
            dimensions,
            4,
        ), variance
        assert float(result.svcca) == pytest.approx(1)


def test_directions_without_variance_are_left_out():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 100, 6))
    x[0, :, 5] = x[0, :, :5].sum(-1)
    y = rng.normal(size=(1, 100, 4)) + x[..., :4]

    result = between(lsim.CCA(), [x], [y])

    assert (float(result.dimensions), float(result.column_dimensions)) == (5, 4)
    np.testing.assert_allclose(result.values, between(lsim.CCA(), [x[..., :5].copy()], [y]).values, atol=1e-9)
    # Down to 1e-12 of the largest variance, a direction counts as much as any other.
    for scale, dimensions in ((1e-5, 6), (1e-7, 5)):
        x[0, :, 5] = scale * rng.normal(size=100)
        assert float(between(lsim.CCA(), [x], [y]).dimensions) == dimensions


def test_a_large_mean_leaves_out_directions_that_rounding_reaches():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 400, 6)) * np.array([1, 1, 1, 1, 1, 1e-5])

    assert float(between(lsim.CCA(), [x], [x]).dimensions) == 6
    assert float(between(lsim.CCA(), [x + 1e3], [x]).dimensions) == 5
    np.testing.assert_allclose(between(lsim.CCA(), [x[..., :5] + 1e3], [x]).values, 1, atol=1e-6)


@pytest.mark.filterwarnings("default:CCA rests on:UserWarning")
def test_few_samples_are_spoken_of():
    for tokens, says in (
        (80, r"CCA rests on 80 tokens of up to 8 dimensions: (.*) of about 0\.10\. Pass more data"),
        (17, r"of about 0\.50\. Pass more data"),
        (9, r"of about 1\.00\. Every value is 1"),
        (5, r"CCA rests on 5 tokens of up to 4 dimensions: .* Every value"),
    ):
        with pytest.warns(lsim.LayersimWarning, match=says):
            result = from_views(lsim.CCA(), [view(residuals(0, tokens=tokens))])
        np.testing.assert_allclose(result.values, oracles.oracle_cca([residuals(0, tokens=tokens)])["values"], atol=1e-9)
        if tokens <= 9:
            np.testing.assert_allclose(result.values, 1, atol=1e-6)
    with pytest.warns(lsim.LayersimWarning, match="2 tokens of up to 1 dim"):
        np.testing.assert_allclose(from_views(lsim.CCA(), [view(residuals(0, tokens=2))]).values, 1, atol=1e-9)


@pytest.mark.filterwarnings("error:CCA rests on:UserWarning")
def test_enough_samples_are_not_spoken_of():
    from_views(lsim.CCA(), [view(residuals(0, tokens=81))])


@pytest.mark.parametrize("variance", [0, -0.1, 1.01, 99, float("nan")])
def test_wrong_variances_are_refused(variance):
    with pytest.raises(lsim.LayersimError, match="`variance`"):
        lsim.CCA(variance=variance)


def test_the_headline_and_the_distance():
    x = residuals(0, layers=6, tokens=90)
    result = from_views(lsim.CCA(), [view(x)])
    expected = oracles.oracle_cca([x])["values"]

    assert result.headline()["CCA(embedding, last)"] == pytest.approx(expected[0, 5])

    y = x + residuals(2, layers=6, tokens=90)
    two = between(lsim.CCA(), [x], [y])
    assert two.distance() == pytest.approx(oracles.arccos_distance(two.values.numpy()), abs=1e-9)
    assert two.values.dtype == two.dimensions.dtype == torch.float64
