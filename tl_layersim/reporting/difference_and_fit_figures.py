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
from .site_labels import lower_first_letter, markup, quantity_with_unit, short_names
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
    attributes = array.attrs
    level = attributes.get("level", 0.95)
    first_model = model_name(str(attributes.get("first", "first")))
    second_model = model_name(str(attributes.get("second", "second")))
    note = f"{second_model} minus {first_model}" if first_model != second_model else "second run minus first run"
    statistics = {name: array.sel(statistic=name, drop=True) for name in array["statistic"].values.tolist()}
    drawn = xarray.Dataset({"value": statistics["difference"], "low": statistics["low"], "high": statistics["high"]})
    drawn["value"].attrs = attributes | {"long_name": f"Difference: {attributes.get('long_name', 'Difference')}"}
    # Sites without names stand at relative depths.
    sites = [axis for axis in axes if axis in SITE_AXES and array[axis].dtype.kind not in "if"]
    if len(axes) == 1 or (tuple(axes) not in MATRICES and len(array) <= MOST_LINES):
        fig = line_plot(drawn, axes[-1], sites, MOST_LINES).update_yaxes(ZERO_LINE)
        # The note replaces that of a plot of one run.
        fig.update_layout(title_subtitle_text="")
        return with_subtitle(fig, html.escape(f"{note}; band: {100 * level:g} % interval of each point", quote=False))
    drawn = drawn.where((statistics["se"] > 0) | (statistics["difference"] != 0))
    fig = map_of_two(drawn, (axes[1], axes[0]), sites, about_zero(drawn["value"].values))
    [cells] = fig.data
    dots = np.where(statistics["p_adjusted"] < 1 - level, "•", "").tolist()
    numbers = cells.text if cells.text is not None else np.full(np.shape(cells.z), "")
    texts = []
    for numbers_of_row, dots_of_row in zip(numbers, dots, strict=True):
        cell_parts = zip(numbers_of_row, dots_of_row, strict=True)
        texts.append(["<br>".join(filter(None, parts)) for parts in cell_parts])
    cells.update(text=texts, texttemplate="%{text}")
    note += f"; dot: p below {1 - level:.2g} after correction for the number of cells"
    if not bool(drawn["value"].notnull().all()):
        fig.update_layout(plot_bgcolor=UNDEFINED)
        note += "; grey: no block of the data changes it"
    return with_subtitle(fig, html.escape(note, quote=False))


# Maximum number of points with names.
MOST_NAMES = 24


def regression(relation: Relation, predictor: str) -> go.Figure:
    """Scatter plot of scores over one predictor, with the fit and its confidence band.

    Args:
        relation: a result of `relate`.
        predictor: name of the predictor. Scores are adjusted to the means of the other predictors.
    """
    x = relation.predictors[predictor]
    other_predictors = relation.predictors.drop(columns=predictor)
    slopes_of_others = relation.coefficients["coefficient"].drop(predictor)
    y = relation.scores - (other_predictors - other_predictors.mean()) @ slopes_of_others
    band = relation.band(predictor)
    with_names = len(y) <= MOST_NAMES
    fig = go.Figure()
    add_band(fig, band["value"].to_numpy(), Ends(band["low"].to_numpy(), band["high"].to_numpy()), BLUE)
    fig.add_scatter(x=band["value"], y=band["fit"], mode="lines", line={"color": BLUE}, hoverinfo="skip")
    # Names stand above and below neighbouring points in turn, so that fewer overlap.
    fig.add_scatter(
        x=x,
        y=y,
        mode="markers+text" if with_names else "markers",
        text=[html.escape(str(name)) for name in x.index],
        textposition=["top center" if place % 2 else "bottom center" for place in x.rank(method="first")],
        textfont={"size": 11, "color": GREY},
        marker={"size": 9 if with_names else 6, "color": ORANGE},
        cliponaxis=False,
        hovertemplate="%{text}<br>%{x:.4g}, %{y:.4g}<extra></extra>",
    )
    fig.update_layout(showlegend=False)
    fig.update_xaxes(title=predictor)
    fig.update_yaxes(title=str(relation.scores.name))
    title = f"{_without_unit(relation.scores.name)} against {lower_first_letter(_without_unit(predictor))}"
    note = equation("p", p_value_text(relation.coefficients["p_value"][predictor]))
    if len(other_predictors.columns):
        names = [lower_first_letter(_without_unit(name)) for name in other_predictors]
        title += f", given {', '.join(names)}"
        note = f"partial r = {relation.coefficients['partial'][predictor]:.2f}, {note}"
    note += f", R² = {relation.r_squared:.2f} of the whole fit, {len(y)} points"
    note += f" · band: {100 * relation.confidence:g} % interval of the fit"
    return with_subtitle(styled(fig, title), html.escape(note))


def _without_unit(name: Any) -> str:
    """Name of a quantity without the unit in brackets."""
    return str(name).partition(" (")[0]


def fit_figure(fit: xarray.Dataset) -> go.Figure:
    """Plot a quantity over depth, with its exponential and its linear fit.

    Untrained models have points and an exponential only.

    In the equations of the legend, l is the depth.

    Args:
        fit: a result of `exponential_fit` without axes other than `weights`.

    Raises:
        LayersimError: the fit has other axes, of which a label must be selected.
    """
    further_axes = [str(dim) for dim in fit["rate"].dims if dim != "weights"]
    if further_axes:
        raise LayersimError(f"The fit has the axes {', '.join(further_axes)}; select one label of each axis for a figure.")
    trained = fit.sel(weights="trained") if "weights" in fit.dims else fit
    [axis] = trained["values"].dims
    sites = tuple(fit[axis].values.tolist())
    depth = fit["depth"].values
    x = np.linspace(depth[0], depth[-1], 100)
    fig = go.Figure()

    def draw_points_and_exponential(weights: Any, name: str, point_colour: str, curve_colour: str, symbol: str) -> None:
        fig.add_scatter(
            x=depth,
            y=weights["values"].values,
            mode="markers",
            name=name,
            marker={"size": 8, "color": point_colour, "symbol": symbol},
            customdata=list(map(markup, sites)),
            hovertemplate="%{customdata}<br>%{y:.4g}<extra></extra>",
        )
        amplitude = weights["amplitude"].item()
        rate = weights["rate"].item()
        fig.add_scatter(
            x=x,
            y=amplitude * np.exp(rate * x),
            mode="lines",
            name=f"{amplitude:.4g} exp({rate:.4g} l), R² = {weights['r_squared'].item():.3f}",
            line={"color": curve_colour},
            hoverinfo="skip",
        )

    draw_points_and_exponential(trained, "measured", BLUE, ORANGE, "circle")
    slope = trained["slope"].item()
    intercept = trained["intercept"].item()
    sign = "-" if slope < 0 else "+"
    fig.add_scatter(
        x=x,
        y=intercept + slope * x,
        mode="lines",
        name=f"{intercept:.4g} {sign} {abs(slope):.4g} l, R² = {trained['linear_r_squared'].item():.3f}",
        line={"color": GREY, "dash": "dash"},
        hoverinfo="skip",
    )
    if "weights" in fit.dims:
        untrained = fit.sel(weights="untrained")
        draw_points_and_exponential(untrained, "untrained, mean", GREEN, GREEN, "square-open")
    layer_axis(fig.update_xaxes, sites, "After block")
    # Positions of `layer_axis` are 0, 1, 2, ...; sites stand at their depths.
    fig.update_xaxes(tickvals=[float(depth[position]) for position in fig.layout.xaxis.tickvals])
    attributes = fit.attrs
    fig.update_yaxes(title=quantity_with_unit(attributes, "Value"))
    labels = [f"{name} {fit[name].item()}" for name in trained.coords if fit[name].ndim == 0 and name != "weights"]
    title = ", ".join([f"{attributes.get('long_name', 'Value')} by depth: exponential and line", *labels])
    note = []
    if "model" in attributes:
        note += [model_name(str(attributes["model"])), f"{attributes['tokens']:,} tokens"]
    names = short_names(sites)
    note.append(f"l = {depth[0]:g} at {names[0]}, l = {depth[-1]:g} at {names[-1]}")
    return with_subtitle(with_room_for_legend(styled(fig, title)), html.escape(" · ".join(note)))
