"""Exponential fits of quantities over depth."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import xarray

import tl_layersim as lsim
from tl_layersim.core import LayerCurve
from tl_layersim.many.fits import fit_exponential
from tl_layersim.reporting.difference_and_fit_figures import fit_figure

from ..inputs.views import from_views, provenance, residuals, view

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
        fit = lsim.many.exponential_fit(curve(a * np.exp(b * np.arange(7))))
        assert fit["amplitude"].item() == pytest.approx(a, rel=1e-6)
        assert fit["rate"].item() == pytest.approx(b, rel=1e-5)
        assert fit["r_squared"].item() == pytest.approx(1)
        assert fit["linear_r_squared"].item() < 1


def test_the_fit_is_the_least_squares_of_a_search_over_rates():
    x = np.arange(7.0)
    y = np.array([1.0, 1.4, 3.0, 2.5, 4.0, 7.0, 6.0])

    fit = lsim.many.exponential_fit(curve(y))
    a, b, error = naive(x, y)

    assert fit["amplitude"].item() == pytest.approx(a, rel=1e-4)
    assert fit["rate"].item() == pytest.approx(b, abs=1e-5)

    total = ((y - y.mean()) ** 2).sum()
    assert fit["r_squared"].item() == pytest.approx(1 - error / total, abs=1e-8)

    a = fit["amplitude"].item()
    b = fit["rate"].item()
    jacobian = np.column_stack([np.exp(b * x), a * x * np.exp(b * x)])
    errors = np.sqrt(np.diag(np.linalg.inv(jacobian.T @ jacobian)) * error / 5)
    np.testing.assert_allclose([fit["amplitude_se"].item(), fit["rate_se"].item()], errors, rtol=1e-4)

    slope, intercept = np.polyfit(x, y, 1)
    assert (fit["slope"].item(), fit["intercept"].item()) == pytest.approx((slope, intercept))
    assert fit["linear_r_squared"].item() == pytest.approx(1 - ((y - intercept - slope * x) ** 2).sum() / total)


def test_numbers_of_both_signs_have_a_fit():
    y = np.array([-0.1, 0.2, -0.2, 0.5, 1.0, 2.0, 4.1])
    fit = lsim.many.exponential_fit(curve(y))
    a, b, _ = naive(np.arange(7.0), y)

    assert (fit["amplitude"].item(), fit["rate"].item()) == pytest.approx((a, b), rel=1e-3)


def test_the_best_of_several_local_minima_is_taken():
    x = np.arange(6.0)
    y = np.array([-0.1, 0.7, 1.2, 0.4, -0.9, -1.5])
    fit = fit_exponential(x, y)
    error = float(((y - fit.params[0] * np.exp(fit.params[1] * x)) ** 2).sum())
    rates = np.linspace(-4, 4, 80_001)
    basis = np.exp(rates[:, None] * x)
    errors = ((y - (basis @ y / (basis**2).sum(1))[:, None] * basis) ** 2).sum(1)
    minima = errors[1:-1][(errors[1:-1] < errors[:-2]) & (errors[1:-1] < errors[2:])]

    assert len(minima) > 1
    assert error == pytest.approx(minima.min(), rel=1e-6)


def test_far_from_zero_nothing_overflows():
    x = np.array([1e6, 1.5e6, 2e6, 3e6])
    fit = fit_exponential(x, 3e-7 * np.exp(1e-6 * x))
    np.testing.assert_allclose(fit.params, [3e-7, 1e-6], rtol=1e-6)


def test_sites_that_are_left_out_keep_their_number():
    y = 3 * np.exp(0.25 * np.arange(7))
    y[0] = 100
    y[-1] = 0

    fit = lsim.many.exponential_fit(curve(y), sites=slice(1, -1))

    assert fit["amplitude"].item() == pytest.approx(3)
    assert fit["rate"].item() == pytest.approx(0.25)
    assert fit["residual"].values.tolist() == list(NAMES[1:-1])
    assert fit["depth"].values.tolist() == [1, 2, 3, 4, 5]


def test_each_label_of_another_axis_has_a_fit_and_updates_are_numbered_by_their_block():
    result = from_views(lsim.Trajectory(), [view(residuals(1))])
    fits = lsim.many.exponential_fit(result, "norm_quantiles")

    assert fits["rate"].dims == ("quantile",)

    table = result.to_xarray()
    xarray.testing.assert_allclose(fits["rate"], lsim.many.exponential_fit(table["norm_quantiles"])["rate"])

    alone = lsim.many.exponential_fit(table["norm_quantiles"].sel(quantile=0.5))
    assert alone["rate"].item() == fits["rate"].sel(quantile=0.5).item()

    updates = lsim.many.exponential_fit(result, "update_norm")
    assert updates["depth"].values.tolist() == list(range(1, len(result.layers)))
    assert updates.attrs["long_name"] == "Norm of the update"

    runs = lsim.stack({0: result, 10: result}, "step")
    assert lsim.many.exponential_fit(runs["norm"])["rate"].dims == ("step",)


def test_untrained_models_have_a_fit_of_their_mean():
    twins = (curve(3 * np.exp(0.1 * np.arange(7))), curve(5 * np.exp(0.1 * np.arange(7))))
    with_twins = dataclasses.replace(curve(2 * np.exp(0.3 * np.arange(7))), untrained=twins)

    fit = lsim.many.exponential_fit(with_twins)

    assert fit["weights"].values.tolist() == ["trained", "untrained"]
    np.testing.assert_allclose(fit["amplitude"], [2, 4])
    np.testing.assert_allclose(fit["rate"], [0.3, 0.1])
    assert [trace.mode for trace in fit_figure(fit).data] == ["markers", "lines", "lines", "markers", "lines"]


def test_a_curve_is_fitted_where_it_is_defined_at_three_sites():
    fit = lsim.many.exponential_fit(curve([1.0, float("nan"), np.exp(0.4), np.exp(0.6)]))
    assert fit["rate"].item() == pytest.approx(0.2)

    fit = lsim.many.exponential_fit(curve([1.0, float("nan"), float("nan"), 3.0]))
    assert all(np.isnan(fit[name].item()) for name in fit.data_vars if name != "values")
    assert np.isnan(lsim.many.exponential_fit(curve([0.0, 0.0, 0.0, 0.0]))["rate"].item())

    constant = lsim.many.exponential_fit(curve([2.0, 2.0, 2.0, 2.0]))
    assert constant["rate"].item() == pytest.approx(0, abs=1e-9)
    assert np.isnan(constant["r_squared"].item())


def test_the_figure_has_points_and_both_curves():
    fit = lsim.many.exponential_fit(curve(2 * np.exp(0.3 * np.arange(7))))
    figure = fit_figure(fit)

    assert [trace.name for trace in figure.data][:2] == ["measured", "2 exp(0.3 l), R² = 1.000"]
    np.testing.assert_allclose(figure.data[1].y[[0, -1]], fit["values"][[0, -1]], rtol=1e-6)
    np.testing.assert_allclose(figure.data[2].y[0], fit["intercept"].item())
    assert list(figure.layout.xaxis.ticktext)[:2] == ["embed", "0"]


def test_equations_over_modules_say_where_l_counts_from():
    fit = lsim.many.exponential_fit(curve(2 * np.exp(0.3 * np.arange(7))))
    figure = fit_figure(fit.assign_coords(residual=[f"model.layers.{i}.mlp" for i in range(7)]))

    assert figure.data[1].name == "2 exp(0.3 l), R² = 1.000"
    assert "l = 0 at 0.mlp, l = 6 at 6.mlp" in figure.layout.title.subtitle.text.replace("<br>", " ")


def test_what_has_no_fit_is_refused():
    result = from_views(lsim.Trajectory(), [view(residuals(1))])
    cosine = from_views(lsim.Cosine(center="none"), [view(residuals(1))])

    for curves, options, match in (
        (curve([1.0, 2.0]), {}, r"`field`.*'values'.*\b2 sites"),
        (curve([1.0, 2.0, 3.0]), {"sites": slice(1, None)}, r"`field`.*'values'.*\b2 sites"),
        (result, {"field": "lss_mean"}, r"`field`.*'lss_mean'.*\b0 sites"),
        (cosine, {}, r"`field`.*'values'.*'row', 'column'"),
        (result, {"field": "norms"}, "'norms'"),
        ([1.0, 2.0], {}, "`given`"),
    ):
        with pytest.raises(lsim.LayersimError, match=match):
            lsim.many.exponential_fit(curves, **options)
    with pytest.raises(lsim.LayersimError, match="quantile"):
        fit_figure(lsim.many.exponential_fit(result, "norm_quantiles"))


def test_values_that_change_their_sign_have_the_best_of_several_optima():
    y = np.array([0.36, 0.79, 0.5, 0.66, 1.22, 0.31, -0.4, -1.2, -1.5])
    x = np.arange(9.0)
    errors = []
    for rate in np.linspace(-3, 3, 6001):
        e = np.exp(rate * x)
        errors.append(((y - (e @ y) / (e @ e) * e) ** 2).sum())

    fit = lsim.many.exponential_fit(xarray.DataArray(y, dims="residual", coords={"residual": [str(n) for n in range(9)]}))

    assert fit["r_squared"].item() == pytest.approx(1 - min(errors) / ((y - y.mean()) ** 2).sum(), abs=1e-5)

    # As steep as a number allows: no optimum within reach is no error.
    steep = xarray.DataArray([0.0] * 8 + [9.0], dims="residual", coords={"residual": [str(n) for n in range(9)]})
    assert lsim.many.exponential_fit(steep)["linear_r_squared"].item() > 0


@pytest.mark.parametrize("y", [[-4.0, 0.0, 1.0, -9.0], [3.0, -9.0, 4.0], [1.0, 3.0, -1.0, -7.0, 8.0], [5.0, -9.0, 1.0, -2.0]])
def test_the_steepest_curve_goes_through_one_end(y):
    # The least squares are those of a curve that is 0 at all sites but the first or the last one.
    squares = np.square(y)
    residual_squares = squares.sum() - max(squares[0], squares[-1])
    expected = 1 - residual_squares / np.square(np.array(y) - np.mean(y)).sum()

    assert lsim.many.exponential_fit(curve(y))["r_squared"].item() == pytest.approx(expected, abs=1e-6)


def test_each_run_is_fitted_at_its_own_sites():
    y = np.stack([2 * np.exp(0.3 * np.arange(7)), np.append(np.exp(0.1 * np.arange(5)), [np.nan, np.nan])])
    table = xarray.DataArray(y, dims=("run", "residual"), coords={"residual": [str(n) for n in range(7)]})
    assert lsim.many.exponential_fit(table)["rate"].values == pytest.approx([0.3, 0.1])
