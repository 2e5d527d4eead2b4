"""Figures of many models: lines, heat maps, dendrograms, group means and stitches.

Figures of a labelled table take an `xarray.Dataset` with the variables `value` and, for intervals, `low` and `high`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from ..core.report_tables import LAYER_AXES
from ..core.wording import equation, number_text, p_value_text
from .heat_map import MATRICES, ColourScale, HeatMapAxis, about_zero, heat_map, narrow_scale, scale_within
from .lines_and_bars import ZERO_LINE, Ends, Series, layer_title, lines
from .site_labels import axis_title, inside_title, quantity_with_unit, short_names, site_axis_title, site_words
from .style import (
    DARK,
    DASHES,
    GREY,
    PALETTE,
    SYMBOLS,
    intervals_in_words,
    names_of_models,
    series_look,
    styled,
    with_room_for_legend,
    with_subtitle,
)

if TYPE_CHECKING:
    import xarray

# Numbers that span this factor get a logarithmic axis.
WIDE = 100
# Maximum number of lines with bands.
MOST_BANDS = 3
# The two sides of a matrix of Jacobians.
JACOBIANS = {"row_block", "column_block"}


def line_plot(drawn: xarray.Dataset, over: str, sites: Sequence[str], most_bands: int = MOST_BANDS) -> go.Figure:
    """Line plot of a table over dimension `over`, with a line for each label of its other dimension.

    Args:
        drawn: table over one or two dimensions.
        over: the horizontal dimension.
        sites: the dimensions whose labels are names of sites.
        most_bands: most lines with bands.
    """
    other = next((str(dim) for dim in drawn["value"].dims if dim != over), None)
    depth = drawn.coords.get(f"{over}_depth")
    by_depth = over in sites and depth is not None and other in depth.dims
    labels = () if other is None else _labels(drawn, other)
    each = [drawn] if other is None else [drawn.isel({other: number}) for number in range(len(labels))]
    if by_depth:
        each = [one.dropna(over, subset=["value"]) for one in each]
    ordered = other in sites or not all(isinstance(label, str) for label in labels)
    names = short_names(labels) if other in sites else list(map(_text, labels))
    series = [
        Series(
            html.escape(name),
            one["value"].values,
            _ends(one),
            **look,
            names=tuple(map(_text, _labels(one, over))),
            x=one[f"{over}_depth"].values if by_depth else None,
        )
        for one, name, look in zip(each, names or [""], series_look(len(each), ordered), strict=True)
    ]
    places, ticks = (_labels(drawn, over), {}) if over in sites else _places(_labels(drawn, over))
    axis = _axis(over, sites)
    if by_depth:
        places, axis = max((tuple(one.x) for one in series), key=len), "relative_depth"
    title = html.escape(_title(drawn, sites, "" if over in LAYER_AXES or over in sites else over))
    fig = lines(places, series, title, _words(drawn), axis, most_bands=most_bands, joined=True)
    fig.update_xaxes(**ticks).update_yaxes(rangemode="normal")
    with_subtitle(fig, html.escape(_note(drawn, intervals_in_words(fig))))
    words = "" if other is None or not ordered or len(each) < 2 else layer_title(labels, _axis(other, sites))
    return with_room_for_legend(fig, site_axis_title(labels, words) if other in sites else words)


def map_of_two(
    drawn: xarray.Dataset, over: tuple[str, str], sites: Sequence[str], scale: ColourScale | None = None
) -> go.Figure:
    """Heat map over two dimensions of a table.

    Args:
        drawn: table over two dimensions.
        over: the horizontal and the vertical dimension.
        sites: the dimensions whose labels are names of sites.
        scale: the colour scale; None for one that fits the values.
    """
    drawn = _without_self_coupling(drawn, sites)
    # A given scale is the scale of differences, which are shown at all sites.
    for dim in set(over) & set(sites) if scale is None else ():
        drawn = drawn.dropna(dim, how="all", subset=["value"])
    drawn = drawn.transpose(over[1], over[0])
    others = [dim for dim in over if dim not in sites]
    square = not others or over[::-1] in MATRICES
    by = others[0] if len(others) == 1 else ""
    words = html.escape(_title(drawn, sites, by)), _words(drawn)
    sides = _map_side(drawn, over[1], sites), _map_side(drawn, over[0], sites)
    values = drawn["value"].values
    scale = scale or _scale(values, bool(others))
    fig = heat_map(values, sides, scale, words, ends=_ends(drawn), decimals=2, square=square)
    # The first layer on top, as in matrices of layers by layers.
    return with_subtitle(fig.update_yaxes(autorange="reversed"), html.escape(_note(drawn, "")))


def matrices(drawn: xarray.Dataset, sides: tuple[str, str], runs: str) -> tuple[list[go.Figure], str]:
    """Draw a heat map of layers by layers for each run; also return a title for all heat maps.

    All have one colour scale.

    Args:
        drawn: table over `sides` and `runs`.
        sides: the dimensions of rows and of columns.
        runs: the dimension of runs.
    """
    drawn = _without_self_coupling(drawn, sides).transpose(runs, *sides)
    scale = _scale(drawn["value"].values, sides[0] in JACOBIANS)
    figures = []
    for number, label in enumerate(drawn[runs].values.tolist()):
        one = drawn.isel({runs: number})
        for side in sides:
            one = one.dropna(side, how="all", subset=["value"])
        words = label if isinstance(label, str) else f"{axis_title(runs)} {_text(label)}"
        axes = (_map_side(one, sides[0], sides), _map_side(one, sides[1], sides))
        figures.append(heat_map(one["value"].values, axes, scale, (html.escape(words), _words(drawn)), ends=_ends(one)))
    return figures, " · ".join(filter(None, (_title(drawn, sides, ""), _note(drawn, ""), scale.note)))


def _without_self_coupling(drawn: xarray.Dataset, sides: Sequence[str]) -> xarray.Dataset:
    """Set the coupling of each block with itself to NaN; leave other tables unchanged."""
    return drawn.where(drawn["row_block"] != drawn["column_block"]) if set(sides) >= JACOBIANS else drawn


def _scale(values: Any, narrow: bool) -> ColourScale:
    """Colour scale from 0, or from the smallest value if `narrow`.

    A narrow scale of values of both signs is centred at 0.
    """
    if narrow:
        return about_zero(values) if np.nanmin(values) < 0 < np.nanmax(values) else narrow_scale(values)
    return scale_within(values, (-math.inf, math.inf))


def _ends(drawn: xarray.Dataset) -> Ends | None:
    return Ends(drawn["low"].values, drawn["high"].values) if "low" in drawn else None


def _map_side(drawn: xarray.Dataset, dim: str, sites: Sequence[str]) -> HeatMapAxis:
    labels, axis = _labels(drawn, dim), _axis(dim, sites)
    if dim in sites:
        return HeatMapAxis(labels, layer_title(labels, axis))
    texts = [f"{label:.2f}" if axis == "relative_depth" else _text(label) for label in labels]
    return HeatMapAxis(tuple(texts), layer_title(labels, axis), texts)


def _axis(dim: str, sites: Sequence[str]) -> str:
    """Convert a dimension of a table to an axis name, such as "site" or "relative_depth".

    A dimension of layers without site names has relative depths.
    """
    if dim in LAYER_AXES:
        return dim if dim in sites else "relative_depth"
    return "site" if dim in sites else dim


def _places(labels: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positions of labels along an axis, and plotly's tick settings.

    Numbers that span a factor of `WIDE` or more have logarithmic positions; 0 then stands half a decade below the smallest
    other number. Names stay names.
    """
    if any(isinstance(label, str) for label in labels):
        return tuple(map(_text, labels)), {}
    above = [label for label in labels if label > 0]
    if not above or min(labels) < 0 or max(above) < WIDE * min(above):
        return tuple(map(float, labels)), {}
    zero = math.log10(min(above)) - 0.5
    places = tuple(math.log10(label) if label > 0 else zero for label in labels)
    decades = range(math.ceil(math.log10(min(above))), math.floor(math.log10(max(above))) + 1)
    marks = ({zero: "0"} if 0 in labels else {}) | {float(decade): _short(10.0**decade) for decade in decades}
    return places, {"tickmode": "array", "tickvals": list(marks), "ticktext": list(marks.values())}


def _short(value: float) -> str:
    """Number as a short text, such as "1k" or "135M"."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _text(label: Any) -> str:
    return label if isinstance(label, str) else f"{label:,}" if isinstance(label, int) else f"{label:.4g}"


def _labels(drawn: xarray.Dataset, dim: str) -> tuple[Any, ...]:
    return tuple(drawn[dim].values.tolist())


def _words(drawn: xarray.Dataset) -> str:
    about = drawn["value"].attrs
    return quantity_with_unit(about, str(about.get("standard_name", "Value")))


def _title(drawn: xarray.Dataset, sites: Sequence[str], by: str) -> str:
    """Title of a figure, such as "Effective rank, by model" if dimension `by` is "model"."""
    about = drawn["value"].attrs
    names = next((_labels(drawn, dim) for dim in sites), ())
    # A field's title is about its layers, which a selection or a mean may have removed.
    words = site_words(names, str((names and about.get("description")) or about.get("long_name", "Value")))
    return words + (f", by {inside_title(axis_title(by).partition(' (')[0])}" if by else "")


def _note(drawn: xarray.Dataset, more: str) -> str:
    """Note below a title: model, tokens, selected labels and further words."""
    about = drawn.attrs
    models = names_of_models(str(about.get("model", "")))
    data = f"{about['tokens']:,} tokens" if "tokens" in about else "different data" if about else ""
    selected = [
        f"{str(name).replace('_', ' ')} {_text(coordinate.item())}"
        for name, coordinate in drawn.coords.items()
        if not coordinate.dims and not str(name).endswith("_depth")
    ]
    return " · ".join(filter(None, [" and ".join(models), data, *selected, more]))


# Distances of a model to itself are 0 up to this rounding error.
OWN_DISTANCE = 1e-9
# Longest upright names below a heat map; most letters side by side below a dendrogram.
UPRIGHT, ACROSS = 2, 70


def clusters(distances: Any) -> Any:
    """Average-linkage clustering of models (`merge 4`) in scipy's linkage format.

    The distance between two models is the mean over both directions, after negative distances are set to 0.

    Args:
        distances: array `model model`.
    """
    from scipy.cluster.hierarchy import linkage

    above = np.clip(distances, 0, None)
    both = (above + above.T) / 2
    return linkage(both[np.triu_indices(len(both), 1)], method="average", optimal_ordering=True)


def model_heatmap(grid: Any, title: str, quantity: str, ends: Ends | None = None) -> go.Figure:
    """Heat map of distances between models, with similar models side by side.

    Names have the colours of their groups.

    Args:
        grid: a `ModelGrid`.
        title: title of the figure.
        quantity: title of the colour bar.
        ends: ends of the confidence intervals; None without intervals.
    """
    from scipy.cluster.hierarchy import leaves_list

    values = grid.values.numpy()
    known = bool(np.isfinite(values[~np.eye(len(values), dtype=bool)]).all())
    order = leaves_list(clusters(values)) if known else np.arange(len(values))
    values, ends = values[order][:, order], ends and ends.at(np.ix_(order, order))
    names = tuple(grid.models[n] for n in order)
    groups = [grid.groups[n] for n in order] if grid.groups else []
    scale = about_zero(values) if np.nanmin(values) < -OWN_DISTANCE else scale_within(values, (-math.inf, math.inf))
    side = HeatMapAxis(names, "Model", list(names))
    fig = heat_map(values, (side, side), scale, (title, quantity), ends=ends, decimals=2)
    ticks = {"tickvals": list(range(len(names))), "ticktext": _coloured(names, groups)}
    fig.update_xaxes(tickangle=-90 if max(map(len, names)) > UPRIGHT else 0, **ticks).update_yaxes(**ticks)
    return styled(_with_groups(fig, groups), title)


def tree_of_models(array: xarray.DataArray, names: Sequence[str], groups: Sequence[str]) -> go.Figure:
    """Dendrogram of models; links within a group have the colour of the group.

    Args:
        array: distances `model model`, finite off the diagonal.
        names: names of the models.
        groups: group of each model; empty if there are no groups.
    """
    from scipy.cluster.hierarchy import dendrogram

    merges = clusters(array.values)
    below = [{group} for group in groups or [""] * len(names)]
    for first, second in merges[:, :2].astype(int):
        below.append(below[first] | below[second])
    colours = [_colours(groups).get("".join(one), GREY) if len(one) == 1 else GREY for one in below]
    drawn = dendrogram(merges, no_plot=True, link_color_func=lambda n: colours[n])
    fig = go.Figure()
    for x, y, colour in zip(drawn["icoord"], drawn["dcoord"], drawn["color_list"], strict=True):
        fig.add_scatter(x=x, y=y, mode="lines", line={"color": colour, "width": 2}, hoverinfo="y", showlegend=False)
    order = drawn["leaves"]
    ticktext = _coloured([names[n] for n in order], [groups[n] for n in order] if groups else [])
    # Leaves stand at 5, 15, 25, ...
    places = {"tickmode": "array", "tickvals": [10 * n + 5 for n in range(len(names))], "range": [0, 10 * len(names)]}
    turned = -45 if sum(len(name) + 2 for name in names) > ACROSS else 0
    fig.update_xaxes(title="Model", ticktext=ticktext, tickangle=turned, showgrid=False, **places)
    fig.update_yaxes(title=quantity_with_unit(array.attrs, "Distance"), rangemode="tozero")
    fig = styled(_with_groups(fig, groups), "Dendrogram of the models")
    return with_subtitle(fig, "directions below 0 count as 0" if bool((array < -OWN_DISTANCE).any()) else "")


def group_figure(found: xarray.Dataset) -> go.Figure:
    """Plot mean distances within and between groups of models, with one standard deviation.

    Drawn as lines over sites with bands, or as points with whiskers.

    A mean within a group has the colour of the group; a mean between groups is dark or grey.

    Args:
        found: the result of `compare_groups`.
    """
    # The first two comparisons are of all groups together.
    found = found.isel(comparison=slice(2, None)).transpose("comparison", ...)
    names, firsts, seconds = (found[one].values.tolist() for one in ("comparison", "first_group", "second_group"))
    further = [str(dim) for dim in found["mean"].dims[1:]]
    mean, sd = found["mean"].values, found["sd"].fillna(0).values
    labels = tuple(map(str, found[further[0]].values)) if further else tuple(names)
    # Stitch points that join different layers of two models are numbered.
    joined = any("," in label for label in labels) and bool(further)
    if joined:
        labels = tuple(str(n + 1) for n in range(len(labels)))
    if not further:
        mean = np.where(np.eye(len(names), dtype=bool), mean, np.nan)
    colours, series, between = _colours(firsts + seconds), [], 0
    for n, name in enumerate(names):
        within = firsts[n] == seconds[n]
        between += not within
        colour, look = (colours[firsts[n]], 0) if within else ((DARK, GREY)[between % 2], between)
        dash, symbol = DASHES[look % len(DASHES)], SYMBOLS[look % len(SYMBOLS)]
        series.append(Series(html.escape(name), mean[n], Ends(mean[n] - sd[n], mean[n] + sd[n]), colour, symbol, dash))
    title = f"{found['mean'].attrs.get('long_name', 'Distance')} within and between groups"
    fig = lines(labels, series, title, quantity_with_unit(found["mean"].attrs, "Distance"), "site" if further else "comparison")
    fig.update_layout(showlegend=bool(further)).update_yaxes(rangemode="normal")
    if joined:
        fig.update_xaxes(title="Stitch point")
    if further:
        return with_subtitle(with_room_for_legend(fig), "Bands: standard deviation over pairs of models")
    p, drawn = equation("p", p_value_text(float(found["p_value"]))), "" if found.attrs["exact"] else "random "
    test = f"{float(found['difference']):.3g}, {html.escape(p)} ({found.attrs['relabelings']:,} {drawn}relabelings, "
    test += f"smallest possible {number_text(float(found['smallest_p']))})"
    return with_subtitle(fig, f"Whiskers: standard deviation over pairs of models. Difference of means {test}")


def _coloured(names: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Model names as HTML spans in the colours of their groups."""
    colours = _colours(groups)
    shown = zip(map(html.escape, names), groups or [""] * len(names), strict=True)
    return [f'<span style="color:{colours[group]}">{name}</span>' if group in colours else name for name, group in shown]


def _colours(groups: Sequence[str]) -> dict[str, str]:
    # By name, so that a group has the same colour in all figures.
    return {group: PALETTE[n % len(PALETTE)] for n, group in enumerate(sorted(set(groups)))}


def _with_groups(fig: go.Figure, groups: Sequence[str]) -> go.Figure:
    """Add a legend of the groups, if there are any."""
    for group, colour in _colours(groups).items():
        marker = {"color": colour, "size": 10, "symbol": "square"}
        # Dark pages find these colours by `meta`, and change them with the tick labels.
        entry = {"name": html.escape(group), "marker": marker, "showlegend": True, "meta": "tick labels"}
        fig.add_scatter(x=[None], y=[None], mode="markers", **entry)
    # A click on this legend would hide nothing.
    return fig.update_layout(showlegend=bool(groups), legend={"itemclick": False, "itemdoubleclick": False})


def stitch_lines(
    values: Any, low: Any, high: Any, names: tuple[str, ...], seams: tuple[str, ...], titles: tuple[str, str]
) -> go.Figure:
    """Line plot over stitch points, with a line for each pair of stitched models.

    Each direction between two models has its own colour; self-stitches are dashed and grey.

    Args:
        values: `front back point`.
        low: lower ends of the intervals.
        high: upper ends of the intervals.
        names: names of the models.
        seams: names of the stitch points.
        titles: titles of the figure and of the vertical axis.
    """
    pairs, own = list(permutations(range(len(names)), 2)), [(n, n) for n in range(len(names))]
    looks = series_look(len(pairs), ordered=False)
    looks += [{"colour": GREY, "symbol": SYMBOLS[n % len(SYMBOLS)], "dash": DASHES[1 + n % 3]} for n, _ in own]
    series = []
    for pair, look in zip(pairs + own, looks, strict=True):
        ends = Ends(low, high).at(pair)
        # A field without intervals has equal ends.
        known = ends if bool((ends.low < ends.high).any()) else None
        label = html.escape(" into ".join(names[n] for n in pair))
        series.append(Series(label, values[pair], known, **look, names=seams))
    joined = any("," in seam for seam in seams)
    places = tuple(", ".join(short_names(tuple(map(str.strip, seam.split(","))))) for seam in seams) if joined else seams
    fig = lines(places, series, *titles, "seam" if joined else "site").update_yaxes(ZERO_LINE)
    if joined:
        fig.update_xaxes(title="Stitch point (blocks of front, back)")
    return with_room_for_legend(fig)
