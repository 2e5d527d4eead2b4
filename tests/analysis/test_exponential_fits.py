"""Exponential fits of quantities over depth."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analysis.exponential_fits import fit_exponential
from tl_layersim.core import LayerCurve
from tl_layersim.reporting.style import on_what

from ..views import from_views, provenance, residuals, view

NAMES = ("blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in range(6)))


def curve(values) -> LayerCurve:
    values = torch.as_tensor(np.asarray(values), dtype=torch.float64)
    return LayerCurve(values=values, layers=NAMES[: len(values)], provenance=provenance())


def naive(x, y):
    """Least squares of a exp(b x) on a fine grid of b; for each b the best a is a linear regression without intercept."""
    rates = np.linspace(-2, 2, 400_001)
    basis = np.exp(rates[:, None] * x)
    a = basis @ y / (basis**2).sum(1)
    error = ((y - a[:, None] * basis) ** 2).sum(1)
    best = error.argmin()
    return a[best], rates[best], error[best]


def test_an_exponential_is_found_exactly():
    for a, b in ((2.0, 0.3), (5.0, -0.7), (-1.5, 0.2), (1e-9, 1.1), (1e9, 0.01)):
        fit = lsim.exponential_fit(curve(a * np.exp(b * np.arange(7))))
        assert float(fit.amplitude[0]) == pytest.approx(a, rel=1e-6)
        assert float(fit.rate[0]) == pytest.approx(b, rel=1e-5)
        assert float(fit.r_squared[0]) == pytest.approx(1)
        assert float(fit.linear_r_squared[0]) < 1


def test_the_fit_is_the_least_squares_of_a_search_over_rates():
    x = np.arange(7.0)
    y = np.array([1.0, 1.4, 3.0, 2.5, 4.0, 7.0, 6.0])
    fit = lsim.exponential_fit(curve(y))
    a, b, error = naive(x, y)
    assert float(fit.amplitude[0]) == pytest.approx(a, rel=1e-4)
    assert float(fit.rate[0]) == pytest.approx(b, abs=1e-5)
    total = ((y - y.mean()) ** 2).sum()
    assert float(fit.r_squared[0]) == pytest.approx(1 - error / total, abs=1e-8)
    a, b = float(fit.amplitude[0]), float(fit.rate[0])
    jacobian = np.column_stack([np.exp(b * x), a * x * np.exp(b * x)])
    errors = np.sqrt(np.diag(np.linalg.inv(jacobian.T @ jacobian)) * error / 5)
    np.testing.assert_allclose([float(fit.amplitude_error[0]), float(fit.rate_error[0])], errors, rtol=1e-4)
    slope, intercept = np.polyfit(x, y, 1)
    assert (float(fit.slope[0]), float(fit.intercept[0])) == pytest.approx((slope, intercept))
    assert float(fit.linear_r_squared[0]) == pytest.approx(1 - ((y - intercept - slope * x) ** 2).sum() / total)


def test_numbers_of_both_signs_have_a_fit():
    y = np.array([-0.1, 0.2, -0.2, 0.5, 1.0, 2.0, 4.1])
    fit = lsim.exponential_fit(curve(y))
    a, b, _ = naive(np.arange(7.0), y)
    assert (float(fit.amplitude[0]), float(fit.rate[0])) == pytest.approx((a, b), rel=1e-3)


def test_the_best_of_several_local_minima_is_taken():
    x, y = np.arange(6.0), np.array([-0.1, 0.7, 1.2, 0.4, -0.9, -1.5])
    fit = fit_exponential(x, y)
    error = float(((y - fit.parameters[0] * np.exp(fit.parameters[1] * x)) ** 2).sum())
    rates = np.linspace(-4, 4, 80_001)
    basis = np.exp(rates[:, None] * x)
    errors = ((y - (basis @ y / (basis**2).sum(1))[:, None] * basis) ** 2).sum(1)
    minima = errors[1:-1][(errors[1:-1] < errors[:-2]) & (errors[1:-1] < errors[2:])]
    assert len(minima) > 1
    assert error == pytest.approx(minima.min(), rel=1e-6)


def test_far_from_zero_nothing_overflows():
    x = np.array([1e6, 1.5e6, 2e6, 3e6])
    fit = fit_exponential(x, 3e-7 * np.exp(1e-6 * x))
    np.testing.assert_allclose(fit.parameters, [3e-7, 1e-6], rtol=1e-6)


def test_sites_that_are_left_out_keep_their_number():
    y = 3 * np.exp(0.25 * np.arange(7))
    y[0], y[-1] = 100, 0
    fit = lsim.exponential_fit(curve(y), sites=slice(1, -1))
    assert float(fit.amplitude[0]) == pytest.approx(3)
    assert float(fit.rate[0]) == pytest.approx(0.25)
    assert fit.sites == NAMES[1:-1]
    assert fit.depth.tolist() == [1, 2, 3, 4, 5]


def test_each_quantile_has_a_fit_and_updates_are_numbered_by_their_block():
    found = from_views(lsim.Trajectory(), [view(residuals(1))])
    fits = lsim.exponential_fit(found, "norm_quantiles")
    assert len(fits.names) == len(found.quantiles)
    assert fits.names[0] == f"quantile {found.quantiles[0]}"
    median = found.quantiles.index(0.5)
    alone = lsim.exponential_fit(found, "norm_quantiles", select={"quantile": 0.5})
    torch.testing.assert_close(alone.rate[0], fits.rate[median])
    assert len(alone.names) == 1
    assert "  ..." not in repr(alone)
    updates = lsim.exponential_fit(found, "update_norm")
    assert updates.depth.tolist() == list(range(1, len(found.layers)))
    assert updates.quantity == "Norm of the update"
    table = fits.to_frame()
    np.testing.assert_array_equal(table["rate"], fits.rate)
    assert list(table.columns)[:3] == ["curve", "amplitude", "amplitude_error"]


def test_a_curve_with_undefined_values_has_no_fit():
    fit = lsim.exponential_fit(curve([1.0, float("nan"), 2.0, 3.0]))
    assert all(bool(getattr(fit, f.name).isnan().all()) for f in dataclasses.fields(fit) if "rate" in f.name)
    assert bool(lsim.exponential_fit(curve([0.0, 0.0, 0.0, 0.0])).rate.isnan())
    constant = lsim.exponential_fit(curve([2.0, 2.0, 2.0, 2.0]))
    assert float(constant.rate[0]) == pytest.approx(0, abs=1e-9)
    assert bool(constant.r_squared.isnan())


def test_the_figure_has_points_and_both_curves():
    fit = lsim.exponential_fit(curve(2 * np.exp(0.3 * np.arange(7))))
    figure = fit.plot()
    assert [trace.name for trace in figure.data][:2] == ["measured", "2.7 exp(0.3 block)"]
    np.testing.assert_allclose(figure.data[1].y[[0, -1]], fit.values[0, [0, -1]], rtol=1e-6)
    np.testing.assert_allclose(figure.data[2].y[0], float(fit.intercept[0]))
    assert figure.layout.xaxis.title.text == "After block"
    assert figure.layout.title.text.startswith("Exponential growth of the ")
    assert figure.layout.title.subtitle.text.endswith(on_what(fit.provenance))
    assert lsim.exponential_fit(curve(2 * np.exp(-0.3 * np.arange(7)))).plot().layout.title.text.startswith("Exponential decay")
    assert list(figure.layout.xaxis.ticktext)[:2] == ["embed", "0"]


@pytest.mark.parametrize("sites", [slice(None), slice(1, None), slice(2, -1)])
def test_equations_of_the_legend_give_the_curves_at_the_numbers_of_the_axis(sites):
    for rate in (0.115, -0.3):
        fit = lsim.exponential_fit(curve(17 * np.exp(rate * np.arange(7)) + np.array([0, 1, 0, 2, -1, 0, 1])), sites=sites)
        figure = fit.plot()
        blocks = [-1 if label == "embed" else int(label) for label in figure.layout.xaxis.ticktext]
        for trace in figure.data[1:]:
            assert trace.name.endswith((" block", " block)"))
            terms = trace.name.replace(" exp", " * exp").replace(" block", " * block")
            drawn = np.interp(figure.layout.xaxis.tickvals, trace.x, trace.y)
            told = [eval(terms, {"exp": np.exp, "block": block}) for block in blocks]
            np.testing.assert_allclose(told, drawn, rtol=2e-3, atol=2e-3)
        assert ("embed: block -1" in figure.layout.title.subtitle.text) is (-1 in blocks)


def test_equations_over_modules_say_where_l_counts_from():
    fit = lsim.exponential_fit(curve(2 * np.exp(0.3 * np.arange(7))))
    named = dataclasses.replace(fit, sites=tuple(f"model.layers.{i}.mlp" for i in range(7)))
    figure = named.plot()
    assert figure.data[1].name == "2 exp(0.3 l)"
    assert "l = 0 at 0.mlp, l = 6 at 6.mlp" in figure.layout.title.subtitle.text
    assert "l = 0 at model.layers.0.mlp" in repr(named)


def test_fields_without_three_sites_are_refused():
    with pytest.raises(lsim.LayersimError, match=r"`field`.*'(values|lss_mean)'.*\b[02]\b"):
        lsim.exponential_fit(curve([1.0, 2.0]))
    with pytest.raises(lsim.LayersimError, match=r"`field`.*'(values|lss_mean)'.*\b[02]\b"):
        lsim.exponential_fit(curve([1.0, 2.0, 3.0]), sites=slice(1, None))
    found = from_views(lsim.Trajectory(), [view(residuals(1))])
    with pytest.raises(lsim.LayersimError, match=r"`field`.*'(values|lss_mean)'.*\b[02]\b"):
        lsim.exponential_fit(found, "lss_mean")
    with pytest.raises(lsim.LayersimError, match="`field` is 'norms'"):
        lsim.exponential_fit(found, "norms")
