"""Figures of many models: fields over training steps, model sizes or depth, as lines or heat maps; and of fitted curves."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import plotly.graph_objects as go

from .interval_bands import Ends, hover_texts
from .site_labels import short_names, site_axis_title
from .style import (
    BLUE,
    DASHES,
    GREY,
    ORANGE,
    PALETTE,
    SEQUENTIAL,
    colour_bar,
    layer_axis,
    ordered_colour,
    styled,
    with_room_for_legend,
    with_subtitle,
)

# Numbers that span this factor or more stand on a logarithmic axis.
WIDE = 100
# Most lines with a legend; more have a colour bar.
MOST_LABELS = 10
# Most lines with bands; more bands hide one another.
MOST_BANDS = 3
# Most keys whose ticks stand on a heat map.
MOST_KEYS = 24
DEPTH_TITLE = "Relative depth (0: first site, 1: last)"


class KeyAxis:
    """Keys of models as positions along an axis.

    Numbers that span a factor of 100 or more have logarithmic positions; a key of 0 then stands half a decade below the
    smallest other one. Names are evenly spaced.

    Args:
        keys: numbers or names, in order.
        title: of the axis.
    """

    def __init__(self, keys: Sequence[Any], title: str) -> None:
        self.keys, self.title = list(keys), title
        self.numeric = all(isinstance(key, int | float) for key in keys)
        above = [key for key in keys if key > 0] if self.numeric else []
        self.logarithmic = bool(above) and min(keys) >= 0 and max(above) >= WIDE * min(above)
        self._zero = math.log10(min(above)) - 0.5 if self.logarithmic else 0.0
        self.positions = [self._position(key, number) for number, key in enumerate(keys)]

    def _position(self, key: Any, number: int) -> float:
        if not self.numeric:
            return float(number)
        if not self.logarithmic:
            return float(key)
        return math.log10(key) if key > 0 else self._zero

    def ticks(self) -> dict[str, Any]:
        """Tick settings of plotly for these positions; none for numbers on a linear axis."""
        if not self.numeric:
            return {"tickmode": "array", "tickvals": self.positions, "ticktext": [html.escape(str(key)) for key in self.keys]}
        if not self.logarithmic:
            return {}
        low = math.ceil(min(self.positions) + (0.5 if 0 in self.keys else 0))
        decades = list(range(low, math.floor(max(self.positions)) + 1))
        zero = [self._zero] if 0 in self.keys else []
        text = ["0"] * len(zero) + [short_number(10.0**decade) for decade in decades]
        return {"tickmode": "array", "tickvals": [*zero, *decades], "ticktext": text}


@dataclass(frozen=True)
class Line:
    """A line over the keys of models, with its band.

    Attributes:
        name: of the line.
        values: one for each key, NaN for none.
        low: lower ends of the band; None for no band.
        high: upper ends.
        colour: of line and band.
        dash: of the line, as plotly names it.
    """

    name: str
    values: list[float]
    low: list[float] | None
    high: list[float] | None
    colour: str
    dash: str


def short_number(value: float) -> str:
    """A number as a short text.

    Examples:
        >>> short_number(1000.0), short_number(135e6), short_number(0.1), short_number(20.0)
        ('1k', '135M', '0.1', '20')
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def lines_over_keys(lines: list[Line], axis: KeyAxis, titles: tuple[str, str], by_depth: bool) -> go.Figure:
    """Line plot over training steps, model sizes or names. Few lines have bands; intervals of more are where the pointer is.

    Args:
        lines: to draw.
        axis: the keys.
        titles: of the figure, and of the vertical axis.
        by_depth: whether colours stand for depth; else each line has its own colour and a legend.
    """
    fig = go.Figure()
    if by_depth:
        labels = dict(zip((line.name for line in lines), short_names(tuple(line.name for line in lines)), strict=True))
    else:
        labels = {line.name: line.name for line in lines}
    hover = [str(key) for key in axis.keys]
    if len(lines) <= MOST_BANDS:
        for line in lines:
            _band(fig, axis.positions, line.low, line.high, line.colour)
    for line in lines:
        _draw_line(fig, axis.positions, replace(line, name=html.escape(labels[line.name])), hover)
    fig.update_xaxes(title=axis.title, **axis.ticks())
    fig.update_yaxes(title=titles[1])
    sites = tuple(line.name for line in lines)
    legend = site_axis_title(sites, "After block") if by_depth else ""
    return _finished(fig, titles[0], len(lines), legend, ("Relative depth", [0.0, 1.0], ["0", "1"]))


def lines_over_depth(curves: list[tuple[Any, ...]], axis: KeyAxis, titles: tuple[str, str]) -> go.Figure:
    """Line plot over relative depth, with a line for each model. Few lines have bands.

    Args:
        curves: of each model the relative depths, the names of the sites, values, and lower and upper ends of the band or None.
        axis: the keys of the models.
        titles: of the figure, and of the vertical axis.
    """
    fig = go.Figure()
    places = np.array(axis.positions)
    scaled = (places - places.min()) / (np.ptp(places) or 1.0)
    distinct = not axis.numeric and len(curves) <= MOST_LABELS
    colours = [PALETTE[n % len(PALETTE)] if distinct else ordered_colour(float(place)) for n, place in enumerate(scaled)]
    dashes = [DASHES[n // len(PALETTE)] if distinct else DASHES[0] for n in range(len(curves))]
    if len(curves) <= MOST_BANDS:
        for (depth, _, _, low, high), colour in zip(curves, colours, strict=True):
            _band(fig, list(depth), low, high, colour)
    for key, (depth, sites, values, low, high), colour, dash in zip(axis.keys, curves, colours, dashes, strict=True):
        _draw_line(fig, list(depth), Line(html.escape(_key_text(key)), values, low, high, colour, dash), list(sites))
    fig.update_xaxes(title=DEPTH_TITLE)
    fig.update_yaxes(title=titles[1])
    ticks = axis.ticks()
    span = np.ptp(places) or 1.0
    if ticks:
        bar = (axis.title, [float((one - places.min()) / span) for one in ticks["tickvals"]], ticks["ticktext"])
    else:
        bar = (axis.title, [0.0, 1.0], [_key_text(axis.keys[0]), _key_text(axis.keys[-1])])
    return _finished(fig, titles[0], len(curves), axis.title, bar)


def heatmap_over_keys(values: list[list[float]], sites: tuple[str, ...], axis: KeyAxis, titles: tuple[str, str]) -> go.Figure:
    """Heat map of layers by models, whose columns are evenly spaced.

    Args:
        values: `model site`.
        sites: names of the sites.
        axis: the keys of the models.
        titles: of the figure, and of the colour bar.
    """
    names = [_key_text(key) for key in axis.keys]
    heat = go.Heatmap(
        z=np.array(values).T,
        colorscale=SEQUENTIAL,
        colorbar=colour_bar(titles[1]),
        customdata=[[(name, site) for name in names] for site in sites],
        hovertemplate="%{customdata[0]}<br>%{customdata[1]}<br>%{z:.4f}<extra></extra>",
    )
    fig = go.Figure(heat)
    step = max(1, -(-len(names) // MOST_KEYS))
    shown = list(range(0, len(names), step))
    ticks = {"tickmode": "array", "tickvals": shown, "ticktext": [html.escape(names[n]) for n in shown]}
    fig.update_xaxes(title=axis.title, showgrid=False, tickangle=-45 if len(shown) > 8 else 0, **ticks)
    layer_axis(fig.update_yaxes, sites, "After block")
    # The first layer on top, as in heat maps of layers by layers.
    fig.update_yaxes(showgrid=False, autorange="reversed")
    return styled(fig, titles[0])


def axis_number(sites: tuple[str, ...], depth: Sequence[float]) -> tuple[str, float, str]:
    """The number that an equation over depth takes: the block's number where tick labels are numbers, else the depth l.

    Args:
        sites: names of the sites.
        depth: of each site.

    Returns:
        The name of the number, the depth at which it is 0, and a note on the axis, which is empty where labels are enough.

    Examples:
        >>> axis_number(("blocks.0.hook_resid_pre", "blocks.0.hook_resid_post", "blocks.1.hook_resid_post"), [0, 1, 2])
        ('block', 1, '; embed: block -1')
        >>> axis_number(("model.layers.0.mlp.input", "model.layers.0.mlp", "model.layers.1.mlp"), [0, 1, 2])
        ('l', 0, '; l = 0 at into 0.mlp, l = 2 at 1.mlp')
    """
    labels = short_names(sites)
    starts = {place - int(label) for place, label in zip(depth, labels, strict=True) if label.isdecimal()}
    others = [n for n, label in enumerate(labels) if not label.isdecimal()]
    if len(starts) != 1 or others not in ([], [0]):
        return "l", 0, f"; l = {depth[0]:g} at {labels[0]}, l = {depth[-1]:g} at {labels[-1]}"
    [start] = starts
    return "block", start, f"; {labels[0]}: block {depth[0] - start:g}" if others else ""


def fitted_curve(
    x: Any, y: Any, sites: tuple[str, ...], fits: Mapping[str, tuple[Any, Any]], titles: tuple[str, str, str]
) -> go.Figure:
    """Points over depth, and curves that were fitted to them.

    Args:
        x: of the points.
        y: of the points.
        sites: names of the points.
        fits: positions and values of each curve, by its equation.
        titles: of the figure, below it, and of the vertical axis.
    """
    fig = go.Figure()
    hover = "%{customdata}<br>%{y:.4g}<extra></extra>"
    marker = {"size": 8, "color": BLUE}
    fig.add_scatter(x=x, y=y, mode="markers", name="measured", marker=marker, customdata=list(sites), hovertemplate=hover)
    looks = ({"color": ORANGE}, {"color": GREY, "dash": "dash"})
    for (name, (places, values)), look in zip(fits.items(), looks, strict=True):
        fig.add_scatter(x=places, y=values, mode="lines", name=html.escape(name), line=look, hoverinfo="skip")
    step = max(1, -(-len(sites) // MOST_KEYS))
    labels = short_names(sites)
    ticks = {"tickmode": "array", "tickvals": list(x[::step]), "ticktext": labels[::step]}
    fig.update_xaxes(title=site_axis_title(sites, "After block"), **ticks)
    fig.update_yaxes(title=titles[2])
    return with_subtitle(styled(fig, titles[0]), html.escape(titles[1]))


def _draw_line(fig: go.Figure, x: list[float], line: Line, hover: list[str]) -> None:
    """A line with markers, and its intervals where the pointer is."""
    margins = [""] * len(hover)
    if line.low is not None and line.high is not None:
        margins = list(hover_texts(Ends(np.array(line.low), np.array(line.high)), ".4g"))
    fig.add_scatter(
        x=x,
        y=line.values,
        name=line.name,
        mode="lines+markers",
        line={"color": line.colour, "dash": line.dash},
        marker={"color": line.colour},
        customdata=list(zip(hover, margins, strict=True)),
        hovertemplate="%{customdata[0]}<br>%{y:.4g}%{customdata[1]}<extra>" + line.name + "</extra>",
    )


def _band(fig: go.Figure, x: Sequence[float], low: list[float] | None, high: list[float] | None, colour: str) -> None:
    """A band between two lines, without the points at which an end is not known."""
    if low is None or high is None:
        return
    known = [n for n in range(len(x)) if math.isfinite(low[n]) and math.isfinite(high[n])]
    places = [x[n] for n in known] + [x[n] for n in reversed(known)]
    ends = [high[n] for n in known] + [low[n] for n in reversed(known)]
    look = {"fill": "toself", "fillcolor": colour, "opacity": 0.18, "line": {"width": 0}, "hoverinfo": "skip"}
    fig.add_scatter(x=places, y=ends, mode="lines", showlegend=False, **look)


def _finished(fig: go.Figure, title: str, count: int, legend: str, bar: tuple[str, list[float], list[str]]) -> go.Figure:
    """The figure with a legend below its axes, or with a colour bar where there are many lines."""
    styled(fig, title)
    if count == 1:
        return fig.update_layout(showlegend=False)
    if count <= MOST_LABELS:
        return with_room_for_legend(fig.update_layout(showlegend=True), legend)
    scale = [[n / 10, ordered_colour(n / 10)] for n in range(11)]
    ticks = {"tickmode": "array", "tickvals": bar[1], "ticktext": bar[2], **colour_bar(bar[0])}
    marker = {"color": [0, 1], "cmin": 0, "cmax": 1, "colorscale": scale, "showscale": True, "colorbar": ticks}
    fig.add_scatter(x=[None], y=[None], mode="markers", marker=marker, hoverinfo="skip", showlegend=False)
    return fig.update_layout(showlegend=False)


def _key_text(key: Any) -> str:
    return key if isinstance(key, str) else f"{key:,}" if isinstance(key, int) else f"{key:g}"
