"""Coupling of many models or checkpoints: regression of scores on coupling, coupling over training, and the graph of blocks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64
from torch import Tensor, from_numpy

from ..analyzers.block_coupling import BlockCouplingResult
from ..core.argument_checks import typed
from ..core.errors import LayersimError, LayersimWarning, as_fraction

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects
    from plotly.graph_objects import Figure
else:
    # plotly is imported when a figure is made: a check of the type at every call would import it first.
    Figure = Any


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Relation:
    """Linear regression of models' scores on their mean coupling, by ordinary least squares.

    Attributes:
        names: of the models.
        coupling: `model`, mean coupling over pairs of different blocks.
        scores: `model`.
        slope: of the score by coupling.
        intercept: of the score.
        r_squared: fraction of the scores' variance that the line explains.
        p_value: of the slope, two-sided, under normal errors. For models of one family, which are not independent, it is too
            small.
        confidence: of the band.
        band: `point 4`: coupling, the line, and the lower and upper end of the confidence interval of the mean score there.
    """

    names: tuple[str, ...]
    coupling: Float64[Tensor, " model"]
    scores: Float64[Tensor, " model"]
    slope: float
    intercept: float
    r_squared: float
    p_value: float
    confidence: float
    band: Float64[Tensor, "point 4"]

    def __repr__(self) -> str:
        equation = f"score = {self.intercept:.4g} + {self.slope:.4g} coupling"
        return f"Relation({len(self.names)} models: {equation}, R2 = {self.r_squared:.3g}, p = {self.p_value:.2g})"

    def to_frame(self) -> pandas.DataFrame:
        """A table of the models with their coupling, their score and the fitted score."""
        import pandas

        fit = self.intercept + self.slope * self.coupling
        return pandas.DataFrame(
            {"model": self.names, "coupling": self.coupling.numpy(), "score": self.scores.numpy(), "fit": fit.numpy()}
        )

    def plot(self) -> plotly.graph_objects.Figure:
        """The scores over coupling, the line, and its confidence band (Aubry et al. 2025, figure 1 a)."""
        from ..reporting.curves import regression

        x, fit, low, high = self.band.T.numpy()
        title = f"R² = {self.r_squared:.2f}, p = {self.p_value:.2g}, {len(self.names)} models"
        line = {"x": x, "fit": fit, "low": low, "high": high}
        return regression(
            self.coupling.numpy(), self.scores.numpy(), list(self.names), line, (title, "Mean coupling of blocks", "Score")
        )


@typed
def relate(results: Mapping[str, Any], scores: Mapping[str, Any], *, confidence: int | float = 0.95) -> Relation:
    """Regress a benchmark score on mean coupling, over models.

    Args:
        results: `BlockCoupling` results by model name, or mean couplings as numbers.
        scores: benchmark scores by model name.
        confidence: level of the confidence band, between 0 and 1.

    Raises:
        LayersimError: there are fewer than three models, names differ, or all couplings or all scores are the same.

    Source:
        Aubry et al. 2025 (arXiv 2407.07810), section 5.4 and figure 1 a: R² = 0.75 over their base models. Their mean includes
        the diagonal, see `BlockCouplingResult.mean`.

    Examples:
        >>> import tl_layersim as lsim
        >>> fit = lsim.relate({"a": 0.1, "b": 0.2, "c": 0.3, "d": 0.4}, {"a": 30, "b": 42, "c": 48, "d": 60})
        >>> round(fit.slope), round(fit.r_squared, 3)
        (96, 0.985)
    """
    from statsmodels.api import OLS, add_constant

    if results.keys() != scores.keys() or len(results) < 3:
        unmatched = sorted(results.keys() ^ scores.keys())
        raise LayersimError(
            "`results` and `scores` must name the same models."
            if unmatched
            else "`results` holds too few models for a regression.",
            given=f"{', '.join(unmatched)} on one side only" if unmatched else f"{len(results)} models",
            expected="the same names in both, three or more",
            do="relate({name: report['block_coupling'], ...}, {name: score, ...})",
        )
    if not 0 < confidence < 1:
        raise LayersimError(
            "`confidence` must be between 0 and 1.",
            given=f"confidence={confidence}",
            expected="a probability, such as 0.95",
            do=as_fraction("confidence", confidence) or "confidence=0.95",
        )
    _same_options([result for result in results.values() if isinstance(result, BlockCouplingResult)])
    x = np.array([_mean_coupling(result) for result in results.values()], dtype=np.float64)
    y = np.array([float(scores[name]) for name in results], dtype=np.float64)
    flat = [bool(np.ptp(v) <= 1e-9 * np.abs(v).max()) for v in (x, y)]
    if not (np.isfinite(x).all() and np.isfinite(y).all()) or any(flat):
        raise LayersimError(
            "`results` and `scores` must be finite and differ between models.",
            given=f"couplings {x.round(4).tolist()}, scores {y.tolist()}",
            expected="finite numbers that differ",
            do="check the models: a model of a single block has no coupling",
        )
    fitted = OLS(y, add_constant(x)).fit()
    grid = np.linspace(x.min(), x.max(), 50)
    interval = fitted.get_prediction(add_constant(grid)).conf_int(alpha=1 - confidence)
    line = fitted.params[0] + fitted.params[1] * grid
    return Relation(
        names=tuple(results),
        coupling=from_numpy(x),
        scores=from_numpy(y),
        slope=float(fitted.params[1]),
        intercept=float(fitted.params[0]),
        r_squared=float(fitted.rsquared),
        p_value=float(fitted.pvalues[1]),
        confidence=confidence,
        band=from_numpy(np.column_stack([grid, line, interval])),
    )


def _mean_coupling(result: Any) -> float:
    if isinstance(result, BlockCouplingResult):
        return result.mean()
    if isinstance(result, int | float) and not isinstance(result, bool):
        return float(result)
    raise LayersimError(
        "`results` must contain results of BlockCoupling, or their means.",
        given=type(result).__name__,
        expected="a BlockCouplingResult, or its mean as a number",
        do="report['block_coupling']",
    )


def _same_options(results: list[BlockCouplingResult]) -> None:
    """Refuse couplings that were measured with different options; warn where the data differs."""
    recorded = ("diagonal", "positions")
    data = {r.provenance.data for r in results}
    if len(data) > 1:
        warnings.warn(
            "`results` were measured on different prompts, and coupling depends on their length and content.",
            LayersimWarning,
            stacklevel=4,
        )
    options = {str((r.ks[0], r.normalize, *(r.provenance.options.get(name) for name in recorded))) for r in results}
    if len(options) > 1:
        raise LayersimError(
            "`results` were measured with different options.",
            given=f"k, normalize, diagonal, positions: {sorted(options)}",
            expected="one set of options",
            do=f"the same options for all, such as lsim.BlockCoupling(k={results[0].ks[0]})",
        )


@typed
def plot_sweep(results: Mapping[Any, Any], *, title: str = "Coupling of blocks") -> Figure:
    """A figure of mean coupling over training checkpoints, with the coupling of neighbouring blocks and of random vectors.

    Args:
        results: `BlockCoupling` results by training step or name, in order. Numbers that span more than a factor of 20 have a
            logarithmic axis; with 0 among them, equal distances.
        title: of the figure.

    Returns:
        A plotly figure.

    Source:
        Aubry et al. 2025 (arXiv 2407.07810), figure 1 b.
    """
    from ..reporting.curves import sweep

    others = [type(one).__name__ for one in results.values() if not isinstance(one, BlockCouplingResult)]
    if not results or others:
        raise LayersimError(
            "`results` must hold results of BlockCoupling.",
            given=", ".join(others) or "no results",
            expected="one or more results of BlockCoupling",
            do="plot_sweep({step: report['block_coupling'], ...})",
        )
    _same_options(list(results.values()))
    series = {
        "all pairs": [result.mean() for result in results.values()],
        "neighbours": [result.neighbours() for result in results.values()],
        "random vectors": [result.mean("null_coupling") for result in results.values()],
    }
    return sweep(list(results), series, (title, "Training step", "Coupling"))


@typed
def plot_adjacency(
    result: BlockCouplingResult, *, strongest: int | float | None = None, title: str = "Coupling of blocks"
) -> Figure:
    """A figure of blocks on a circle; the edge between two blocks is more opaque the more they are coupled beyond chance.

    The strength of an edge is the mean of both directions, from 0 at the null to 1 at full coupling.

    Args:
        result: of `BlockCoupling` with `normalize=True`.
        strongest: strength of an edge that is fully opaque, for figures that are compared; by default the strongest edge here.
        title: of the figure.

    Returns:
        A plotly figure.

    Source:
        Aubry et al. 2025 (arXiv 2407.07810), figure 1 c to e.
    """
    from ..reporting.network import coupling_network

    if strongest is not None and not 0 < strongest < math.inf:
        raise LayersimError(
            "`strongest` must be above 0.",
            given=f"strongest={strongest}",
            expected="the strength of a fully opaque edge, 0 to 1",
            do="leave strongest= out",
        )
    if not result.normalize:
        raise LayersimError(
            "`result` must hold normalised couplings, between 0 and 1.",
            given="normalize=False",
            expected="a result of BlockCoupling(normalize=True)",
            do="lsim.BlockCoupling()",
        )
    beyond = (result.null - result.values) / result.null.clamp(min=1e-9)
    strength = ((beyond + beyond.T) / 2).nan_to_num(0.0).clamp(0.0, 1.0)
    # A block has no edge to itself.
    strength.fill_diagonal_(0.0)
    full = float(strength.max()) if strongest is None else strongest
    return coupling_network(strength.numpy(), full, result.layers[1:], title)
