"""Least-squares fits: `exponential_fit` over depth, and `relate`, a regression of scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from ..core.arguments import OpenFraction, typed
from ..core.errors import LayersimError
from ..core.report_tables import BLOCK_AXES, SITE_AXES
from ..core.results import Result
from ..core.wording import brief, with_article

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects
    import xarray

FITTED = ("amplitude", "amplitude_se", "rate", "rate_se", "r_squared", "intercept", "slope", "linear_r_squared")
# Rates over the range of x at which searches start. Further starts are the line through the logarithms and a grid of rates.
STARTS = (-3.0, -0.5, 0.5, 3.0)
# Largest rate of the grid.
MOST_RATE = 100.0
# Relative gain that the optimum from the grid needs: two searches that end at one optimum differ by rounding.
LEAST_GAIN = 1e-6
# Status of MINPACK's search after too many steps.
NOT_CONVERGED = 5


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
    weigh most. The line through the logarithms, which weighs all sites alike, only starts the search. `Trajectory`'s
    expodistance measures how equal the growth of one token's norm is from block to block. The standard errors assume
    independent errors of equal size, and sites of one model are not independent: where errors of neighbouring sites had a
    correlation of .8, the true rate was within Student's t times `rate_se` in 55 to 74 % of simulations instead of 95 %
    (`benchmarks/studies/fit_coverage.py`).

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
    site_axes = [axis for axis in array.dims if axis in SITE_AXES]
    count = len(range(array.sizes[site_axes[0]])[sites]) if len(site_axes) == 1 else 0
    if count < 3:
        content = f"{count} sites" if len(site_axes) < 2 else f"the axes of sites {site_axes}"
        raise LayersimError(
            f"`field` is {field or array.name!r}, with {content}; it must have one axis of sites, with three sites or more. "
            "Select a label of each further axis."
        )
    [axis] = site_axes
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
    """Convert a field to a labelled array.

    If untrained models were measured, axis `weights` has "trained" and "untrained".
    """
    import pandas
    import xarray

    table = result.to_xarray()
    name = result.declared(field).name
    array = table[name]
    untrained = f"{name}_untrained"
    if untrained in table:
        array = xarray.concat([array, table[untrained]], pandas.Index(["trained", "untrained"], name="weights"))
    return array.rename(field).assign_attrs(model=result.provenance.model, tokens=result.provenance.tokens)


def fit_exponential(x: Any, y: Any) -> LeastSquares:
    """Fit y = a exp(b x) by least squares in y.

    Args:
        x: `point`, depths.
        y: `point`, values; at least three.

    Raises:
        LayersimError: the search does not converge from any start.
    """
    from scipy.optimize import leastsq

    # Centred, in units of the range of x and of the largest y, so that the search does not overflow.
    middle = (x.max() + x.min()) / 2
    span = np.ptp(x)
    size = np.abs(y).max()
    z = (x - middle) / span
    scaled = y / size

    def curve(z: Any, a: float, b: float) -> Any:
        return a * np.exp(b * z)

    def errors(parameters: Any) -> Any:
        return curve(z, *parameters) - scaled

    def derivative(parameters: Any) -> Any:
        a, b = parameters
        return np.column_stack([np.exp(b * z), a * z * np.exp(b * z)])

    starts = _starts(z, scaled)
    best: Any = None
    for start in starts:
        with np.errstate(over="ignore", invalid="ignore"):
            parameters, inverse, _, _, status = leastsq(
                errors, start, Dfun=derivative, full_output=True, maxfev=2000, ftol=1e-14, xtol=1e-14
            )
            error = float(((scaled - curve(z, *parameters)) ** 2).sum())
        # Status 6 to 8: no step can lower the error further, which may hold at the start already.
        if status == NOT_CONVERGED or not np.isfinite(error):
            continue
        degrees = len(z) - 2
        covariance = np.full((2, 2), np.inf)
        if inverse is not None and degrees >= 1:
            covariance = inverse * (error / degrees)
        factor = 1 - LEAST_GAIN if start is starts[-1] else 1
        if best is None or error < best[0] * factor:
            best = (error, parameters, covariance)
    if best is None:
        raise LayersimError(
            "An exponential cannot be fitted to these scores: least squares did not converge. Use shape='line'."
        )
    error, (a, b), covariance = best
    # Back to the units of x and y: b / span, and a exp(-b middle / span) times the size.
    shift = np.exp(-b * middle / span) * size
    # Derivatives of the parameters in these units by a and b.
    jacobian = np.array([[shift, -a * shift * middle / span], [0.0, 1 / span]])
    total = float(((scaled - scaled.mean()) ** 2).sum())
    # An infinite variance times zero is not a number: the error is unknown.
    with np.errstate(invalid="ignore"):
        covariance = jacobian @ covariance @ jacobian.T
    r_squared = 1 - error / total if total > 0 else np.nan
    return LeastSquares(np.array([a * shift, b / span]), covariance, r_squared)


def _starts(z: Any, scaled: Any) -> list[tuple[float, float]]:
    """Amplitudes and rates at which the searches start.

    Args:
        z: `point`, depths from -1/2 to 1/2.
        scaled: `point`, values of at most 1 in size.
    """
    starts = [(float(scaled.mean()), rate) for rate in STARTS]
    if (scaled > 0).all() or (scaled < 0).all():
        slope, intercept = np.polyfit(z, np.log(np.abs(scaled)), 1)
        starts.insert(0, (float(np.sign(scaled[0]) * np.exp(intercept)), float(slope)))
    # Last start: the best rate of a grid, because values of both signs have several optima.
    rates = np.linspace(-MOST_RATE, MOST_RATE, 401)
    # `rate point`, the curve of each rate, divided by its largest value.
    curves = np.exp(np.outer(rates, z) - np.abs(rates)[:, None] / 2)
    amplitudes = curves @ scaled / (curves**2).sum(1)
    best_number = int(((scaled - amplitudes[:, None] * curves) ** 2).sum(1).argmin())
    best_rate = rates[best_number]
    starts.append((float(amplitudes[best_number] * np.exp(-abs(best_rate) / 2)), float(best_rate)))
    return starts


def _both_fits(x: Any, y: Any) -> tuple[float, ...]:
    """Fit an exponential and a line to the finite values; NaN if fewer than three are finite."""
    is_finite = np.isfinite(y)
    x = x[is_finite]
    y = y[is_finite]
    if len(y) < 3 or not y.any():
        return (float("nan"),) * len(FITTED)
    try:
        fit = fit_exponential(x, y)
    except LayersimError:
        fit = LeastSquares(np.full(2, np.nan), np.full((2, 2), np.nan), np.nan)
    # If the curve passes through one end alone, rounding makes the variance of the amplitude negative.
    with np.errstate(invalid="ignore"):
        errors = np.sqrt(np.diag(fit.covariance))
    slope, intercept = np.polyfit(x, y, 1)
    total = float(((y - y.mean()) ** 2).sum())
    line_error = float(((y - intercept - slope * x) ** 2).sum())
    line_r_squared = 1 - line_error / total if total > 0 else float("nan")
    a, b = fit.params
    return (a, errors[0], b, errors[1], fit.rsquared, intercept, slope, line_r_squared)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Relation:
    """Least-squares regression of scores on one or more predictors, from `relate`.

    Attributes:
        predictors: `point predictor`, a table whose index has the names of the points.
        scores: `point`, a Series with the same index; its name is the score in words.
        fit: for a line, statsmodels' `RegressionResults`, with `fit.summary()`, `fit.f_pvalue` and so on; for an exponential,
            `params` a and b of score = a exp(b value), their `covariance` and `rsquared`.
        shape: "line" or "exponential".
        confidence: confidence level of the intervals and of the band.
        coefficients: the table that `to_frame` returns.
    """

    predictors: pandas.DataFrame
    scores: pandas.Series[float]
    fit: Any
    shape: str
    confidence: float
    coefficients: pandas.DataFrame

    @property
    def intercept(self) -> float:
        """Fitted score at predictors of 0."""
        return float(self.fit.params[0])

    @property
    def r_squared(self) -> float:
        """Fraction of the scores' variance that the fit explains."""
        return float(self.fit.rsquared)

    def __repr__(self) -> str:
        table = self.coefficients.to_string(float_format=lambda number: f"{number:.4g}")
        return f"Relation({self.scores.name}, {self.shape}, {len(self.scores)} points, R2 = {self.r_squared:.3g})\n{table}"

    def to_frame(self) -> pandas.DataFrame:
        """Table with a row for each predictor.

        Columns: `coefficient`, of an exponential the rate; its standard error `se`; the ends `low` and `high` of its interval;
        `p_value`, two-sided, under normal errors; `partial`, the correlation of predictor and score given the other predictors,
        which on a line has the same p-value; the correlations `pearson` and `spearman`, which ignore the others, and their
        p-values `pearson_p` and `spearman_p`. For models of one family, steps of one training and tokens of one text, which are
        not independent, p-values are too small.
        """
        return self.coefficients.copy()

    @typed
    def band(self, predictor: str | None = None) -> pandas.DataFrame:
        """Fitted score and its confidence interval over one predictor; other predictors are at their means.

        Args:
            predictor: name of the predictor; None for the first.

        Returns:
            50 rows with columns `value`, `fit`, `low` and `high`.
        """
        import pandas
        from scipy.stats import t
        from statsmodels.api import add_constant

        column = 0 if predictor is None else self.predictors.columns.get_loc(predictor)
        points = np.tile(self.predictors.to_numpy().mean(0), (50, 1))
        x = self.predictors.to_numpy()[:, column]
        grid = np.linspace(x.min(), x.max(), 50)
        points[:, column] = grid
        if self.shape == "line":
            fit = self.intercept + points @ self.fit.params[1:]
            low, high = self.fit.get_prediction(add_constant(points, has_constant="add")).conf_int(alpha=1 - self.confidence).T
        else:
            # To first order, from the covariance of a and b.
            a, b = self.fit.params
            fit = a * np.exp(b * grid)
            gradient = np.column_stack([np.exp(b * grid), grid * fit])
            spread = np.sqrt(np.einsum("np,pq,nq->n", gradient, self.fit.covariance, gradient))
            margin = t.ppf(0.5 + self.confidence / 2, len(x) - 2) * spread
            low = fit - margin
            high = fit + margin
        return pandas.DataFrame({"value": grid, "fit": fit, "low": low, "high": high})

    @typed
    def plot(self, predictor: str | None = None) -> plotly.graph_objects.Figure:
        """Draw the scores over one predictor, with the fit and its confidence band (Aubry et al. 2025, figures 1 a and 8).

        With several predictors, each score is adjusted to the means of the other predictors. The slope of the points is then
        the coefficient, and their scatter is the scatter of the residuals.

        Args:
            predictor: name of the predictor; None for the first.
        """
        from ..reporting.difference_and_fit_figures import regression

        return regression(self, self.predictors.columns[0] if predictor is None else predictor)


@typed
def relate(
    values: Any, scores: Any, *, shape: Literal["line", "exponential"] = "line", confidence: OpenFraction = 0.95
) -> Relation:
    """Regress scores of models or prompts on measured values, and correlate the two.

    For example, accuracy on coupling.

    Args:
        values: numbers by model: a mapping, a pandas Series, or a variable of a labelled table over one axis, such as
            `mean_coupling` of `BlockCoupling` over models; one number for each prompt as a sequence or a tensor; or a pandas
            DataFrame with a column for each of several predictors. Figures label their axes by the names of the
            Series and columns.
        scores: the scores, by the same names or in the same order.
        shape: "line", or "exponential" for score = a exp(b value), fitted by least squares of the score to one predictor.
        confidence: confidence level of the intervals and of the band.

    Raises:
        LayersimError: there are fewer than two points more than predictors, names differ, all values or all scores are the
            same, or a predictor is a linear combination of the others.

    Source:
        Aubry et al. 2025 (arXiv 2407.07810), section 5.4, figure 1 a (R² = 0.75 over their base models), figure 8 (exponential
        fit between coupling and performance) and figure 10 (prompts). Their mean coupling includes the diagonal, see
        `BlockCouplingResult.mean`.

    Examples:
        >>> import tl_layersim as lsim
        >>> fit = lsim.many.relate({"a": 0.1, "b": 0.2, "c": 0.3, "d": 0.4}, {"a": 30, "b": 42, "c": 48, "d": 60})
        >>> fit.to_frame()[["coefficient", "spearman"]].round(2).values.tolist(), round(fit.r_squared, 3)
        ([[96.0, 1.0]], 0.985)
        >>> import pandas
        >>> both = pandas.DataFrame({"coupling": [0.1, 0.3, 0.2, 0.5, 0.4], "size": [1, 1, 2, 3, 5]})
        >>> fit = lsim.many.relate(both, [1.2, 3.1, 2.3, 5.2, 4.5])
        >>> fit.to_frame()["partial"].round(2).to_dict()
        {'coupling': 1.0, 'size': 0.99}
    """
    import pandas
    from scipy.stats import pearsonr, spearmanr, t
    from statsmodels.api import OLS, add_constant

    table = values if isinstance(values, pandas.DataFrame) else _series(values, "Value").to_frame()
    if len(set(map(str, table.columns))) < len(table.columns):
        raise LayersimError(f"`values` has the columns {', '.join(map(str, table.columns))}; their names must differ.")
    table = pandas.DataFrame({str(name): _series(table[name], "Value") for name in table.columns})
    targets = _series(scores, "Score")
    unmatched = sorted(map(str, set(table.index) ^ set(targets.index)))
    if unmatched:
        raise LayersimError(
            f"`values` and `scores` must name the same models; only one of the two has {', '.join(unmatched[:8])}."
        )
    count, size = table.shape
    if count < size + 2 or size == 0:
        raise LayersimError(
            f"`values` has {count} points and {size} predictors; it must have one predictor or more, and at least two more "
            "points than predictors."
        )
    if shape == "exponential" and size > 1:
        raise LayersimError(f"`shape` is 'exponential', which takes one predictor; `values` has {size}.")
    targets = targets.reindex(table.index)
    x = np.ascontiguousarray(table.to_numpy())
    y = targets.to_numpy()
    flat = any(np.ptp(column) <= 1e-9 * np.abs(column).max() for column in (*x.T, y))
    if flat or not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise LayersimError(
            "`values` and `scores` must be finite and differ between points; `values` is "
            f"{brief(x.squeeze().round(4).tolist())}, and `scores` is {brief(y.tolist())}."
        )
    if np.linalg.matrix_rank((x - x.mean(0)) / x.std(0)) < size:
        raise LayersimError(
            f"The columns of `values` are linearly dependent: {', '.join(table.columns)}. Leave out one of the columns."
        )
    fit: Any
    if shape == "line":
        fit = OLS(y, add_constant(x)).fit()
        all_errors = fit.bse
    else:
        fit = fit_exponential(x[:, 0], y)
        all_errors = np.sqrt(np.diag(fit.covariance))
    # The first parameter is the intercept, or the amplitude.
    slopes = fit.params[1:]
    errors = all_errors[1:]
    degrees = count - size - 1
    margin = t.ppf(0.5 + confidence / 2, degrees) * errors
    pearson = [pearsonr(column, y) for column in x.T]
    spearman = [spearmanr(column, y) for column in x.T]
    with np.errstate(divide="ignore"):
        ratio = np.abs(slopes / errors)
        partial = np.sign(slopes) / np.hypot(1.0, np.sqrt(degrees) / ratio)
    columns = {
        "coefficient": slopes,
        "se": errors,
        "low": slopes - margin,
        "high": slopes + margin,
        "p_value": 2 * t.sf(ratio, degrees),
        "partial": partial if shape == "line" else pearson[0].statistic,
        "pearson": [test.statistic for test in pearson],
        "pearson_p": [test.pvalue for test in pearson],
        "spearman": [test.statistic for test in spearman],
        "spearman_p": [test.pvalue for test in spearman],
    }
    return Relation(
        predictors=table,
        scores=targets,
        fit=fit,
        shape=shape,
        confidence=confidence,
        coefficients=pandas.DataFrame(columns, index=pandas.Index(table.columns, name="predictor")),
    )


def _series(numbers: Any, default: str) -> pandas.Series[float]:
    """Convert numbers to a pandas Series, named after the quantity and its unit."""
    import pandas

    attributes = getattr(numbers, "attrs", {})
    label = attributes.get("long_name", "")
    if "units" in attributes:
        label += f" ({attributes['units']})"
    series: Any = numbers.to_series() if hasattr(numbers, "to_series") else numbers
    if not isinstance(series, pandas.Series):
        if not isinstance(series, Mapping):
            series = dict(enumerate(np.asarray(series).reshape(-1).tolist()))
        # Objects: a value that is no number is named in the error below.
        series = pandas.Series(list(series.values()), index=list(series), dtype=object)
    try:
        numeric: pandas.Series[float] = series.map(float).astype(float)
    except (TypeError, ValueError) as error:
        raise LayersimError(f"`{default.lower()}s` is {brief(numbers)}; it must hold numbers, by name or in order.") from error
    return numeric.rename(label or series.name or default)
