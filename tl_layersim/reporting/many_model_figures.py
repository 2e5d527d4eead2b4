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
from .site_labels import axis_title, lower_first_letter, quantity_with_unit, short_names, site_axis_title, site_words
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
    line_dim = next((str(dim) for dim in drawn["value"].dims if dim != over), None)
    depth = drawn.coords.get(f"{over}_depth")
    # Sites of models of different depth stand at relative depths, which differ from line to line.
    by_depth = over in sites and depth is not None and line_dim in depth.dims
    labels = () if line_dim is None else _labels(drawn, line_dim)
    tables = [drawn] if line_dim is None else [drawn.isel({line_dim: number}) for number in range(len(labels))]
    if by_depth:
        tables = [table.dropna(over, subset=["value"]) for table in tables]
    ordered = line_dim in sites or not all(isinstance(label, str) for label in labels)
    names = short_names(labels) if line_dim in sites else list(map(_text, labels))
    series = []
    for table, name, look in zip(tables, names or [""], series_look(len(tables), ordered), strict=True):
        names_of_points = tuple(map(_text, _labels(table, over)))
        x = table[f"{over}_depth"].values if by_depth else None
        series.append(Series(html.escape(name), table["value"].values, _ends(table), **look, names=names_of_points, x=x))
    places = _labels(drawn, over)
    ticks: dict[str, Any] = {}
    if over not in sites:
        places, ticks = _places(places)
    axis = _axis(over, sites)
    if by_depth:
        places = max((tuple(line.x) for line in series), key=len)
        axis = "relative_depth"
    title = html.escape(_title(drawn, sites, "" if over in LAYER_AXES or over in sites else over))
    fig = lines(places, series, title, _quantity(drawn), axis, most_bands=most_bands, joined=True)
    fig.update_xaxes(**ticks).update_yaxes(rangemode="normal")
    with_subtitle(fig, html.escape(_note(drawn, intervals_in_words(fig))))
    legend_title = ""
    if line_dim is not None and ordered and len(tables) > 1:
        legend_title = layer_title(labels, _axis(line_dim, sites))
    if line_dim in sites:
        legend_title = site_axis_title(labels, legend_title)
    return with_room_for_legend(fig, legend_title)


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
    if scale is None:
        for dim in set(over) & set(sites):
            drawn = drawn.dropna(dim, how="all", subset=["value"])
    columns, rows = over
    drawn = drawn.transpose(rows, columns)
    dims_without_sites = [dim for dim in over if dim not in sites]
    square = not dims_without_sites or (rows, columns) in MATRICES
    by = dims_without_sites[0] if len(dims_without_sites) == 1 else ""
    titles = (html.escape(_title(drawn, sites, by)), _quantity(drawn))
    sides = (_map_side(drawn, rows, sites), _map_side(drawn, columns, sites))
    values = drawn["value"].values
    scale = scale or _scale(values, bool(dims_without_sites))
    fig = heat_map(values, sides, scale, titles, ends=_ends(drawn), decimals=2, square=square)
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
        table = drawn.isel({runs: number})
        for side in sides:
            table = table.dropna(side, how="all", subset=["value"])
        title = label if isinstance(label, str) else f"{axis_title(runs)} {_text(label)}"
        titles = (html.escape(title), _quantity(drawn))
        rows_and_columns = (_map_side(table, sides[0], sides), _map_side(table, sides[1], sides))
        figures.append(heat_map(table["value"].values, rows_and_columns, scale, titles, ends=_ends(table)))
    parts_of_title = [_title(drawn, sides, ""), _note(drawn, ""), scale.note]
    return figures, " · ".join(filter(None, parts_of_title))


def _without_self_coupling(drawn: xarray.Dataset, sides: Sequence[str]) -> xarray.Dataset:
    """Set the coupling of each block with itself to NaN; leave other tables unchanged."""
    if not set(sides) >= JACOBIANS:
        return drawn
    return drawn.where(drawn["row_block"] != drawn["column_block"])


def _scale(values: Any, narrow: bool) -> ColourScale:
    """Colour scale from 0, or from the smallest value if `narrow`.

    A narrow scale of values of both signs is centred at 0.
    """
    if not narrow:
        return scale_within(values, (-math.inf, math.inf))
    if np.nanmin(values) < 0 < np.nanmax(values):
        return about_zero(values)
    return narrow_scale(values)


def _ends(drawn: xarray.Dataset) -> Ends | None:
    return Ends(drawn["low"].values, drawn["high"].values) if "low" in drawn else None


def _map_side(drawn: xarray.Dataset, dim: str, sites: Sequence[str]) -> HeatMapAxis:
    labels = _labels(drawn, dim)
    axis = _axis(dim, sites)
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
    positive = [label for label in labels if label > 0]
    if not positive or min(labels) < 0 or max(positive) < WIDE * min(positive):
        return tuple(map(float, labels)), {}
    place_of_zero = math.log10(min(positive)) - 0.5
    places = tuple(math.log10(label) if label > 0 else place_of_zero for label in labels)
    texts_by_place = {place_of_zero: "0"} if 0 in labels else {}
    first_decade = math.ceil(math.log10(min(positive)))
    last_decade = math.floor(math.log10(max(positive)))
    for decade in range(first_decade, last_decade + 1):
        texts_by_place[float(decade)] = _short(10.0**decade)
    return places, {
        "tickmode": "array",
        "tickvals": list(texts_by_place),
        "ticktext": list(texts_by_place.values()),
    }


def _short(value: float) -> str:
    """Number as a short text, such as "1k" or "135M"."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _text(label: Any) -> str:
    if isinstance(label, str):
        return label
    return f"{label:,}" if isinstance(label, int) else f"{label:.4g}"


def _labels(drawn: xarray.Dataset, dim: str) -> tuple[Any, ...]:
    return tuple(drawn[dim].values.tolist())


def _quantity(drawn: xarray.Dataset) -> str:
    attributes = drawn["value"].attrs
    return quantity_with_unit(attributes, str(attributes.get("standard_name", "Value")))


def _title(drawn: xarray.Dataset, sites: Sequence[str], by: str) -> str:
    """Title of a figure, such as "Effective rank, by model" if dimension `by` is "model"."""
    attributes = drawn["value"].attrs
    names = next((_labels(drawn, dim) for dim in sites), ())
    # A field's title is about its layers, which a selection or a mean may have removed.
    description = attributes.get("description") if names else None
    title = site_words(names, str(description or attributes.get("long_name", "Value")))
    if by:
        title += f", by {lower_first_letter(axis_title(by).partition(' (')[0])}"
    return title


def _note(drawn: xarray.Dataset, further_words: str) -> str:
    """Note below a title: model, tokens, selected labels and further words."""
    attributes = drawn.attrs
    models = names_of_models(str(attributes.get("model", "")))
    data = ""
    if "tokens" in attributes:
        data = f"{attributes['tokens']:,} tokens"
    elif attributes:
        data = "different data"
    # A selected label stays as a coordinate without a dimension.
    selected = []
    for name, coordinate in drawn.coords.items():
        if not coordinate.dims and not str(name).endswith("_depth"):
            selected.append(f"{str(name).replace('_', ' ')} {_text(coordinate.item())}")
    return " · ".join(filter(None, [" and ".join(models), data, *selected, further_words]))


# Distances of a model to itself are 0 up to this rounding error.
OWN_DISTANCE = 1e-9
# Longest upright names below a heat map.
UPRIGHT = 2
# Most letters side by side below a dendrogram.
ACROSS = 70


def clusters(distances: Any) -> Any:
    """Average-linkage clustering of models (`merge 4`) in scipy's linkage format.

    The distance between two models is the mean over both directions, after negative distances are set to 0.

    Args:
        distances: array `model model`.
    """
    from scipy.cluster.hierarchy import linkage

    distances = np.clip(distances, 0, None)
    symmetric = (distances + distances.T) / 2
    return linkage(symmetric[np.triu_indices(len(symmetric), 1)], method="average", optimal_ordering=True)


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
    off_diagonal = values[~np.eye(len(values), dtype=bool)]
    # Only distances that are all known can be clustered.
    order = leaves_list(clusters(values)) if bool(np.isfinite(off_diagonal).all()) else np.arange(len(values))
    values = values[order][:, order]
    if ends is not None:
        ends = ends.at(np.ix_(order, order))
    names = tuple(grid.models[n] for n in order)
    groups = [grid.groups[n] for n in order] if grid.groups else []
    scale = about_zero(values) if np.nanmin(values) < -OWN_DISTANCE else scale_within(values, (-math.inf, math.inf))
    side = HeatMapAxis(names, "Model", list(names))
    fig = heat_map(values, (side, side), scale, (title, quantity), ends=ends, decimals=2)
    ticks = {"tickvals": list(range(len(names))), "ticktext": _coloured_names(names, groups)}
    fig.update_xaxes(tickangle=-90 if max(map(len, names)) > UPRIGHT else 0, **ticks)
    fig.update_yaxes(**ticks)
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
    # Groups of the models below each node: first the models, then the merges, as scipy numbers them.
    groups_below = [{group} for group in groups or [""] * len(names)]
    for first, second in merges[:, :2].astype(int):
        groups_below.append(groups_below[first] | groups_below[second])
    colours = []
    for groups_of_node in groups_below:
        group = "".join(groups_of_node) if len(groups_of_node) == 1 else None
        colours.append(GREY if group is None else _colours(groups).get(group, GREY))
    tree = dendrogram(merges, no_plot=True, link_color_func=lambda node: colours[node])
    fig = go.Figure()
    for x, y, colour in zip(tree["icoord"], tree["dcoord"], tree["color_list"], strict=True):
        fig.add_scatter(x=x, y=y, mode="lines", line={"color": colour, "width": 2}, hoverinfo="y", showlegend=False)
    order = tree["leaves"]
    fig.update_xaxes(
        title="Model",
        ticktext=_coloured_names([names[n] for n in order], [groups[n] for n in order] if groups else []),
        tickangle=-45 if sum(len(name) + 2 for name in names) > ACROSS else 0,
        showgrid=False,
        tickmode="array",
        # scipy places leaves at 5, 15, 25, ...
        tickvals=[10 * n + 5 for n in range(len(names))],
        range=[0, 10 * len(names)],
    )
    fig.update_yaxes(title=quantity_with_unit(array.attrs, "Distance"), rangemode="tozero")
    fig = styled(_with_groups(fig, groups), "Dendrogram of the models")
    return with_subtitle(fig, "directions below 0 count as 0" if bool((array < -OWN_DISTANCE).any()) else "")


def group_figure(comparison: xarray.Dataset) -> go.Figure:
    """Plot mean distances within and between groups of models, with one standard deviation.

    Drawn as lines over sites with bands, or as points with whiskers.

    A mean within a group has the colour of the group; a mean between groups is dark or grey.

    Args:
        comparison: the result of `compare_groups`.
    """
    # The first two comparisons are of all groups together.
    comparison = comparison.isel(comparison=slice(2, None)).transpose("comparison", ...)
    names = comparison["comparison"].values.tolist()
    first_groups = comparison["first_group"].values.tolist()
    second_groups = comparison["second_group"].values.tolist()
    mean = comparison["mean"].values
    sd = comparison["sd"].fillna(0).values
    dims_of_sites = [str(dim) for dim in comparison["mean"].dims[1:]]
    over_sites = bool(dims_of_sites)
    labels = tuple(map(str, comparison[dims_of_sites[0]].values)) if over_sites else tuple(names)
    # Stitch points that join different layers of two models are numbered.
    numbered = over_sites and any("," in label for label in labels)
    if numbered:
        labels = tuple(str(n + 1) for n in range(len(labels)))
    if not over_sites:
        # One point for each series.
        mean = np.where(np.eye(len(names), dtype=bool), mean, np.nan)
    colours = _colours(first_groups + second_groups)
    series = []
    pairs_of_groups = 0
    for n, name in enumerate(names):
        if first_groups[n] == second_groups[n]:
            colour = colours[first_groups[n]]
            look = 0
        else:
            pairs_of_groups += 1
            colour = (DARK, GREY)[pairs_of_groups % 2]
            look = pairs_of_groups
        dash = DASHES[look % len(DASHES)]
        symbol = SYMBOLS[look % len(SYMBOLS)]
        series.append(Series(html.escape(name), mean[n], Ends(mean[n] - sd[n], mean[n] + sd[n]), colour, symbol, dash))
    attributes = comparison["mean"].attrs
    title = f"{attributes.get('long_name', 'Distance')} within and between groups"
    quantity = quantity_with_unit(attributes, "Distance")
    fig = lines(labels, series, title, quantity, "site" if over_sites else "comparison")
    fig.update_layout(showlegend=over_sites).update_yaxes(rangemode="normal")
    if numbered:
        fig.update_xaxes(title="Stitch point")
    if over_sites:
        return with_subtitle(with_room_for_legend(fig), "Bands: standard deviation over pairs of models")
    p = html.escape(equation("p", p_value_text(float(comparison["p_value"]))))
    relabelings = "relabelings" if comparison.attrs["exact"] else "random relabelings"
    test = f"{float(comparison['difference']):.3g}, {p} ({comparison.attrs['relabelings']:,} {relabelings}, "
    test += f"smallest possible {number_text(float(comparison['smallest_p']))})"
    return with_subtitle(fig, f"Whiskers: standard deviation over pairs of models. Difference of means {test}")


def _coloured_names(names: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Model names as HTML spans in the colours of their groups."""
    colours = _colours(groups)
    spans = []
    for name, group in zip(names, groups or [""] * len(names), strict=True):
        text = html.escape(name)
        spans.append(f'<span style="color:{colours[group]}">{text}</span>' if group in colours else text)
    return spans


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
    pairs = list(permutations(range(len(names)), 2))
    looks = series_look(len(pairs), ordered=False)
    for n in range(len(names)):
        pairs.append((n, n))
        # Not the first dash, which is a solid line.
        looks.append({"colour": GREY, "symbol": SYMBOLS[n % len(SYMBOLS)], "dash": DASHES[1 + n % 3]})
    series = []
    for pair, look in zip(pairs, looks, strict=True):
        ends = Ends(low, high).at(pair)
        # A field without intervals has equal ends.
        has_intervals = bool((ends.low < ends.high).any())
        label = html.escape(" into ".join(names[n] for n in pair))
        series.append(Series(label, values[pair], ends if has_intervals else None, **look, names=seams))
    # A stitch point that joins different layers of the models names the layer of each.
    layers_differ = any("," in seam for seam in seams)
    places = seams
    if layers_differ:
        places = tuple(_short_seam(seam) for seam in seams)
    fig = lines(places, series, *titles, "seam" if layers_differ else "site").update_yaxes(ZERO_LINE)
    if layers_differ:
        fig.update_xaxes(title="Stitch point (blocks of front, back)")
    return with_room_for_legend(fig)


def _short_seam(seam: str) -> str:
    """Label of a stitch point that names the layer of each model, with short names of the layers."""
    layers = tuple(layer.strip() for layer in seam.split(","))
    return ", ".join(short_names(layers))
