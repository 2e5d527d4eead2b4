"""Figures of many models: heat map of models by models, dendrogram, and distances within and between groups."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from .colour_scales import MOST_NUMBERS, about_zero, on_cells, scale_within
from .interval_bands import Ends, cell_hover, hover_texts, point_hover, whiskers
from .matrix import square_cells
from .style import (
    BLUE,
    DARK,
    DASHES,
    GREEN,
    GREY,
    ORANGE,
    PALETTE,
    PURPLE,
    SYMBOLS,
    WIDTH,
    colour_bar,
    layer_axis,
    styled,
    turn_labels,
    with_subtitle,
)

# Distances of a model to itself are 0 up to this.
OWN_DISTANCE = 1e-9
# Fewest pairs of models whose quartiles are drawn.
FEWEST_OF_BOX = 5
# Colours of lines within groups and between them.
WITHIN, BETWEEN = (BLUE, GREEN, DARK), (ORANGE, PURPLE)
# Pixels of a character, of an axis title with its tick labels, and of a legend.
CHARACTER, TITLED, LEGEND = 7, 46, 34


def model_heatmap(
    values: Any,
    names: Sequence[str],
    groups: Sequence[str],
    title: str,
    quantity: str,
    sides: tuple[str, str],
    ends: Ends | None = None,
) -> go.Figure:
    """Heat map of models by models, with the numbers in the cells of a small one.

    Args:
        values: `model model`.
        names: of the models, in the order of the rows.
        groups: of the models, or none; the colours of the names.
        title: of the figure.
        quantity: title of the colour bar.
        sides: titles of the rows and of the columns.
        ends: of the intervals of the values; None without intervals.
    """
    # Penalties of both signs; 0 is then the middle colour.
    signed = bool(np.nanmin(values) < -OWN_DISTANCE)
    scale = about_zero(values) if signed else scale_within(values, (-math.inf, math.inf))
    numbers: dict[str, Any] = {}
    if len(names) <= MOST_NUMBERS:
        numbers = {"text": on_cells(_in_one_unit(values), values, scale), "texttemplate": "%{text}", "textfont": {"size": 11}}
    heat = go.Heatmap(
        z=values,
        colorbar=colour_bar(quantity),
        xgap=1,
        ygap=1,
        **scale.trace(),
        **cell_hover(names, names, ends, html.escape(quantity)),
        **numbers,
    )
    fig = go.Figure(heat)
    ticks = {"tickmode": "array", "tickvals": list(range(len(names))), "ticktext": _coloured(names, groups)}
    fig.update_xaxes(title=sides[1], tickangle=-90 if max(map(len, names)) > 2 else 0, **ticks)
    fig.update_yaxes(title=sides[0], **ticks)
    _legend_of_groups(fig, groups)
    height = square_cells(fig, names, names)
    return _with_legend(styled(fig, title, height=height), names if fig.layout.xaxis.tickangle else [], bool(groups), 1.0)


def dendrogram(merges: Any, names: Sequence[str], groups: Sequence[str], title: str, quantity: str) -> go.Figure:
    """Dendrogram of models.

    Args:
        merges: `merge 4`, as of `scipy.cluster.hierarchy.linkage`.
        names: of the models, in the order in which they were clustered.
        groups: of the models, or none; the colours of the names.
        title: of the figure.
        quantity: title of the vertical axis.
    """
    from plotly.figure_factory import create_dendrogram

    numbers = np.arange(len(names), dtype=float)
    # The distances are known already; the figure needs their merges only.
    fig = create_dendrogram(numbers[:, None], labels=numbers.astype(int), distfun=lambda x: x, linkagefun=lambda _: merges)
    order = [int(number) for number in fig.layout.xaxis.ticktext]
    fig.update_traces(line={"color": GREY, "width": 2}, hoverinfo="y", showlegend=False)
    for trace, colour in zip(fig.data, _link_colours(merges, groups), strict=True):
        trace.line.color = colour
    shown = [[names[n] for n in order], [groups[n] for n in order] if groups else []]
    turned = _angle(names)
    ticks = {"ticktext": _coloured(*shown), "tickangle": turned, "ticks": "", "showline": False, "showgrid": False}
    # Leaves stand at 5, 15, 25, ...
    fig.update_xaxes(title="Model", range=[0, 10 * len(names)], mirror=False, **ticks)
    fig.update_yaxes(title=quantity, rangemode="tozero", showline=True, mirror=False, ticks="outside", showgrid=True)
    fig.update_layout(showlegend=len(groups) > 0)
    _legend_of_groups(fig, groups)
    height = 400 + (int(_label_room(names)) if turned else 0)
    return _with_legend(styled(fig, title, height=height), names if turned else [], bool(groups), 0.8)


def group_distances(
    series: Mapping[str, Any], inside: Sequence[bool], quantity: str, test: str, ends: Mapping[str, Ends] | None = None
) -> go.Figure:
    """The distances of pairs of models, each as a point, by the groups of the two; with boxes of quartiles of enough pairs.

    Args:
        series: distances by comparison.
        inside: for each comparison, whether both models are of one group.
        quantity: title of the vertical axis.
        test: the result of the test in words, below the title.
        ends: of the intervals of the distances by comparison; None without intervals.
    """
    fig = go.Figure()
    shown: set[bool] = set()
    boxes = False
    for (name, values), within in zip(series.items(), inside, strict=True):
        hover: dict[str, Any] = {"hovertemplate": "%{y:.4f}<extra></extra>"}
        if ends is not None:
            hover = {"customdata": hover_texts(ends[name]), "hovertemplate": "%{y:.4f}%{customdata}<extra></extra>"}
        has_box = len(values) >= FEWEST_OF_BOX
        boxes = boxes or has_box
        fig.add_box(
            y=values,
            name=html.escape(name),
            boxpoints="all",
            jitter=0.4,
            pointpos=0,
            # A line of width 0 leaves the points alone.
            line={"width": 1.5 if has_box else 0},
            whiskerwidth=0.5 if has_box else 0,
            fillcolor="rgba(0, 0, 0, 0)",
            marker={"color": BLUE if within else ORANGE, "size": 7},
            legendgroup=str(within),
            showlegend=False,
            **hover,
        )
        shown.add(within)
    for within in sorted(shown, reverse=True):
        label, colour = ("within a group", BLUE) if within else ("between groups", ORANGE)
        fig.add_scatter(
            x=[None], y=[None], mode="markers", name=label, legendgroup=str(within), marker={"color": colour, "size": 9}
        )
    fig.update_xaxes(title="Groups of the two models", automargin=True, tickangle=_angle(list(series)))
    low = min((float(np.min(values)) for values in series.values() if len(values)), default=0.0)
    fig.update_yaxes(title=quantity, rangemode="tozero" if low >= 0 else "normal")
    title = f"{quantity.partition(' (')[0]} within and between groups"
    names = list(series) if _angle(list(series)) else []
    fig = styled(fig, title, height=420 + int(0.8 * _label_room(names)))
    note = f"{html.escape(test)}. A point is a pair of models{'; boxes are quartiles' if boxes else ''}."
    return with_subtitle(_with_legend(fig, names, True, 0.8), note[:1].upper() + note[1:])


def group_lines(
    values: Any, sd: Any, names: Sequence[str], sites: Sequence[str], quantity: str, ends: Ends | None = None
) -> go.Figure:
    """Line plot over layers of the means within and between groups, with bands of one standard deviation.

    Intervals of the means are whiskers: the bands are the spread of the models. Lines within groups and lines between groups
    have colours of their own, and each comparison its dash and marker, so that lines that lie on each other can be told apart.

    Args:
        values: `comparison site`.
        sd: `comparison site`, NaN where it is not known.
        names: of the comparisons.
        sites: names of the layers, or labels of stitch points.
        quantity: title of the vertical axis.
        ends: of the intervals of the values; None without intervals.
    """
    fig = go.Figure()
    inside = [name.startswith("within ") for name in names]
    for n, (name, within) in enumerate(zip(names, inside, strict=True)):
        colours, k = WITHIN if within else BETWEEN, inside[:n].count(within)
        colour, dash, symbol = colours[k % len(colours)], DASHES[k % len(DASHES)], SYMBOLS[k % len(SYMBOLS)]
        label, x = html.escape(name), list(range(len(sites)))
        spread = np.nan_to_num(sd[n])
        edges = np.concatenate([values[n] + spread, (values[n] - spread)[::-1]])
        band = {"fill": "toself", "fillcolor": colour, "opacity": 0.15, "line": {"width": 0}, "hoverinfo": "skip"}
        fig.add_scatter(x=x + x[::-1], y=edges, mode="lines", showlegend=False, legendgroup=label, **band)
        own = None if ends is None else ends.at(n)
        fig.add_scatter(
            x=x,
            y=values[n],
            name=label,
            legendgroup=label,
            mode="lines+markers",
            line={"color": colour, "width": 2, "dash": dash},
            marker={"symbol": symbol},
            **point_hover(list(sites), own, label),
            **({} if own is None else {"error_y": whiskers(values[n], own)}),
        )
    if any("," in site for site in sites):
        # A stitch point of other layers in each model.
        fig.update_xaxes(title="Stitch point", tickmode="array", tickvals=x, ticktext=[str(n + 1) for n in x])
    else:
        layer_axis(fig.update_xaxes, tuple(sites), "After block")
        turn_labels(fig, tuple(sites))
    fig.update_yaxes(title=quantity)
    title = f"{quantity.partition(' (')[0]} within and between groups, by layer"
    fig = _with_legend(styled(fig, title, height=420), [], True, 1.0)
    return with_subtitle(fig, "Bands: standard deviation over pairs" + ("; whiskers are of the means" if ends else ""))


def _in_one_unit(values: Any) -> list[list[str]]:
    """Numbers as text with as many decimals as give the largest three digits."""
    largest = float(np.abs(np.nan_to_num(values)).max())
    decimals = max(0, 2 - int(np.floor(np.log10(largest)))) if largest > 0 else 0
    return [[f"{0.0 if round(value, decimals) == 0 else value:.{decimals}f}" for value in row] for row in values.tolist()]


def _link_colours(merges: Any, groups: Sequence[str]) -> list[str]:
    """The colour of each link of a dendrogram, in scipy's order: that of a group if all models below are of it, else grey."""
    from scipy.cluster.hierarchy import dendrogram as drawn

    below = [{group} for group in groups]
    if groups:
        for first, second in merges[:, :2].astype(int):
            below.append(below[first] | below[second])
    colours = _colours(groups)
    of_link = [colours[next(iter(one))] if len(one) == 1 else GREY for one in below]
    return list(drawn(merges, no_plot=True, link_color_func=lambda n: of_link[n] if groups else GREY)["color_list"])


def _coloured(names: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Names in the colours of their groups."""
    colours = _colours(groups)
    plain = [html.escape(name) for name in names]
    if not groups:
        return plain
    return [f'<span style="color:{colours[group]}">{name}</span>' for name, group in zip(plain, groups, strict=True)]


def _colours(groups: Sequence[str]) -> dict[str, str]:
    """A colour for each group, by its place among the sorted groups."""
    return {group: PALETTE[n % len(PALETTE)] for n, group in enumerate(sorted(set(groups)))}


def _legend_of_groups(fig: go.Figure, groups: Sequence[str]) -> None:
    # The entries say what colours mean: there is nothing that a click could hide.
    fig.update_layout(legend={"itemclick": False, "itemdoubleclick": False})
    for group, colour in _colours(groups).items():
        _legend_entry(fig, html.escape(group), colour)


def _legend_entry(fig: go.Figure, name: str, colour: str) -> None:
    """An entry of the legend that belongs to no points."""
    marker = {"color": colour, "size": 10, "symbol": "square"}
    fig.add_scatter(x=[None], y=[None], mode="markers", name=name, marker=marker, showlegend=True)


def _angle(names: Sequence[str]) -> int:
    """The angle of labels along the horizontal axis: turned where they would overlap."""
    return -45 if (max(map(len, names)) + 2) * len(names) * CHARACTER > WIDTH - 100 else 0


def _label_room(names: Sequence[str]) -> float:
    """Pixels of upright labels below the horizontal axis."""
    return float(CHARACTER * max(map(len, names), default=0))


def _with_legend(fig: go.Figure, names: Sequence[str], legend: bool, slope: float) -> go.Figure:
    """The figure with room for its legend below the labels of the horizontal axis.

    Args:
        fig: as `styled` leaves it.
        names: labels that are turned; none for others.
        legend: whether there is one.
        slope: sine of the angle of the labels.
    """
    below = max(fig.layout.margin.b, TITLED + slope * _label_room(names)) + (LEGEND if legend else 0)
    height = fig.layout.height + (LEGEND if legend else 0)
    return fig.update_layout(height=int(height), margin_b=int(below))
