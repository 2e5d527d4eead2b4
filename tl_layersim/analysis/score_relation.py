"""How one number of a model relates to another over models, checkpoints or prompts: regression and correlation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Float64
from torch import Tensor, from_numpy

from ..analyzers.block_coupling import BlockCouplingResult
from ..core.argument_checks import typed
from ..core.bounds import OpenFraction
from ..core.errors import LayersimError, warn
from ..core.wording import brief, equation, p_value_text
from .exponential_fits import fit_exponential

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

COUPLING, VALUE, SCORE = "Mean coupling of blocks", "Value", "Score"


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Relation:
    """Regression of scores on values by least squares, and their correlation, over models, checkpoints or prompts.

    Attributes:
        names: of the points.
        values: `point`, such as mean couplings.
        scores: `point`.
        shape: "line" for score = intercept + slope value; "exponential" for score = intercept exp(slope value).
        slope: of the score by the value; of an exponential, the rate.
        intercept: the fitted score at a value of 0.
        r_squared: fraction of the scores' variance that the fit explains.
        p_value: of the slope, two-sided, under normal errors. For models of one family, steps of one training and tokens of one
            text, which are not independent, it is too small.
        pearson: correlation.
        pearson_p: its p-value, two-sided; that of the slope of a line.
        spearman: rank correlation, which is the same for every rising transformation of values or scores.
        spearman_p: its p-value, two-sided.
        confidence: of the band.
        band: `grid 4`: value, the fit, and the lower and upper end of the confidence interval of the mean score there.
        quantity: the values in words.
        score: the scores in words.
    """

    names: tuple[str, ...]
    values: Float64[Tensor, " point"]
    scores: Float64[Tensor, " point"]
    shape: str
    slope: float
    intercept: float
    r_squared: float
    p_value: float
    pearson: float
    pearson_p: float
    spearman: float
    spearman_p: float
    confidence: float
    band: Float64[Tensor, "grid 4"]
    quantity: str
    score: str

    def __repr__(self) -> str:
        line = (
            f"{self.intercept:.4g} + {self.slope:.4g} x"
            if self.shape == "line"
            else f"{self.intercept:.4g} exp({self.slope:.4g} x)"
        )
        return (
            f"Relation({self.score} by x = {self.quantity}, {len(self.names)} points: {line}, R2 = {self.r_squared:.3g}, "
            f"{equation('p', p_value_text(self.p_value))}; Pearson {self.pearson:.3f}, Spearman {self.spearman:.3f})"
        )

    def to_frame(self) -> pandas.DataFrame:
        """A table of the points with their value, their score and the fitted score."""
        import pandas

        fit = _fitted_scores(self.shape, self.values.numpy(), self.intercept, self.slope)
        return pandas.DataFrame({"name": self.names, "value": self.values.numpy(), "score": self.scores.numpy(), "fit": fit})

    def plot(self) -> plotly.graph_objects.Figure:
        """The scores over the values, the fit, and its confidence band (Aubry et al. 2025, figures 1 a and 8)."""
        from ..reporting.scatter import MOST_NAMES, regression

        x, fit, low, high = self.band.T.numpy()
        words = [text.partition(" (")[0] for text in (self.score, self.quantity)]
        title = f"{words[0]} against {words[1][:1].lower()}{words[1][1:]}"
        found = f"R² = {self.r_squared:.2f}, {equation('p', p_value_text(self.p_value))}, {len(self.names)} points"
        line = {"x": x, "fit": fit, "low": low, "high": high}
        found += f" · band: {100 * self.confidence:g} % interval of the {'line' if self.shape == 'line' else 'curve'}"
        if len(self.names) <= MOST_NAMES:
            found += f" · labels: {'models' if self.quantity == COUPLING else 'names of the points'}"
        titles = (title, found, self.quantity, self.score)
        return regression(self.values.numpy(), self.scores.numpy(), list(self.names), line, titles)


@typed
def relate(
    results: Any,
    scores: Any,
    *,
    shape: Literal["line", "exponential"] = "line",
    confidence: OpenFraction = 0.95,
    quantity: str | None = None,
    score: str | None = None,
) -> Relation:
    """Regress a score on a number of each model, and correlate them: accuracy on coupling, difficulty on a prompt's value.

    Args:
        results: numbers by model, such as `sweep.numbers("cka", layer=0)` or any mapping; `BlockCoupling` results by model,
            which stand for their mean coupling; or one number for each prompt as a sequence or a tensor.
        scores: scores by the same names or in the same order: of a benchmark, or `sweep.numbers("logit_lens", "accuracy")`.
        shape: "line", or "exponential" for score = a exp(b value), fitted by least squares of the score.
        confidence: level of the confidence band, between 0 and 1.
        quantity: the values in words, for the figure; by default the name of a pandas Series.
        score: the scores in words.

    Raises:
        LayersimError: there are fewer than three points, names differ, or all values or all scores are the same.

    Source:
        Aubry et al. 2025 (arXiv 2407.07810), section 5.4, figure 1 a (R² = 0.75 over their base models), figure 8 (exponential
        fit between coupling and performance) and figure 10 (prompts). Their mean coupling includes the diagonal, see
        `BlockCouplingResult.mean`.

    Examples:
        >>> import tl_layersim as lsim
        >>> fit = lsim.relate({"a": 0.1, "b": 0.2, "c": 0.3, "d": 0.4}, {"a": 30, "b": 42, "c": 48, "d": 60})
        >>> round(fit.slope), round(fit.r_squared, 3), round(fit.spearman, 3)
        (96, 0.985, 1.0)
    """
    from scipy.stats import pearsonr, spearmanr

    given, quantity_name = _points_by_name(results)
    targets, score_name = _points_by_name(scores)
    if unmatched := sorted(map(str, given.keys() ^ targets.keys())):
        raise LayersimError(
            f"`results` and `scores` must name the same models; only one of them has {', '.join(unmatched[:8])}."
        )
    if len(given) < 3:
        raise LayersimError(f"`results` holds {len(given)} points; a regression needs three or more.")
    names = list(given)
    x, y = (np.array([own[name] for name in names], dtype=np.float64) for own in (given, targets))
    flat = [bool(np.ptp(v) <= 1e-9 * np.abs(v).max()) for v in (x, y)]
    if not (np.isfinite(x).all() and np.isfinite(y).all()) or any(flat):
        raise LayersimError(
            f"`results` and `scores` must be finite and differ between points; they are {brief(x.round(4).tolist())} and "
            f"{brief(y.tolist())}."
        )
    intercept, slope, r_squared, p_value, band = (_line_with_band if shape == "line" else _exponential_with_band)(
        x, y, confidence
    )
    pearson, spearman = pearsonr(x, y), spearmanr(x, y)
    return Relation(
        names=tuple(map(str, names)),
        values=from_numpy(x),
        scores=from_numpy(y),
        shape=shape,
        slope=slope,
        intercept=intercept,
        r_squared=r_squared,
        p_value=p_value,
        pearson=float(pearson.statistic),
        pearson_p=float(pearson.pvalue),
        spearman=float(spearman.statistic),
        spearman_p=float(spearman.pvalue),
        confidence=confidence,
        band=from_numpy(band),
        quantity=quantity or quantity_name or VALUE,
        score=score or score_name or SCORE,
    )


def same_coupling_options(results: list[BlockCouplingResult]) -> None:
    """Refuse couplings that were measured with different options; warn where the data differs.

    Args:
        results: of models that are related.

    Raises:
        LayersimError: their options differ.
    """
    recorded = ("diagonal", "positions")
    data = {r.provenance.data for r in results}
    if len(data) > 1:
        warn("`results` were measured on different prompts, and coupling depends on their length and content.")
    options = {str((r.ks[0], r.normalize, *(r.provenance.options.get(name) for name in recorded))) for r in results}
    if len(options) > 1:
        raise LayersimError(
            f"`results` were measured with different options (k, normalize, diagonal, positions): {sorted(options)}."
        )


def _points_by_name(given: Any) -> tuple[dict[Any, float], str]:
    """Numbers by name or position, and what they are in words; "" if that is not known."""
    label = ""
    if isinstance(given, Mapping):
        numbers = dict(given)
    elif hasattr(given, "to_dict") and hasattr(given, "index"):
        numbers, label = given.to_dict(), str(given.name or "")
    else:
        numbers = dict(enumerate(np.asarray(given).reshape(-1).tolist()))
    couplings = [one for one in numbers.values() if isinstance(one, BlockCouplingResult)]
    if couplings:
        same_coupling_options(couplings)
        label = COUPLING
    if texts := [name for name, one in numbers.items() if isinstance(one, bool | str)]:
        raise LayersimError(f"`results` and `scores` must be numbers; that of {texts[0]!r} is {numbers[texts[0]]!r}.")
    return {name: one.mean() if isinstance(one, BlockCouplingResult) else float(one) for name, one in numbers.items()}, label


def _line_with_band(x: Any, y: Any, confidence: float) -> tuple[float, float, float, float, Any]:
    """Intercept, slope, R², p-value of the slope, and the line with its band."""
    from statsmodels.api import OLS, add_constant

    fitted = OLS(y, add_constant(x)).fit()
    grid = np.linspace(x.min(), x.max(), 50)
    interval = fitted.get_prediction(add_constant(grid)).conf_int(alpha=1 - confidence)
    intercept, slope = map(float, fitted.params)
    band = np.column_stack([grid, intercept + slope * grid, interval])
    return intercept, slope, float(fitted.rsquared), float(fitted.pvalues[1]), band


def _exponential_with_band(x: Any, y: Any, confidence: float) -> tuple[float, float, float, float, Any]:
    """The same for a exp(b x); the band follows from the covariance of a and b, to first order."""
    from scipy.stats import t

    try:
        fit = fit_exponential(x, y)
    except RuntimeError as error:
        raise LayersimError("No exponential fits these scores: least squares did not converge. Use shape='line'.") from error
    a, b = map(float, fit.parameters)
    grid = np.linspace(x.min(), x.max(), 50)
    curve = _fitted_scores("exponential", grid, a, b)
    gradient = np.column_stack([np.exp(b * grid), grid * curve])
    spread = np.sqrt(np.einsum("np,pq,nq->n", gradient, fit.covariance, gradient))
    margin = t.ppf(0.5 + confidence / 2, len(x) - 2) * spread
    ratio = abs(b) / np.sqrt(fit.covariance[1, 1]) if fit.covariance[1, 1] > 0 else np.inf
    return (
        a,
        b,
        fit.r_squared,
        float(2 * t.sf(ratio, len(x) - 2)),
        np.column_stack([grid, curve, curve - margin, curve + margin]),
    )


def _fitted_scores(shape: str, x: Any, intercept: float, slope: float) -> Any:
    return intercept + slope * x if shape == "line" else intercept * np.exp(slope * x)
