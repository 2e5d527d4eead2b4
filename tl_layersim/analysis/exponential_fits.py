"""Exponential fits: does a quantity grow exponentially with depth, or along a line?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float64
from torch import Tensor, from_numpy

from ..core.argument_checks import typed
from ..core.errors import LayersimError
from ..core.provenance import Provenance
from ..core.results import Result
from .sweep_curves import field_axes, field_curve, site_axes
from .sweep_results import quantity_of

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

# Rates at which the search begins, beside that of the line through the logarithms, over the whole range of x.
STARTS = (-3.0, -0.5, 0.5, 3.0)


class LeastSquares(NamedTuple):
    """A fit of y = a exp(b x) by least squares.

    Attributes:
        parameters: a and b.
        covariance: of both.
        r_squared: fraction of the variance of y that the curve explains.
    """

    parameters: Any
    covariance: Any
    r_squared: float


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ExponentialFit:
    """Fits of y = a exp(b l) to a quantity over depth, and of a line with as many parameters.

    Attributes:
        names: of the curves, one for each label of a further axis such as quantiles or prompts.
        sites: names of the sites.
        depth: `site`, the number l of each site; 0 is the first of the result.
        values: `curve site`, the quantity.
        amplitude: `curve`, a: the fitted quantity at l = 0.
        amplitude_error: `curve`, its standard error.
        rate: `curve`, b: exp(b) is the factor of growth from site to site.
        rate_error: `curve`, its standard error.
        r_squared: `curve`, fraction of the variance of the quantity that the exponential explains.
        intercept: `curve`, of the line.
        slope: `curve`, of the line.
        linear_r_squared: `curve`, fraction of the variance that the line explains.
        quantity: the quantity in words, with its unit.
        provenance: of the result.
    """

    names: tuple[str, ...]
    sites: tuple[str, ...]
    depth: Float64[Tensor, " site"]
    values: Float64[Tensor, "curve site"]
    amplitude: Float64[Tensor, " curve"]
    amplitude_error: Float64[Tensor, " curve"]
    rate: Float64[Tensor, " curve"]
    rate_error: Float64[Tensor, " curve"]
    r_squared: Float64[Tensor, " curve"]
    intercept: Float64[Tensor, " curve"]
    slope: Float64[Tensor, " curve"]
    linear_r_squared: Float64[Tensor, " curve"]
    quantity: str
    provenance: Provenance

    def __repr__(self) -> str:
        lines = [
            f"  {name}: {a:.4g} exp({b:.4g} l), R2 = {r:.3f}; line R2 = {line:.3f}"
            for name, a, b, r, line in zip(
                self.names, self.amplitude, self.rate, self.r_squared, self.linear_r_squared, strict=True
            )
        ]
        return "\n".join(
            [
                f"ExponentialFit({self.quantity}, {len(self.sites)} sites, l = {self.depth[0]:g} at {self.sites[0]})",
                *lines[:8],
                *(["  ..."] * (len(lines) > 8)),
            ]
        )

    def to_frame(self) -> pandas.DataFrame:
        """A table with a line for each curve: parameters, standard errors and R² of both fits."""
        import pandas

        columns = ("amplitude", "amplitude_error", "rate", "rate_error", "r_squared", "intercept", "slope", "linear_r_squared")
        return pandas.DataFrame({"curve": self.names} | {name: getattr(self, name).numpy() for name in columns})

    @typed
    def plot(self, curve: int = 0) -> plotly.graph_objects.Figure:
        """The quantity over depth, with the exponential and the line, and their equations in the numbers of the axis.

        Args:
            curve: number of the curve.
        """
        from ..reporting.style import described
        from ..reporting.sweeps import axis_number, fitted_curve

        x = np.linspace(float(self.depth[0]), float(self.depth[-1]), 100)
        a, b = float(self.amplitude[curve]), float(self.rate[curve])
        slope, intercept = float(self.slope[curve]), float(self.intercept[curve])
        number, start, note = axis_number(self.sites, self.depth.tolist())
        found = f"R² = {self.r_squared[curve]:.3f} of the exponential, {self.linear_r_squared[curve]:.3f} of the line{note}"
        words = self.quantity.partition(" (")[0]
        # Lower case inside the title, but not the initials of a name such as "CKA".
        words = words if words[1:2].isupper() else words[:1].lower() + words[1:]
        title = f"Exponential {'growth' if b >= 0 else 'decay'} of the {words}"
        title += "" if len(self.names) == 1 else f", {self.names[curve]}"
        fig = fitted_curve(
            self.depth.numpy(),
            self.values[curve].numpy(),
            self.sites,
            {
                f"{a * np.exp(b * start):.4g} exp({b:.4g} {number})": (x, a * np.exp(b * x)),
                f"{intercept + slope * start:.4g} {'-' if slope < 0 else '+'} {abs(slope):.4g} {number}": (
                    x,
                    intercept + slope * x,
                ),
            },
            (title, found, self.quantity),
        )
        return described(fig, self.provenance)


@typed
def exponential_fit(
    result: Result, field: str = "values", *, sites: slice = slice(None), select: dict[str, Any] | None = None
) -> ExponentialFit:
    r"""Fit $y = a e^{b l}$ to a quantity over depth, such as the norm of the residual stream, and a line beside it.

    Both fits minimise the sum of squared errors of y itself, so that their R² are comparable. Sites with large values therefore
    weigh most. The line through the logarithms, which weighs all sites alike, is only the start of the search; how equal the
    growth of a single token's norm is from block to block is `Trajectory`'s expodistance. The standard errors assume
    independent errors of equal size, and sites of one model are not independent.

    Args:
        result: such as that of `Trajectory`, whose `values` are the mean norms.
        field: name of a field over sites; with a further axis, such as quantiles or prompts, each of its labels has a fit.
        sites: the sites that are fitted, such as `slice(1, -1)` without the embedding and the last block.
        select: by axis, the only label that is fitted.

    Raises:
        LayersimError: the field is not over sites, has three axes or more, or fewer than three sites are left.

    Source:
        Aubry et al. 2025 (arXiv 2407.07810), section 3.3: $|x^l| \approx e^{\alpha l} |x^0|$. The paper does not state how
        curves were fitted. Its figure 8 fits the performance of models to their coupling: `relate(..., shape="exponential")`.
        Its table 3 has R² of four models across data sets, and does not say of which quantity.

    Examples:
        >>> import tl_layersim as lsim
        >>> path = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], lsim.Trajectory())["trajectory"]
        >>> fit = lsim.exponential_fit(path, "norm")
        >>> bool(fit.rate[0] > 0), fit.to_frame()["curve"][0]
        (True, 'Norm of the residual')
    """
    selects: list[Mapping[str, Any]] = [select or {}]
    quantity = quantity_of(result, field)
    names = [quantity]
    if select is None:
        over = site_axes(result, field)
        others = [axis for axis in field_axes(result, field) if axis not in over]
        if len(others) == 1 and len(over) == 1:
            labels = result.coordinates(others[0])
            selects = [{others[0]: label} for label in labels]
            names = [f"{others[0].replace('_', ' ')} {label}" for label in labels]
    curves = [field_curve(result, field, one) for one in selects]
    used = curves[0].sites[sites] if curves else ()
    if len(used) < 3:
        raise LayersimError(
            f"`field` is {field!r}, which is fitted at {len(used)} sites; an exponential fit needs three sites or more."
        )
    depth = np.array([result.layers.index(site) for site in used], dtype=np.float64)
    values = np.stack([curve.values.numpy()[sites] for curve in curves])
    fits = [_both_fits(depth, y) for y in values]
    columns = {name: from_numpy(np.array([fit[name] for fit in fits], dtype=np.float64)) for name in fits[0]}
    return ExponentialFit(
        names=tuple(names),
        sites=used,
        depth=from_numpy(depth),
        values=from_numpy(values),
        quantity=quantity,
        provenance=result.provenance,
        **columns,
    )


def fit_exponential(x: Any, y: Any) -> LeastSquares:
    """Fit y = a exp(b x) by least squares in y.

    Args:
        x: `point`.
        y: `point`, at least three.

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
    best: Any = None
    for start in starts:
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                found, covariance = curve_fit(curve, z, scaled, start, jac=derivative, maxfev=2000, ftol=1e-14, xtol=1e-14)
        except RuntimeError:
            continue
        error = float(((scaled - curve(z, *found)) ** 2).sum())
        if best is None or error < best[0]:
            best = (error, found, covariance)
    if best is None:
        raise RuntimeError("least squares did not converge")
    error, (a, b), covariance = best
    # Back to the units of x and y: b / span, and a exp(-b middle / span) times the size.
    shift = np.exp(-b * middle / span) * size
    to = np.array([[shift, -a * shift * middle / span], [0.0, 1 / span]])
    total = float(((scaled - scaled.mean()) ** 2).sum())
    return LeastSquares(np.array([a * shift, b / span]), to @ covariance @ to.T, 1 - error / total if total > 0 else np.nan)


def _both_fits(x: Any, y: Any) -> dict[str, float]:
    names = ("amplitude", "amplitude_error", "rate", "rate_error", "r_squared", "intercept", "slope", "linear_r_squared")
    if not np.isfinite(y).all() or not y.any():
        return dict.fromkeys(names, float("nan"))
    fit = fit_exponential(x, y)
    errors = np.sqrt(np.diag(fit.covariance))
    slope, intercept = np.polyfit(x, y, 1)
    total = float(((y - y.mean()) ** 2).sum())
    line = 1 - float(((y - intercept - slope * x) ** 2).sum()) / total if total > 0 else float("nan")
    a, b = fit.parameters
    return dict(zip(names, (a, errors[0], b, errors[1], fit.r_squared, intercept, slope, line), strict=True))
