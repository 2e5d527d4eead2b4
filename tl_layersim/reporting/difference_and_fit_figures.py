"""Figures of differences between runs, of regressions and of exponential fits."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from ..core.errors import LayersimError
from ..core.report_tables import SITE_AXES
from ..core.wording import equation, p_value_text
from .heat_map import MATRICES, about_zero
from .lines_and_bars import ZERO_LINE, Ends, add_band
from .many_model_figures import line_plot, map_of_two
from .site_labels import inside_title, markup, quantity_with_unit, short_names
from .style import BLUE, GREEN, GREY, MOST_LINES, ORANGE, layer_axis, model_name, styled, with_room_for_legend, with_subtitle

if TYPE_CHECKING:
    import xarray

    from ..many.fits import Relation

# Colour of cells without a difference, unlike any colour of the scale.
UNDEFINED = "#c8c8c8"


def difference_figure(array: xarray.DataArray) -> go.Figure:
    """Plot the difference of two runs in one field: curves with bands, or a heat map.

    A dot in a heat map marks an adjusted p-value below 1 minus the confidence level. Cells that are equal in all blocks of the
    data, such as the diagonal of a similarity, are grey.

    Args:
        array: a variable of `difference`, with one or two axes beside `statistic`.

    Raises:
        LayersimError: the array has other axes.
    """
    import xarray

    axes = [str(dim) for dim in array.dims if dim != "statistic"]
    if axes == ["quantity"]:
        raise LayersimError("Headline numbers have no figure, because their units differ. Use `.to_pandas()`.")
    if len(axes) not in (1, 2):
        raise LayersimError(
            f"{array.name!r} has {len(axes)} axes beside `statistic` ({', '.join(axes)}); a figure shows one or two. Choose "
            "one label of each further axis with array.sel(axis=label)."
        )
    about, level = array.attrs, array.attrs.get("level", 0.95)
    models = [model_name(str(about.get(which, which))) for which in ("first", "second")]
    note = f"{models[1]} minus {models[0]}" if models[0] != models[1] else "second run minus first run"
    parts = {name: array.sel(statistic=name, drop=True) for name in array["statistic"].values.tolist()}
    drawn = xarray.Dataset({"value": parts["difference"], "low": parts["low"], "high": parts["high"]})
    drawn["value"].attrs = about | {"long_name": f"Difference: {about.get('long_name', 'Difference')}"}
    # Sites without names stand at relative depths.
    sites = [axis for axis in axes if axis in SITE_AXES and array[axis].dtype.kind not in "if"]
    if len(axes) == 1 or (tuple(axes) not in MATRICES and len(array) <= MOST_LINES):
        fig = line_plot(drawn, axes[-1], sites, MOST_LINES).update_yaxes(ZERO_LINE).update_layout(title_subtitle_text="")
        return with_subtitle(fig, html.escape(f"{note}; band: {100 * level:g} % interval of each point", quote=False))
    drawn = drawn.where((parts["se"] > 0) | (parts["difference"] != 0))
    fig = map_of_two(drawn, (axes[1], axes[0]), sites, about_zero(drawn["value"].values))
    [cells] = fig.data
    dots = np.where(parts["p_adjusted"] < 1 - level, "•", "").tolist()
    numbers = cells.text if cells.text is not None else np.full(np.shape(cells.z), "")
    text = [["<br>".join(filter(None, pair)) for pair in zip(*own, strict=True)] for own in zip(numbers, dots, strict=True)]
    cells.update(text=text, texttemplate="%{text}")
    note += f"; dot: p below {1 - level:.2g} after correction for the number of cells"
    if not bool(drawn["value"].notnull().all()):
        fig.update_layout(plot_bgcolor=UNDEFINED)
        note += "; grey: no block of the data changes it"
    return with_subtitle(fig, html.escape(note, quote=False))


# Maximum number of points with names.
MOST_NAMES = 24


def regression(found: Relation, predictor: str) -> go.Figure:
    """Scatter plot of scores over one predictor, with the fit and its confidence band.

    Args:
        found: a result of `relate`.
        predictor: name of the predictor. Scores are adjusted to the means of the other predictors.
    """
    own, others = found.predictors[predictor], found.predictors.drop(columns=predictor)
    y = found.scores - (others - others.mean()) @ found.coefficients["coefficient"].drop(predictor)
    band, few = found.band(predictor), len(y) <= MOST_NAMES
    fig = go.Figure()
    add_band(fig, band["value"].to_numpy(), Ends(band["low"].to_numpy(), band["high"].to_numpy()), BLUE)
    fig.add_scatter(x=band["value"], y=band["fit"], mode="lines", line={"color": BLUE}, hoverinfo="skip")
    # Names stand above and below neighbouring points in turn, so that fewer overlap.
    fig.add_scatter(
        x=own,
        y=y,
        mode="markers+text" if few else "markers",
        text=[html.escape(str(name)) for name in own.index],
        textposition=["top center" if place % 2 else "bottom center" for place in own.rank(method="first")],
        textfont={"size": 11, "color": GREY},
        marker={"size": 9 if few else 6, "color": ORANGE},
        cliponaxis=False,
        hovertemplate="%{text}<br>%{x:.4g}, %{y:.4g}<extra></extra>",
    )
    fig.update_layout(showlegend=False)
    fig.update_xaxes(title=predictor)
    fig.update_yaxes(title=str(found.scores.name))
    score, *names = (str(name).partition(" (")[0] for name in (found.scores.name, predictor, *others))
    title = f"{score} against {inside_title(names[0])}"
    title += f", given {', '.join(map(inside_title, names[1:]))}" if len(names) > 1 else ""
    p = equation("p", p_value_text(found.coefficients["p_value"][predictor]))
    partial = f"partial r = {found.coefficients['partial'][predictor]:.2f}, " if len(names) > 1 else ""
    note = f"{partial}{p}, R² = {found.r_squared:.2f} of the whole fit, {len(y)} points"
    note += f" · band: {100 * found.confidence:g} % interval of the fit"
    return with_subtitle(styled(fig, title), html.escape(note))


def fit_figure(fit: xarray.Dataset) -> go.Figure:
    """Plot a quantity over depth, with its exponential and its linear fit.

    Untrained models have points and an exponential only.

    In the equations of the legend, l is the depth.

    Args:
        fit: a result of `exponential_fit` without axes other than `weights`.

    Raises:
        LayersimError: the fit has other axes, of which a label must be selected.
    """
    others = [str(dim) for dim in fit["rate"].dims if dim != "weights"]
    if others:
        raise LayersimError(f"The fit has the axes {', '.join(others)}; select one label of each axis for a figure.")
    trained = fit.sel(weights="trained") if "weights" in fit.dims else fit
    [axis] = trained["values"].dims
    sites, depth = tuple(fit[axis].values.tolist()), fit["depth"].values
    x = np.linspace(depth[0], depth[-1], 100)
    fig = go.Figure()

    def draw(one: Any, name: str, points: str, curve: str, symbol: str) -> None:
        a, b = one["amplitude"].item(), one["rate"].item()
        hover = "%{customdata}<br>%{y:.4g}<extra></extra>"
        marker = {"size": 8, "color": points, "symbol": symbol}
        y = one["values"].values
        fig.add_scatter(
            x=depth, y=y, mode="markers", name=name, marker=marker, customdata=list(map(markup, sites)), hovertemplate=hover
        )
        words = f"{a:.4g} exp({b:.4g} l), R² = {one['r_squared'].item():.3f}"
        fig.add_scatter(x=x, y=a * np.exp(b * x), mode="lines", name=words, line={"color": curve}, hoverinfo="skip")

    draw(trained, "measured", BLUE, ORANGE, "circle")
    slope, intercept = trained["slope"].item(), trained["intercept"].item()
    words = f"{intercept:.4g} {'-' if slope < 0 else '+'} {abs(slope):.4g} l"
    words += f", R² = {trained['linear_r_squared'].item():.3f}"
    fig.add_scatter(
        x=x, y=intercept + slope * x, mode="lines", name=words, line={"color": GREY, "dash": "dash"}, hoverinfo="skip"
    )
    if "weights" in fit.dims:
        draw(fit.sel(weights="untrained"), "untrained, mean", GREEN, GREEN, "square-open")
    layer_axis(fig.update_xaxes, sites, "After block")
    # Positions of `layer_axis` are 0, 1, 2, ...; sites stand at their depths.
    fig.update_xaxes(tickvals=[float(depth[at]) for at in fig.layout.xaxis.tickvals])
    about = fit.attrs
    fig.update_yaxes(title=quantity_with_unit(about, "Value"))
    labels = [f"{name} {fit[name].item()}" for name in trained.coords if fit[name].ndim == 0 and name != "weights"]
    title = ", ".join([f"{about.get('long_name', 'Value')} by depth: exponential and line", *labels])
    on = [model_name(str(about["model"])), f"{about['tokens']:,} tokens"] if "model" in about else []
    ends = f"l = {depth[0]:g} at {short_names(sites)[0]}, l = {depth[-1]:g} at {short_names(sites)[-1]}"
    return with_subtitle(with_room_for_legend(styled(fig, title)), html.escape(" · ".join([*on, ends])))
