"""Figures of lines, bars, quantiles, named points and token paths, and their confidence intervals."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
from plotly.colors import hex_to_rgb

from ..core.intervals import bounds_of
from ..core.report_tables import LAYER_AXES
from ..core.results import Result
from .site_labels import axis_title, markup, series_label, short_names, visible_token
from .style import (
    BLUE,
    DARK,
    DASHES,
    FAINT,
    GREEN,
    GREY,
    HEIGHT,
    INTERVALS,
    MOST_LINES,
    ORANGE,
    colour_bar,
    layer_axis,
    ordered_colour,
    styled,
)

# Axes with the title "After block" or "Block", see `layer_title`.
STREAM_AXES = ("row", "column", "residual", "layer", "sublayer", "site")
# Values that span this factor get a logarithmic axis, if the figure allows one.
LOG_FACTOR = 20
# Maximum number of points with markers.
MOST_MARKERS = 60
# Opacities of bands of quantiles, the outermost first.
FAN = (0.16, 0.3, 0.4)
# Smallest distance between named points, as a fraction of the plot.
MOST_APART = 0.12
# Number of tokens above which paths are fainter, and maximum number of letters of a token.
MOST_STRONG, LETTERS = 25, 14
# A line at 0, for quantities of both signs.
ZERO_LINE = {"rangemode": "tozero", "zeroline": True, "zerolinecolor": "#888888"}
# Opacities of a band and of its outline; the outline shows the interval of a single point.
FILL, OUTLINE = 0.16, 0.22


class Ends(NamedTuple):
    """Lower and upper ends of 95 % intervals, in the shape of the values; NaN for unknown ends."""

    low: Any
    high: Any

    def at(self, index: Any) -> Ends:
        return Ends(self.low[index], self.high[index])


def interval_ends(result: Result, what: str | Callable[[Any], Any]) -> Ends | None:
    """Ends of the intervals of a field; None without intervals.

    Args:
        result: the result.
        what: name of the field, "values" for the field of `values_name`, or a function of the result, see `Result.interval`.
    """
    if not result.has_intervals or (isinstance(what, str) and bounds_of(result).get(what, ()) is None):
        return None
    _, low, high, _ = result.interval(what)
    return Ends(low.numpy(), high.numpy())


def hover_texts(ends: Ends, digits: str = ".4f") -> Any:
    """Intervals as text, such as " (0.29 to 0.33)"; empty if an end is unknown.

    Args:
        ends: ends of the intervals, arrays of any shape.
        digits: format of a number.
    """
    texts = np.empty(np.shape(ends.low), dtype=object)
    for index in np.ndindex(texts.shape):
        low, high = float(ends.low[index]), float(ends.high[index])
        texts[index] = f" ({low:{digits}} to {high:{digits}})" if np.isfinite(low) and np.isfinite(high) else ""
    return texts


def point_hover(names: Sequence[Any], ends: Ends | None, label: str) -> dict[str, Any]:
    """Hover texts of points, as plotly settings: name, value and interval.

    Args:
        names: names of the points.
        ends: ends of the confidence intervals; None without intervals.
        label: label of the line, as markup.
    """
    if ends is None:
        return {
            "customdata": list(map(markup, names)),
            "hovertemplate": "%{customdata}<br>%{y:.4f}<extra>" + label + "</extra>",
        }
    data = [list(pair) for pair in zip(map(markup, names), hover_texts(ends), strict=True)]
    return {"customdata": data, "hovertemplate": "%{customdata[0]}<br>%{y:.4f}%{customdata[1]}<extra>" + label + "</extra>"}


def add_band(fig: go.Figure, x: Any, ends: Ends, colour: str, **trace: Any) -> None:
    """Add a shaded band to a figure; points without an interval leave a gap.

    Lines that are added later lie above the band.

    Args:
        fig: the figure.
        x: x of the points, in ascending order.
        ends: ends of the confidence intervals.
        colour: colour of the line, as "#rrggbb".
        **trace: further properties, such as `legendgroup`.
    """
    xs: list[Any] = []
    ys: list[Any] = []
    known = np.isfinite(ends.low) & np.isfinite(ends.high)
    for run in np.split(np.arange(len(known)), np.flatnonzero(np.diff(known)) + 1):
        if len(run) and known[run[0]]:
            # Forth along the upper ends and back along the lower ends; None separates runs.
            xs += [*(x[n] for n in run), *(x[n] for n in run[::-1]), None]
            ys += [*ends.high[run], *ends.low[run[::-1]], None]
    if not xs:
        return
    shade = f"rgba({', '.join(map(str, hex_to_rgb(colour)))}, {{}})"
    fig.add_scatter(
        x=xs[:-1],
        y=ys[:-1],
        mode="lines",
        line={"width": 1, "color": shade.format(OUTLINE)},
        fill="toself",
        fillcolor=shade.format(FILL),
        hoverinfo="skip",
        showlegend=False,
        meta=INTERVALS,
        **trace,
    )


def whiskers(values: Any, ends: Ends) -> dict[str, Any]:
    """Error bars, as plotly settings; no bar if an end is unknown."""
    return {
        "type": "data",
        "symmetric": False,
        "array": ends.high - values,
        "arrayminus": values - ends.low,
        "thickness": 1,
        "width": 3,
    }


class Series(NamedTuple):
    """A line of a line plot.

    Attributes:
        label: label in the legend.
        values: values of the points.
        ends: ends of the confidence intervals; None without intervals.
        colour: colour of the line and its band.
        symbol: plotly's name of the marker.
        dash: plotly's name of the dash.
        names: names of the points; None for those of the figure.
        x: positions of the points; None for those of the figure.
    """

    label: str
    values: Any
    ends: Ends | None = None
    colour: str = BLUE
    symbol: str = "circle"
    dash: str = "solid"
    names: tuple[Any, ...] | None = None
    x: Any = None


def lines(
    names: tuple[Any, ...],
    series: list[Series],
    title: str,
    quantity: str,
    axis: str,
    log: bool = False,
    *,
    most_bands: int = MOST_LINES,
    joined: bool = False,
) -> go.Figure:
    """Line plot of one or more series over layers, numbers or names.

    Intervals are bands, or whiskers if the axis has names.

    Args:
        names: labels along the axis.
        series: the lines.
        title: title of the figure.
        quantity: title of the vertical axis.
        axis: name of the horizontal axis.
        log: whether the vertical axis is logarithmic if all values are positive.
        most_bands: with more lines, their intervals are in the hover texts only.
        joined: whether points over names are joined by lines too.
    """
    shown = known_columns(np.stack([one.values for one in series])) if axis in LAYER_AXES else slice(None)
    names = names[shown]
    series = [
        one._replace(values=one.values[shown], ends=one.ends and one.ends.at(shown), names=one.names and one.names[shown])
        for one in series
    ]
    fig = go.Figure()
    numbers = is_numeric_axis(names, axis)
    x = list(names) if numbers else list(range(len(names)))
    bands = len(names) > 1 and (numbers or axis in LAYER_AXES or joined)
    values = np.concatenate([one.values for one in series])
    known = values[np.isfinite(values)]
    log = log and bool(len(known)) and bool((known > 0).all())
    for one in series:
        if one.ends is not None and bands and len(series) <= most_bands:
            ends = on_log_axis(one.ends, one.values) if log else one.ends
            add_band(fig, x if one.x is None else one.x, ends, one.colour, legendgroup=one.label)
    for one in series:
        fig.add_scatter(
            x=x if one.x is None else one.x,
            y=one.values,
            name=one.label,
            mode="lines+markers" if bands and len(names) <= MOST_MARKERS else "lines" if bands else "markers",
            line={"color": one.colour, "dash": one.dash},
            marker={"symbol": one.symbol, "color": one.colour},
            # Markers at 0 are drawn whole, across the axis.
            cliponaxis=False,
            **point_hover(list(one.names or names), one.ends, one.label),
            **({} if one.ends is None else {"legendgroup": one.label}),
            **({"error_y": whiskers(one.values, one.ends)} if one.ends is not None and not bands else {}),
        )
    label_axis(fig, names, axis)
    if log:
        # Labels 1, 2, 5, 10 and so on below three decades, else powers of 10.
        labels = {"tickformat": "~g", "dtick": "D2"} if known.max() < 1000 * known.min() else {}
        fig.update_yaxes(title=quantity, type="log", **labels)
    else:
        # A few curves without negative values start at 0: a cut axis makes a ripple look like a fall.
        from_zero = bool((np.nan_to_num(values) >= 0).all()) and len(series) < 4
        fig.update_yaxes(title=quantity, rangemode="tozero" if from_zero else "normal")
    return styled(fig, title).update_layout(showlegend=len(series) > 1)


def is_wide(values: Any) -> bool:
    """Whether values span a range that needs a logarithmic axis."""
    known = values[np.isfinite(values)]
    return bool(len(known)) and bool(known.max() > LOG_FACTOR * max(known.min(), 0))


def known_columns(values: Any) -> slice:
    """Slice from the first to the last column with a finite value.

    All columns if no value is finite.

    Args:
        values: the matrix, `row column`.
    """
    known = np.flatnonzero(np.isfinite(values).any(axis=0))
    return slice(int(known[0]), int(known[-1]) + 1) if len(known) else slice(None)


def widen_axis(fig: go.Figure, bounds: tuple[float, float]) -> go.Figure:
    """Make the vertical axis span at least a tenth of the quantity's possible range.

    Noise then does not look like a dip.

    If the lower bound is positive, such as 1 for a ratio, an axis from 0 begins a little below this bound instead.

    Args:
        fig: a line plot. Other figures, logarithmic axes and axes with a fixed range are not changed.
        bounds: lowest and highest possible value; infinite if there is none.
    """
    axis, (low, high) = fig.layout.yaxis, bounds
    if axis.type == "log" or axis.range is not None or any(trace.type != "scatter" for trace in fig.data):
        return fig
    bars = [0.0 if trace.error_y.array is None else np.nan_to_num(trace.error_y.array) for trace in fig.data]
    drawn = [np.asarray(trace.y, dtype=float) + bar for trace, bar in zip(fig.data, bars, strict=True)]
    known = [float(y) for y in np.concatenate(drawn) if math.isfinite(y)]
    least = (high - low) / 10
    if axis.rangemode == "tozero" and 0 < low < math.inf:
        span = (max(known, default=low) - low) or 1.0
        # Far above the bound, a twentieth of the axis would reach below 0.
        fig.update_yaxes(range=[max(0.0, low - 0.05 * span), low + 1.08 * span])
    elif axis.rangemode != "tozero" and math.isfinite(least) and known and max(known) - min(known) < least:
        middle = float(np.clip((max(known) + min(known)) / 2, low + least / 2, high - least / 2))
        fig.update_yaxes(range=[middle - 0.53 * least, middle + 0.53 * least])
    return fig


def is_numeric_axis(names: tuple[Any, ...], axis: str) -> bool:
    """Whether an axis has a numeric scale; False for layers, class labels and names."""
    return axis not in (*LAYER_AXES, "label") and all(isinstance(name, int | float) for name in names)


def layer_title(names: tuple[str, ...], axis: str) -> str:
    """Title of an axis; for layers, "After block" or "Block".

    The title is "After block" if the first layer is the input of a block.

    Args:
        names: labels of the axis.
        axis: name of the axis.
    """
    if axis in STREAM_AXES:
        return axis_title("residual" if not names or names[0].endswith("resid_pre") else "layer")
    return axis_title(axis)


def label_axis(fig: go.Figure, names: tuple[Any, ...], axis: str) -> None:
    """Set title and ticks of the horizontal axis."""
    if axis in LAYER_AXES:
        layer_axis(fig.update_xaxes, names, layer_title(names, axis))
    elif is_numeric_axis(names, axis):
        fig.update_xaxes(title=axis_title(axis))
    else:
        texts = [html.escape(str(name), quote=False) for name in names]
        ticks = {"tickmode": "array", "tickvals": list(range(len(names))), "ticktext": texts}
        # No point of a few names stands at the edge.
        edges = {"range": [-0.5, len(names) - 0.5]} if names else {}
        fig.update_xaxes(title=axis_title(axis), **ticks, **edges)


def on_log_axis(ends: Ends, values: Any) -> Ends:
    """Make lower interval ends positive, for a logarithmic axis.

    Lower ends at or below 0 become half the smallest positive value.
    """
    above = [number for number in (*values, *ends.low) if number > 0]
    return Ends(np.where(ends.low <= 0, min(above, default=1.0) / 2, ends.low), ends.high)


def with_baselines(fig: go.Figure, baselines: dict[str, float]) -> go.Figure:
    """Add horizontal reference lines to a line plot.

    Args:
        fig: a line plot.
        baselines: names and values of the lines.
    """
    places = list(fig.data[-1].x) or [0]
    if len([trace for trace in fig.data if trace.fill is None]) == 1 and baselines:
        # The vertical axis names the curve; the legend names the reference lines.
        fig.update_traces(showlegend=False)
    for number, (name, value) in enumerate(baselines.items()):
        look = {"color": GREY, "width": 1.5, "dash": DASHES[1 + number % 3]}
        ends = {"x": [places[0], places[-1]], "y": [value, value]}
        fig.add_scatter(**ends, name=f"{name}: {value:.4g}", mode="lines", line=look)
    return fig.update_layout(showlegend=True) if baselines else fig


def quantile_lines(
    levels: tuple[float, ...], names: tuple[Any, ...], values: Any, titles: tuple[str, str], axis: str, ends: Ends | None
) -> go.Figure:
    """Quantiles over tokens as bands around the median.

    Intervals of the median are whiskers.

    Args:
        levels: quantile levels.
        names: labels along the axis.
        values: `quantile layer`.
        titles: titles of the figure and of the vertical axis.
        axis: name of the horizontal axis.
        ends: ends of the confidence intervals; None without intervals.
    """
    shown = known_columns(values) if axis in LAYER_AXES else slice(None)
    names, values, ends = names[shown], values[:, shown], ends and ends.at((slice(None), shown))
    fig = go.Figure()
    x = list(range(len(names)))
    words = [series_label("quantile", level) for level in levels]
    # From the outermost pair of quantiles inwards.
    for number in range(len(levels) // 2):
        lower, upper = number, len(levels) - 1 - number
        fill = {"fill": "tonexty", "fillcolor": FAINT.format(FAN[min(number, len(FAN) - 1)])}
        for n in (lower, upper):
            fig.add_scatter(
                x=x,
                y=values[n],
                name=f"{100 * levels[lower]:g} to {100 * levels[upper]:g} % of tokens" if n == upper else words[n],
                mode="lines",
                line={"width": 0.5, "color": FAINT.format(0.4)},
                **(fill if n == upper else {}),
                legendgroup=f"{number}",
                showlegend=n == upper,
                **point_hover(list(names), ends and ends.at(n), words[n]),
            )
    middle = min(range(len(levels)), key=lambda n: abs(levels[n] - 0.5))
    own, label = ends and ends.at(middle), "median" if levels[middle] == 0.5 else words[middle]
    fig.add_scatter(
        x=x,
        y=values[middle],
        name=label,
        mode="lines+markers",
        legendgroup=label,
        line={"color": BLUE},
        marker={"color": BLUE},
        **point_hover(list(names), own, label),
        **({} if own is None else {"error_y": whiskers(values[middle], own)}),
    )
    label_axis(fig, names, axis)
    fig.update_yaxes(title=titles[1], rangemode="tozero" if bool((np.nan_to_num(values) >= 0).all()) else "normal")
    return styled(fig, titles[0])


def sublayer_series(names: tuple[str, ...], blocks: list[str], values: Any, ends: Ends | None) -> list[Series]:
    """One `Series` over blocks for each kind of sublayer in `names`: attention, cross-attention, MLP.

    Args:
        names: names of the sublayers' sites, such as `blocks.0.hook_attn_out`.
        blocks: names of the blocks, such as `blocks.0`.
        values: `sublayer`.
        ends: ends of the confidence intervals; None without intervals.
    """
    kinds = (
        ("attn", "Attention", BLUE, "circle"),
        ("cross_attn", "Attention to the encoder", GREEN, "diamond"),
        ("mlp", "MLP", ORANGE, "square"),
    )
    padded, series = [np.append(part, np.nan) for part in (values, *(ends or ()))], []
    for kind, label, colour, symbol in kinds:
        sites = [f"{block}.hook_{kind}_out" for block in blocks]
        # NaN, the last entry, stands for blocks without this sublayer.
        at = [names.index(site) if site in names else len(names) for site in sites]
        if min(at) < len(names):
            own, *both = (part[at] for part in padded)
            series.append(Series(label, own, Ends(*both) if both else None, colour, symbol, names=tuple(sites)))
    return series


def bars(names: tuple[Any, ...], values: Any, ends: Ends | None, axis: str, titles: tuple[str, str]) -> go.Figure:
    """Bar chart with intervals as whiskers.

    Args:
        names: labels along the axis.
        values: heights of the bars.
        ends: ends of the confidence intervals; None without intervals.
        axis: name of the horizontal axis.
        titles: titles of the figure and of the vertical axis.
    """
    margins = [""] * len(names) if ends is None else hover_texts(ends, ",.4g")
    fig = go.Figure(
        go.Bar(
            x=list(range(len(names))),
            y=values,
            marker={"color": BLUE},
            # Whiskers are dark, so that they are seen inside the bar too.
            error_y=None if ends is None else whiskers(values, ends) | {"color": DARK},
            customdata=list(zip(map(markup, names), margins, strict=True)),
            hovertemplate="%{customdata[0]}<br>%{y:,.4g}%{customdata[1]}<extra></extra>",
        )
    )
    label_axis(fig, names, axis)
    fig.update_yaxes(title=titles[1], rangemode="tozero")
    return styled(fig, titles[0])


def named_points(
    points: tuple[Any, Any],
    ends: tuple[Ends | None, Ends | None],
    names: Sequence[str],
    kind: str,
    titles: tuple[str, str, str],
) -> go.Figure:
    """Line through named points, with whiskers in both directions.

    Some names are written beside their points.

    Args:
        points: x and y of the points.
        ends: ends of the confidence intervals of x and of y; None without intervals.
        names: names of the points.
        kind: kind of the names, for the legend.
        titles: titles of the figure, the horizontal axis and the vertical axis.
    """
    bars = {
        f"error_{side}": whiskers(values, own) | {"color": FAINT.format(0.5)}
        for side, values, own in zip("xy", points, ends, strict=True)
        if own is not None
    }
    # Points far enough from the previous named point.
    places = np.stack(points) / np.maximum(np.ptp(np.nan_to_num(np.stack(points)), axis=1, keepdims=True), 1e-12)
    named = [0] if names else []
    for n in range(len(names)):
        if np.linalg.norm(places[:, n] - places[:, named[-1]]) > MOST_APART:
            named.append(n)
    margins = [[""] * len(names) if own is None else hover_texts(own) for own in ends]
    fig = go.Figure()
    fig.add_scatter(
        x=points[0],
        y=points[1],
        mode="lines+markers+text",
        name=f"numbers: {kind[:1].lower()}{kind[1:]}",
        line={"color": BLUE},
        text=[name if n in named else "" for n, name in enumerate(names)],
        textposition="top right",
        textfont={"color": GREY},
        cliponaxis=False,
        customdata=list(zip(names, *margins, strict=True)),
        hovertemplate=f"{kind} %{{customdata[0]}}<br>{titles[1]}: %{{x:.4f}}%{{customdata[1]}}<br>"
        f"{titles[2]}: %{{y:.4g}}%{{customdata[2]}}<extra></extra>",
        **bars,
    )
    fig.update_xaxes(title=titles[1])
    fig.update_yaxes(title=titles[2], rangemode="tozero")
    return styled(fig, titles[0]).update_layout(showlegend=True)


def paths(
    coordinates: Any, explained: list[float], tokens: tuple[str, ...], layers: tuple[str, ...], title: str, skipped: int = 0
) -> go.Figure:
    """Paths of tokens through the layers, in the plane of two principal components.

    Both axes have the same scale. The first and the last path are thick.

    Args:
        coordinates: `token layer 2`.
        explained: fraction of the last layer's variance along each component.
        tokens: tokens of the prompt.
        layers: names of the residual layers.
        title: title of the figure.
        skipped: number of prompt positions before the first token.
    """
    fig = go.Figure()
    last = len(tokens) - 1
    names = [html.escape(f"{n + skipped} {visible_token(token, LETTERS)}", quote=False) for n, token in enumerate(tokens)]
    looks = {0: "first token", last: "last token"}
    places = ["before the first block" if name == "embed" else f"after block {markup(name)}" for name in short_names(layers)]
    symbols = ["circle-open", *["circle"] * (len(layers) - 2), "square"]
    # The first and the last token are drawn last, above the others.
    for i in [*range(1, last), *dict.fromkeys((0, last))]:
        fig.add_scatter(
            x=coordinates[i, :, 0],
            y=coordinates[i, :, 1],
            mode="lines+markers+text",
            name=f"{looks[i]}: {names[i]}" if i in looks else names[i],
            showlegend=i in looks,
            opacity=1 if i in looks else 0.7 if len(tokens) <= MOST_STRONG else 0.35,
            line={"color": ordered_colour(i / max(1, last)), "width": 3 if i in looks else 1.2},
            marker={"size": [7] + [4] * (len(layers) - 2) + [8], "symbol": symbols, "color": ordered_colour(i / max(1, last))},
            text=[""] * (len(layers) - 1) + [f"<b>{names[i]}</b>" if i in looks else ""],
            textposition="top center",
            cliponaxis=False,
            customdata=[
                f"token <b>{names[i]}</b><br>{place}<br>{markup(name)}" for place, name in zip(places, layers, strict=True)
            ],
            hovertemplate="%{customdata}<extra></extra>",
        )
    for name, symbol in (("first layer", "circle-open"), ("last layer", "square")):
        fig.add_scatter(x=[None], y=[None], mode="markers", marker={"symbol": symbol, "size": 8, "color": GREY}, name=name)
    scale = [[n / 10, ordered_colour(n / 10)] for n in range(11)]
    marker = {"color": [skipped], "cmin": skipped, "cmax": skipped + max(1, last), "colorscale": scale, "showscale": True}
    marker |= {"colorbar": colour_bar("Position in the prompt") | {"thickness": 12}}
    fig.add_scatter(x=[None], y=[None], mode="markers", marker=marker, hoverinfo="skip", showlegend=False)
    shares = [f"PC {n} ({100 * share:.0f} % of variance)" for n, share in enumerate(explained, start=1)]
    # Room for the labels of the first and the last token.
    low, high = float(np.nanmin(coordinates[..., 0])), float(np.nanmax(coordinates[..., 0]))
    room = (high - low) / 3 or 1.0
    fig.update_xaxes(title=shares[0], range=[low - room, high + room])
    fig.update_yaxes(title=shares[1], scaleanchor="x", scaleratio=1)
    return styled(fig, title, height=HEIGHT + 130)
