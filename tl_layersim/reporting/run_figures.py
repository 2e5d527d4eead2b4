"""Figures of a field of a labelled table: lines over runs or sites, heat maps, and matrices of runs side by side.

Each takes an `xarray.Dataset` with the variables `value` and, for intervals, `low` and `high`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .colour_scales import ColourScale, about_zero, narrow_scale, scale_within
from .heat_map import HeatMapAxis, heat_map
from .interval_bands import Ends, add_band, cell_hover, intervals_in_words, point_hover
from .lines import with_labelled_ends
from .site_labels import axis_title, inside_title, quantity_with_unit, short_names, site_axis_title, site_words
from .style import (
    CELL_AXIS,
    WIDTH,
    colour_bar,
    layer_axis,
    names_of_models,
    ordered_colours,
    series_look,
    styled,
    turn_labels,
    with_room_for_legend,
    with_subtitle,
)

if TYPE_CHECKING:
    import xarray

# Numbers that span this factor or more stand on a logarithmic axis.
WIDE = 100
# Most lines with a legend, of named runs and of runs or sites in an order; most lines with bands.
MOST_NAMED, MOST_ORDERED, MOST_BANDS = 8, 5, 3
# Most lines that all have their names at their ends.
MOST_ENDS = 14
# Matrices in a row, most ticks of one, and pixels between two and around all.
PER_ROW, MOST_TICKS, BETWEEN, AROUND = 2, 10, 92, 160
# Letters of a label that needs not be turned.
SHORT_LABEL = 3
DEPTH_TITLE = "Relative depth (0: first site, 1: last)"
# Titles of dimensions of sites that say more than "After block".
SIDES = {"row_block": "Jacobian of block", "column_block": "Singular vectors of block"}
STREAM_DIMS = ("residual", "layer", "row", "column", "sublayer", "site")


def line_plot(drawn: xarray.Dataset, over: str, sites: Sequence[str]) -> go.Figure:
    """Lines over one dimension, one for each label of the other.

    Args:
        drawn: over one or two dimensions.
        over: the horizontal one.
        sites: the dimensions whose labels are sites.
    """
    other = next((str(dim) for dim in drawn["value"].dims if dim != over), None)
    depth = drawn.coords.get(f"{over}_depth")
    by_depth = over in sites and depth is not None and other in depth.dims
    if over in sites:
        drawn = drawn.dropna(over, how="all", subset=["value"])
    labels = [] if other is None else drawn[other].values.tolist()
    each = [drawn] if other is None else [drawn.isel({other: number}) for number in range(len(labels))]
    if by_depth:
        each = [one.dropna(over, subset=["value"]) for one in each]
    names = _names(labels, other in sites)
    ordered = other in sites or (bool(labels) and not any(isinstance(label, str) for label in labels))
    legend = len(each) <= (MOST_ORDERED if ordered else MOST_NAMED)
    looks = series_look(len(each), ordered) if legend else [{"colour": c} for c in ordered_colours(len(each))]
    places, ticks = ([], {}) if over in sites else _places(drawn[over].values.tolist())
    fig = go.Figure()
    rows = []
    for one in each:
        x = one[f"{over}_depth"].values.tolist() if by_depth else places or list(range(one.sizes[over]))
        rows.append((x, one["value"].values, _ends(one)))
    if len(each) <= MOST_BANDS:
        for (x, _, ends), look in zip(rows, looks, strict=True):
            if ends is not None:
                add_band(fig, x, ends, look["colour"])
    for one, (x, y, ends), look, name in zip(each, rows, looks, names, strict=True):
        fig.add_scatter(
            x=x,
            y=y,
            name=html.escape(name),
            mode="lines+markers",
            line={"color": look["colour"], "dash": look.get("dash", "solid")},
            marker={"color": look["colour"], "symbol": look.get("symbol", "circle")},
            **point_hover([_text(label) for label in one[over].values.tolist()], ends, html.escape(name)),
        )
    if by_depth:
        fig.update_xaxes(title=DEPTH_TITLE)
    elif over in sites:
        layer_axis(fig.update_xaxes, _labels(drawn, over), _side(drawn, over))
        turn_labels(fig, _labels(drawn, over))
    else:
        fig.update_xaxes(title=axis_title(over), **ticks)
    fig.update_yaxes(title=_words(drawn))
    of_lines = _axis_words(drawn, other, sites) if other is not None and ordered else ""
    styled(fig, _title(drawn, sites, "" if over in sites else over)).update_layout(showlegend=legend and len(each) > 1)
    with_subtitle(fig, html.escape(_note(drawn, intervals_in_words(fig))))
    if legend:
        return with_room_for_legend(fig, of_lines if len(each) > 1 else "")
    # Of more lines in an order than have room, the first, the middle and the last.
    chosen = range(len(rows)) if len(rows) <= MOST_ENDS else (0, len(rows) // 2, len(rows) - 1)
    shown = [(rows[n][0], rows[n][1], names[n], looks[n]["colour"]) for n in chosen]
    return with_labelled_ends(fig, shown, of_lines)


def map_of_two(drawn: xarray.Dataset, over: tuple[str, str], sites: Sequence[str]) -> go.Figure:
    """A heat map of two dimensions.

    Args:
        drawn: over these two.
        over: the horizontal and the vertical one.
        sites: the dimensions whose labels are sites.
    """
    drawn = _pairs(drawn, sites)
    for dim in set(over) & set(sites):
        drawn = drawn.dropna(dim, how="all", subset=["value"])
    drawn = drawn.transpose(over[1], over[0])
    others = [dim for dim in over if dim not in sites]
    by = others[0] if len(others) == 1 else ""
    words = _title(drawn, sites, by), _words(drawn)
    sides = _map_side(drawn, over[1], sites), _map_side(drawn, over[0], sites)
    values, square = drawn["value"].values, not others
    fig = heat_map(values, sides, _scale(values, not square), words, ends=_ends(drawn), decimals=2, square=square)
    # The first layer on top, as in matrices of layers by layers.
    return with_subtitle(fig.update_yaxes(autorange="reversed"), html.escape(_note(drawn, "")))


def matrices(drawn: xarray.Dataset, sides: tuple[str, str], runs: str) -> go.Figure:
    """Heat maps of layers by layers side by side, one for each run, with one colour scale.

    Args:
        drawn: over the sides and runs.
        sides: the dimensions of rows and of columns.
        runs: the dimension of runs.
    """
    drawn = _pairs(drawn, sides).transpose(runs, *sides)
    each = [drawn.isel({runs: number}) for number in range(drawn.sizes[runs])]
    for side in sides:
        each = [one.dropna(side, how="all", subset=["value"]) for one in each]
    scale = _scale(drawn["value"].values, sides[0] in SIDES)
    columns = min(PER_ROW, len(each))
    rows = -(-len(each) // columns)
    plot = rows * (WIDTH - AROUND - BETWEEN * (columns - 1)) / columns + BETWEEN * (rows - 1)
    fig = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=[_run_title(runs, label) for label in drawn[runs].values.tolist()],
        horizontal_spacing=BETWEEN / (WIDTH - AROUND) if columns > 1 else 0,
        vertical_spacing=BETWEEN / plot if rows > 1 else 0,
    )
    fig.update_annotations(font={"size": 13})
    plain = CELL_AXIS | {"constrain": "domain"}
    for number, one in enumerate(each):
        at = {"row": number // columns + 1, "col": number % columns + 1}
        names = [_labels(one, side) for side in sides]
        hover = cell_hover(names[0], names[1], _ends(one), html.escape(_words(drawn), quote=False))
        places = {"x": list(range(len(names[1]))), "y": list(range(len(names[0])))}
        fig.add_trace(go.Heatmap(z=one["value"].values, coloraxis="coloraxis", **places, **hover), **at)
        for update, own, side in zip((fig.update_yaxes, fig.update_xaxes), names, sides, strict=True):
            step = max(1, -(-len(own) // MOST_TICKS))
            ticks = {"tickvals": list(range(0, len(own), step)), "ticktext": short_names(own)[::step], "tickmode": "array"}
            words = site_axis_title(own, _side(one, side))
            update(title=words, tickfont={"size": 10}, tickangle=0, **ticks, **plain, **at)
        if max(map(len, short_names(names[1])), default=0) > SHORT_LABEL:
            fig.update_xaxes(tickangle=-90, **at)
        anchor = fig.get_subplot(at["row"], at["col"]).xaxis.plotly_name.replace("axis", "")
        fig.update_yaxes(autorange="reversed", scaleanchor=anchor, **at)
    bar = colour_bar(_words(drawn)) | {"thickness": 16}
    fig.update_layout(coloraxis=scale.axis() | {"colorbar": bar})
    styled(fig, _title(drawn, sides, ""), height=int(plot + 140))
    with_subtitle(fig, html.escape("; ".join(filter(None, (_note(drawn, ""), scale.note))), quote=False))
    # Room for the names of the runs above their matrices.
    return fig.update_layout(height=fig.layout.height + 20, margin_t=fig.layout.margin.t + 20)


def _pairs(drawn: xarray.Dataset, sides: Sequence[str]) -> xarray.Dataset:
    """The table without what a block and itself give, which is no pair."""
    return drawn.where(drawn["row_block"] != drawn["column_block"]) if set(SIDES) <= set(sides) else drawn


def _scale(values: Any, narrow: bool) -> ColourScale:
    """The colour scale from 0 or, for values that may all be far from it, from the smallest; about 0 for negative values."""
    if narrow:
        return about_zero(values) if np.nanmin(values) < 0 < np.nanmax(values) else narrow_scale(values)
    return scale_within(values, (-math.inf, math.inf))


def _ends(drawn: xarray.Dataset) -> Ends | None:
    return Ends(drawn["low"].values, drawn["high"].values) if "low" in drawn else None


def _map_side(drawn: xarray.Dataset, dim: str, sites: Sequence[str]) -> HeatMapAxis:
    if dim in sites:
        return HeatMapAxis(_labels(drawn, dim), _side(drawn, dim))
    texts = [_text(label) for label in drawn[dim].values.tolist()]
    return HeatMapAxis(tuple(texts), axis_title(dim), texts)


def _places(labels: list[Any]) -> tuple[list[float], dict[str, Any]]:
    """Positions of labels along an axis, and plotly's settings of its ticks.

    Numbers that span a factor of `WIDE` or more have logarithmic positions; 0 then stands half a decade below the smallest
    other number. Names are evenly spaced.
    """
    if any(isinstance(label, str) for label in labels):
        places = list(map(float, range(len(labels))))
        texts = [html.escape(_text(label)) for label in labels]
        return places, {"tickmode": "array", "tickvals": places, "ticktext": texts, "range": [-0.5, len(labels) - 0.5]}
    above = [label for label in labels if label > 0]
    if not above or min(labels) < 0 or max(above) < WIDE * min(above):
        return list(map(float, labels)), {}
    zero = math.log10(min(above)) - 0.5
    places = [math.log10(label) if label > 0 else zero for label in labels]
    decades = range(math.ceil(math.log10(min(above))), math.floor(math.log10(max(above))) + 1)
    marks = ({zero: "0"} if 0 in labels else {}) | {float(decade): _short(10.0**decade) for decade in decades}
    return places, {"tickmode": "array", "tickvals": list(marks), "ticktext": list(marks.values())}


def _short(value: float) -> str:
    """A number as a short text, such as "1k" or "135M"."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _names(labels: list[Any], of_sites: bool) -> list[str]:
    """Names of lines; of a single line none."""
    return (short_names(tuple(labels)) if of_sites else [_text(label) for label in labels]) if labels else [""]


def _run_title(dim: str, label: Any) -> str:
    return html.escape(_text(label) if isinstance(label, str) else f"{axis_title(dim)} {_text(label)}", quote=False)


def _text(label: Any) -> str:
    return label if isinstance(label, str) else f"{label:,}" if isinstance(label, int) else f"{label:g}"


def _labels(drawn: xarray.Dataset, dim: str) -> tuple[str, ...]:
    return tuple(map(str, drawn[dim].values.tolist()))


def _side(drawn: xarray.Dataset, dim: str) -> str:
    """The title of an axis of sites."""
    if dim not in STREAM_DIMS:
        return SIDES.get(dim, axis_title(dim))
    return "After block" if _labels(drawn, dim)[:1] and _labels(drawn, dim)[0].endswith("resid_pre") else "Block"


def _axis_words(drawn: xarray.Dataset, dim: str, sites: Sequence[str]) -> str:
    return site_axis_title(_labels(drawn, dim), _side(drawn, dim)) if dim in sites else axis_title(dim)


def _words(drawn: xarray.Dataset) -> str:
    about = drawn["value"].attrs
    return quantity_with_unit(about, str(about.get("standard_name", "Value")))


def _title(drawn: xarray.Dataset, sites: Sequence[str], by: str) -> str:
    """The title of the field's own figure, or its name, and the horizontal dimension in small letters."""
    about = drawn["value"].attrs
    names = next((_labels(drawn, dim) for dim in sites), ())
    # The title of a field is of its layers, which may have been selected or averaged away.
    words = site_words(names, str((names and about.get("description")) or about.get("long_name", "Value")))
    return html.escape(words + (f", by {inside_title(axis_title(by).partition(' (')[0])}" if by else ""))


def _note(drawn: xarray.Dataset, more: str) -> str:
    """The model and the number of tokens that all runs share, the labels that were selected, and further words."""
    about = drawn.attrs
    models = names_of_models(str(about.get("model", "")))
    data = f"{about['tokens']:,} tokens" if "tokens" in about else "different data" if about else ""
    selected = [
        f"{str(name).replace('_', ' ')} {_text(coordinate.item())}"
        for name, coordinate in drawn.coords.items()
        if not coordinate.dims and not str(name).endswith("_depth")
    ]
    return " · ".join(filter(None, [" and ".join(models), data, *selected, more]))
