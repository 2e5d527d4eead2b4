"""`exponential_fit`: does a quantity grow exponentially with depth, or linearly?"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..core.arguments import typed
from ..core.errors import LayersimError
from ..core.intervals import field_named
from ..core.report_tables import BLOCK_AXES
from ..core.results import Result
from ..core.wording import with_article
from .relative_depth import SITE_AXES

if TYPE_CHECKING:
    import xarray

FITTED = ("amplitude", "amplitude_se", "rate", "rate_se", "r_squared", "intercept", "slope", "linear_r_squared")
# Rates at which the search begins, beside that of the line through the logarithms, over the whole range of x.
STARTS = (-3.0, -0.5, 0.5, 3.0)
# Largest rate of the grid, and the least gain of another optimum.
MOST_RATE, ROUNDING = 100.0, 1e-6


class LeastSquares(NamedTuple):
    """A least-squares fit of y = a exp(b x).

    Attributes:
        params: the parameters a and b.
        covariance: covariance of a and b.
        rsquared: fraction of the variance of y that the curve explains.
    """

    params: Any
    covariance: Any
    rsquared: float


@typed
def exponential_fit(given: Any, field: str | None = None, *, sites: slice = slice(None)) -> Any:
    r"""Fit an exponential $y = a e^{b l}$ and a line to a quantity over depth, such as the norm of the residual stream.

    Both fits minimise the sum of squared errors of y itself, so that their R² are comparable. Sites with large values therefore
    weigh most. The line through the logarithms, which weighs all sites alike, is only the start of the search; how equal the
    growth of a single token's norm is from block to block is `Trajectory`'s expodistance. The standard errors assume
    independent errors of equal size, and sites of one model are not independent.

    Args:
        given: a result, such as the result of `Trajectory`, or a variable of a labelled table of `to_xarray` or `stack`. Each
            label of a further axis, such as quantiles, prompts or training steps, has its own fit.
        field: name of a field of the result over sites; None for `values`.
        sites: the sites to fit, such as `slice(1, -1)` without the embedding and the last block. They keep their index l among
            the measured sites; by default l is 0 for the input of block 0 and 1 for the output of block 0. Sites at which the
            quantity is not defined, or that a run of a table lacks, are left out.

    Returns:
        An `xarray.Dataset` over the further axes, with `amplitude` (a, the fitted quantity at l = 0) and `rate` (b; exp(b) is
        the factor of growth from site to site), their standard errors `amplitude_se` and `rate_se`, and `r_squared`, the
        fraction of the variance that the exponential explains; `intercept`, `slope` and `linear_r_squared` of the line; and the
        fitted `values`, over sites with the coordinate `depth`, l. NaN with fewer than three defined sites. For a result with
        untrained models, all of them have the axis `weights`: "trained" and "untrained", the mean over untrained models.
        `lsim.plot` draws it.

    Raises:
        LayersimError: the field is not over one axis of sites, or fewer than three sites are chosen.

    Source:
        Aubry et al. 2025 (arXiv 2407.07810), section 3.3: $|x^l| \approx e^{\alpha l} |x^0|$. The paper does not state how
        curves were fitted. Its figure 8 fits the performance of models to their coupling: `relate(..., shape="exponential")`.
        Its table 3 has R² of four models across data sets, and does not say of which quantity.

    Examples:
        >>> import tl_layersim as lsim
        >>> path = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], lsim.Trajectory())["trajectory"]
        >>> fit = lsim.many.exponential_fit(path, "norm")
        >>> fit["rate"].item() > 0, fit["values"].dims
        (True, ('residual',))
        >>> lsim.many.exponential_fit(path.to_xarray()["norm_quantiles"])["rate"].dims
        ('quantile',)
    """
    import xarray

    array = _array(given, field or "values") if isinstance(given, Result) else given
    if not isinstance(array, xarray.DataArray):
        raise LayersimError(
            f"`given` is {with_article(type(given).__name__)}; it must be a result, or a variable of a labelled table."
        )
    over = [axis for axis in array.dims if axis in SITE_AXES]
    count = len(range(array.sizes[over[0]])[sites]) if len(over) == 1 else 0
    if count < 3:
        raise LayersimError(
            f"`field` is {field or array.name!r}, with the axes of sites {over} and {count} sites to fit; it must have one "
            "such axis, with three sites or more. Select a label of each further one."
        )
    [axis] = over
    first = int(axis in BLOCK_AXES)
    depth = np.arange(first, first + array.sizes[axis], dtype=np.float64)
    array = array.assign_coords(depth=(axis, depth)).isel({axis: sites})
    fits = xarray.apply_ufunc(
        partial(_both_fits, depth[sites]),
        array,
        input_core_dims=[[axis]],
        output_core_dims=[[]] * len(FITTED),
        vectorize=True,
        output_dtypes=[np.float64] * len(FITTED),
    )
    return xarray.Dataset({**dict(zip(FITTED, fits, strict=True)), "values": array}, attrs=array.attrs)


def _array(result: Result, field: str) -> xarray.DataArray:
    """A field of a result, with the mean over untrained models beside it."""
    import xarray

    held, own = field_named(result, field), result.declared(field)
    about = {"long_name": own.label, "model": result.provenance.model, "tokens": result.provenance.tokens}
    about |= {"units": own.unit} if own.unit else {}
    labels: dict[str, list[Any]] = {axis: list(result.coordinates(axis)) for axis in own.axes}
    values, twins = getattr(result, held).numpy(), result.of_untrained(held)
    if twins is None:
        return xarray.DataArray(values, labels, own.axes, field, about)
    both = np.stack([values, twins.mean(0).numpy()])
    return xarray.DataArray(both, {"weights": ["trained", "untrained"], **labels}, ("weights", *own.axes), field, about)


def fit_exponential(x: Any, y: Any) -> LeastSquares:
    """Fit y = a exp(b x) by least squares in y.

    Args:
        x: `point`, depths.
        y: `point`, values; at least three.

    Raises:
        RuntimeError: the search does not converge from any start.
    """
    from scipy.optimize import curve_fit

    # In units of the range of x and of the largest y, about the middle: the search then meets no overflow.
    middle, span, size = (x.max() + x.min()) / 2, np.ptp(x), np.abs(y).max()
    z, scaled = (x - middle) / span, y / size

    def curve(z: Any, a: float, b: float) -> Any:
        return a * np.exp(b * z)

    def derivative(z: Any, a: float, b: float) -> Any:
        return np.column_stack([np.exp(b * z), a * z * np.exp(b * z)])

    starts = [(float(scaled.mean()), rate) for rate in STARTS]
    if (scaled > 0).all() or (scaled < 0).all():
        slope, intercept = np.polyfit(z, np.log(np.abs(scaled)), 1)
        starts.insert(0, (float(np.sign(scaled[0]) * np.exp(intercept)), float(slope)))
    # Last, the best rate of a grid with the best amplitude of each: values that change their sign have several optima.
    rates = np.linspace(-MOST_RATE, MOST_RATE, 401)
    each = np.exp(np.outer(rates, z) - np.abs(rates)[:, None] / 2)
    amplitudes = each @ scaled / (each**2).sum(1)
    best_rate = int(((scaled - amplitudes[:, None] * each) ** 2).sum(1).argmin())
    starts.append((float(amplitudes[best_rate] * np.exp(-abs(rates[best_rate]) / 2)), float(rates[best_rate])))
    best: Any = None
    for start in starts:
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                found, covariance = curve_fit(curve, z, scaled, start, jac=derivative, maxfev=2000, ftol=1e-14, xtol=1e-14)
        except RuntimeError:
            continue
        error = float(((scaled - curve(z, *found)) ** 2).sum())
        if best is None or error < best[0] * (1 - ROUNDING if start is starts[-1] else 1):
            best = (error, found, covariance)
    if best is None:
        raise RuntimeError("least squares did not converge")
    error, (a, b), covariance = best
    # Back to the units of x and y: b / span, and a exp(-b middle / span) times the size.
    shift = np.exp(-b * middle / span) * size
    to = np.array([[shift, -a * shift * middle / span], [0.0, 1 / span]])
    total = float(((scaled - scaled.mean()) ** 2).sum())
    return LeastSquares(np.array([a * shift, b / span]), to @ covariance @ to.T, 1 - error / total if total > 0 else np.nan)


def _both_fits(x: Any, y: Any) -> tuple[float, ...]:
    """Compute `FITTED` from the sites with a defined quantity; NaN for fewer than three sites, or without an optimum."""
    known = np.isfinite(y)
    x, y = x[known], y[known]
    if len(y) < 3 or not y.any():
        return (float("nan"),) * len(FITTED)
    try:
        fit = fit_exponential(x, y)
    except RuntimeError:
        fit = LeastSquares(np.full(2, np.nan), np.full((2, 2), np.nan), np.nan)
    # Of a curve that goes through one end alone, the variance of the amplitude is below the rounding.
    with np.errstate(invalid="ignore"):
        errors = np.sqrt(np.diag(fit.covariance))
    slope, intercept = np.polyfit(x, y, 1)
    total = float(((y - y.mean()) ** 2).sum())
    line = 1 - float(((y - intercept - slope * x) ** 2).sum()) / total if total > 0 else float("nan")
    a, b = fit.params
    return (a, errors[0], b, errors[1], fit.rsquared, intercept, slope, line)
