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
# Number of tokens above which paths are fainter.
MOST_STRONG = 25
# Maximum number of letters of a token.
MOST_LETTERS = 14
# A line at 0, for quantities of both signs.
ZERO_LINE = {"rangemode": "tozero", "zeroline": True, "zerolinecolor": "#888888"}
# Opacities of a band and of its outline; the outline shows the interval of a single point.
FILL = 0.16
OUTLINE = 0.22


class Ends(NamedTuple):
    """Lower and upper ends of 95 % intervals, in the shape of the values; NaN for unknown ends."""

    low: Any
    high: Any

    def at(self, index: Any) -> Ends:
        return Ends(self.low[index], self.high[index])


def interval_ends(result: Result, quantity: str | Callable[[Any], Any]) -> Ends | None:
    """Ends of the intervals of a field; None without intervals.

    Args:
        result: the result.
        quantity: name of the field, "values" for the field of `values_name`, or a function of the result, see
            `Result.interval`.
    """
    if not result.has_intervals:
        return None
    # Fields that have no intervals are declared with the bounds None.
    if isinstance(quantity, str) and bounds_of(result).get(quantity, ()) is None:
        return None
    _, low, high, _ = result.interval(quantity)
    return Ends(low.numpy(), high.numpy())


def hover_texts(ends: Ends, digits: str = ".4f") -> Any:
    """Intervals as text, such as " (0.29 to 0.33)"; empty if an end is unknown.

    Args:
        ends: ends of the intervals, arrays of any shape.
        digits: format of a number.
    """
    texts = np.empty(np.shape(ends.low), dtype=object)
    for index in np.ndindex(texts.shape):
        low = float(ends.low[index])
        high = float(ends.high[index])
        known = np.isfinite(low) and np.isfinite(high)
        texts[index] = f" ({low:{digits}} to {high:{digits}})" if known else ""
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
    names_and_intervals = zip(map(markup, names), hover_texts(ends), strict=True)
    return {
        "customdata": [list(pair) for pair in names_and_intervals],
        "hovertemplate": "%{customdata[0]}<br>%{y:.4f}%{customdata[1]}<extra>" + label + "</extra>",
    }


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
    columns = known_columns(np.stack([line.values for line in series])) if axis in LAYER_AXES else slice(None)
    names = names[columns]
    series = [_columns_of(line, columns) for line in series]
    fig = go.Figure()
    is_numeric = is_numeric_axis(names, axis)
    x = list(names) if is_numeric else list(range(len(names)))
    # Points over names are joined by lines only if the caller says so.
    is_curve = len(names) > 1 and (is_numeric or axis in LAYER_AXES or joined)
    values = np.concatenate([line.values for line in series])
    finite = values[np.isfinite(values)]
    log = log and bool(len(finite)) and bool((finite > 0).all())
    # All bands lie below all lines.
    for line in series:
        if line.ends is not None and is_curve and len(series) <= most_bands:
            ends = on_log_axis(line.ends, line.values) if log else line.ends
            add_band(fig, x if line.x is None else line.x, ends, line.colour, legendgroup=line.label)
    mode = "markers"
    if is_curve:
        mode = "lines+markers" if len(names) <= MOST_MARKERS else "lines"
    for line in series:
        interval_settings: dict[str, Any] = {}
        if line.ends is not None:
            interval_settings["legendgroup"] = line.label
            if not is_curve:
                interval_settings["error_y"] = whiskers(line.values, line.ends)
        fig.add_scatter(
            x=x if line.x is None else line.x,
            y=line.values,
            name=line.label,
            mode=mode,
            line={"color": line.colour, "dash": line.dash},
            marker={"symbol": line.symbol, "color": line.colour},
            # Markers at 0 are drawn whole, across the axis.
            cliponaxis=False,
            **point_hover(list(line.names or names), line.ends, line.label),
            **interval_settings,
        )
    label_axis(fig, names, axis)
    if log:
        # Labels 1, 2, 5, 10 and so on below three decades, else powers of 10.
        labels = {"tickformat": "~g", "dtick": "D2"} if finite.max() < 1000 * finite.min() else {}
        fig.update_yaxes(title=quantity, type="log", **labels)
    else:
        # A few curves without negative values start at 0: a cut axis makes a ripple look like a fall.
        from_zero = bool((np.nan_to_num(values) >= 0).all()) and len(series) < 4
        fig.update_yaxes(title=quantity, rangemode="tozero" if from_zero else "normal")
    return styled(fig, title).update_layout(showlegend=len(series) > 1)


def _columns_of(line: Series, columns: slice) -> Series:
    """A line without the points outside of `columns`."""
    return line._replace(
        values=line.values[columns],
        ends=line.ends and line.ends.at(columns),
        names=line.names and line.names[columns],
    )


def is_wide(values: Any) -> bool:
    """Whether values span a range that needs a logarithmic axis."""
    finite = values[np.isfinite(values)]
    return bool(len(finite)) and bool(finite.max() > LOG_FACTOR * max(finite.min(), 0))


def known_columns(values: Any) -> slice:
    """Slice from the first to the last column with a finite value.

    All columns if no value is finite.

    Args:
        values: the matrix, `row column`.
    """
    finite_columns = np.flatnonzero(np.isfinite(values).any(axis=0))
    if not len(finite_columns):
        return slice(None)
    return slice(int(finite_columns[0]), int(finite_columns[-1]) + 1)


def widen_axis(fig: go.Figure, bounds: tuple[float, float]) -> go.Figure:
    """Make the vertical axis span at least a tenth of the quantity's possible range.

    Noise then does not look like a dip.

    If the lower bound is positive, such as 1 for a ratio, an axis from 0 begins a little below this bound instead.

    Args:
        fig: a line plot. Other figures, logarithmic axes and axes with a fixed range are not changed.
        bounds: lowest and highest possible value; infinite if there is none.
    """
    axis = fig.layout.yaxis
    low, high = bounds
    if axis.type == "log" or axis.range is not None or any(trace.type != "scatter" for trace in fig.data):
        return fig
    heights = list[float]()
    for trace in fig.data:
        whisker = 0.0 if trace.error_y.array is None else np.nan_to_num(trace.error_y.array)
        upper_ends = np.asarray(trace.y, dtype=float) + whisker
        heights += [float(y) for y in upper_ends if math.isfinite(y)]
    smallest_span = (high - low) / 10
    if axis.rangemode == "tozero":
        if 0 < low < math.inf:
            span = (max(heights, default=low) - low) or 1.0
            # Far above the bound, a twentieth of the axis would reach below 0.
            fig.update_yaxes(range=[max(0.0, low - 0.05 * span), low + 1.08 * span])
    elif math.isfinite(smallest_span) and heights and max(heights) - min(heights) < smallest_span:
        middle = (max(heights) + min(heights)) / 2
        middle = float(np.clip(middle, low + smallest_span / 2, high - smallest_span / 2))
        fig.update_yaxes(range=[middle - 0.53 * smallest_span, middle + 0.53 * smallest_span])
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
        axis = "residual" if not names or names[0].endswith("resid_pre") else "layer"
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
    positive = [number for number in (*values, *ends.low) if number > 0]
    floor = min(positive, default=1.0) / 2
    return Ends(np.where(ends.low <= 0, floor, ends.low), ends.high)


def with_baselines(fig: go.Figure, baselines: dict[str, float]) -> go.Figure:
    """Add horizontal reference lines to a line plot.

    Args:
        fig: a line plot.
        baselines: names and values of the lines.
    """
    if not baselines:
        return fig
    x = list(fig.data[-1].x) or [0]
    curves = [trace for trace in fig.data if trace.fill is None]
    if len(curves) == 1:
        # The vertical axis names the curve; the legend names the reference lines.
        fig.update_traces(showlegend=False)
    for number, (name, value) in enumerate(baselines.items()):
        fig.add_scatter(
            x=[x[0], x[-1]],
            y=[value, value],
            name=f"{name}: {value:.4g}",
            mode="lines",
            # Not the first dash, which is a solid line.
            line={"color": GREY, "width": 1.5, "dash": DASHES[1 + number % 3]},
        )
    return fig.update_layout(showlegend=True)


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
    columns = known_columns(values) if axis in LAYER_AXES else slice(None)
    names = names[columns]
    values = values[:, columns]
    if ends is not None:
        ends = ends.at((slice(None), columns))
    fig = go.Figure()
    x = list(range(len(names)))
    words = [series_label("quantile", level) for level in levels]
    # From the outermost pair of quantiles inwards.
    for number in range(len(levels) // 2):
        lower = number
        upper = len(levels) - 1 - number
        outline = {"width": 0.5, "color": FAINT.format(0.4)}
        fig.add_scatter(
            x=x,
            y=values[lower],
            name=words[lower],
            mode="lines",
            line=outline,
            legendgroup=f"{number}",
            showlegend=False,
            **point_hover(list(names), ends and ends.at(lower), words[lower]),
        )
        # The fill reaches down to the trace before it.
        fig.add_scatter(
            x=x,
            y=values[upper],
            name=f"{100 * levels[lower]:g} to {100 * levels[upper]:g} % of tokens",
            mode="lines",
            line=outline,
            fill="tonexty",
            fillcolor=FAINT.format(FAN[min(number, len(FAN) - 1)]),
            legendgroup=f"{number}",
            showlegend=True,
            **point_hover(list(names), ends and ends.at(upper), words[upper]),
        )
    middle = min(range(len(levels)), key=lambda n: abs(levels[n] - 0.5))
    label = "median" if levels[middle] == 0.5 else words[middle]
    middle_ends = ends and ends.at(middle)
    fig.add_scatter(
        x=x,
        y=values[middle],
        name=label,
        mode="lines+markers",
        legendgroup=label,
        line={"color": BLUE},
        marker={"color": BLUE},
        **point_hover(list(names), middle_ends, label),
        **({} if middle_ends is None else {"error_y": whiskers(values[middle], middle_ends)}),
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
    padded_values = np.append(values, np.nan)
    padded_ends = None if ends is None else Ends(np.append(ends.low, np.nan), np.append(ends.high, np.nan))
    series = []
    for kind, label, colour, symbol in kinds:
        sites = [f"{block}.hook_{kind}_out" for block in blocks]
        # NaN, the last entry, stands for blocks without this sublayer.
        index = [names.index(site) if site in names else len(names) for site in sites]
        if min(index) < len(names):
            kind_ends = padded_ends and padded_ends.at(index)
            series.append(Series(label, padded_values[index], kind_ends, colour, symbol, names=tuple(sites)))
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
    error_bars = {}
    for side, side_values, side_ends in zip("xy", points, ends, strict=True):
        if side_ends is not None:
            error_bars[f"error_{side}"] = whiskers(side_values, side_ends) | {"color": FAINT.format(0.5)}
    coordinates = np.stack(points)
    ranges = np.ptp(np.nan_to_num(coordinates), axis=1, keepdims=True)
    places = coordinates / np.maximum(ranges, 1e-12)
    # Points far enough from the previous named point.
    named = [0] if names else []
    for n in range(len(names)):
        if np.linalg.norm(places[:, n] - places[:, named[-1]]) > MOST_APART:
            named.append(n)
    margins = [[""] * len(names) if side_ends is None else hover_texts(side_ends) for side_ends in ends]
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
        **error_bars,
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
    names = [html.escape(f"{n + skipped} {visible_token(token, MOST_LETTERS)}", quote=False) for n, token in enumerate(tokens)]
    labels_of_ends = {0: "first token", last: "last token"}
    # "embed" is the input of block 0.
    places = ["before the first block" if name == "embed" else f"after block {markup(name)}" for name in short_names(layers)]
    places_and_layers = [f"{place}<br>{markup(layer)}" for place, layer in zip(places, layers, strict=True)]
    symbols = ["circle-open", *["circle"] * (len(layers) - 2), "square"]
    sizes = [7] + [4] * (len(layers) - 2) + [8]
    faint = 0.7 if len(tokens) <= MOST_STRONG else 0.35
    # The first and the last token are drawn last, above the others.
    for i in [*range(1, last), *dict.fromkeys((0, last))]:
        is_end = i in labels_of_ends
        colour = ordered_colour(i / max(1, last))
        fig.add_scatter(
            x=coordinates[i, :, 0],
            y=coordinates[i, :, 1],
            mode="lines+markers+text",
            name=f"{labels_of_ends[i]}: {names[i]}" if is_end else names[i],
            showlegend=is_end,
            opacity=1 if is_end else faint,
            line={"color": colour, "width": 3 if is_end else 1.2},
            marker={"size": sizes, "symbol": symbols, "color": colour},
            text=[""] * (len(layers) - 1) + [f"<b>{names[i]}</b>" if is_end else ""],
            textposition="top center",
            cliponaxis=False,
            customdata=[f"token <b>{names[i]}</b><br>{place}" for place in places_and_layers],
            hovertemplate="%{customdata}<extra></extra>",
        )
    for name, symbol in (("first layer", "circle-open"), ("last layer", "square")):
        fig.add_scatter(x=[None], y=[None], mode="markers", marker={"symbol": symbol, "size": 8, "color": GREY}, name=name)
    # A trace without points carries the colour bar.
    marker = {
        "color": [skipped],
        "cmin": skipped,
        "cmax": skipped + max(1, last),
        "colorscale": [[n / 10, ordered_colour(n / 10)] for n in range(11)],
        "showscale": True,
        "colorbar": colour_bar("Position in the prompt") | {"thickness": 12},
    }
    fig.add_scatter(x=[None], y=[None], mode="markers", marker=marker, hoverinfo="skip", showlegend=False)
    shares = [f"PC {n} ({100 * share:.0f} % of variance)" for n, share in enumerate(explained, start=1)]
    # Room for the labels of the first and the last token.
    low = float(np.nanmin(coordinates[..., 0]))
    high = float(np.nanmax(coordinates[..., 0]))
    room = (high - low) / 3 or 1.0
    fig.update_xaxes(title=shares[0], range=[low - room, high + room])
    fig.update_yaxes(title=shares[1], scaleanchor="x", scaleratio=1)
    return styled(fig, title, height=HEIGHT + 130)
