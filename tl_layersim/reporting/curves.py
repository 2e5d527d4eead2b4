"""Figures of curves: fields over layers, thresholds or numbers, quantiles as bands, and singular values."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from .interval_bands import Ends, add_band, point_hover, whiskers
from .labels import axis_title, series_label
from .style import (
    BLUE,
    DASHES,
    GREEN,
    GREY,
    ORANGE,
    PALETTE,
    layer_axis,
    log_axis,
    ordered_colours,
    styled,
    turn_labels,
    with_room_for_legend,
)

# Axes of a result whose labels are layers.
LAYER_AXES = ("row", "column", "residual", "layer", "centre", "skipped", "vision_layer", "text_layer")
# Positive values that span this factor or more stand on a logarithmic axis, where a figure allows one.
LOG_FACTOR = 20
# Most points of a curve that have markers.
MOST_MARKERS = 60
# Most ticks along numbers of singular values, beside the first; and their distances.
MOST_NUMBER_TICKS = 8
STEPS = tuple(factor * 10**power for power in range(9) for factor in (1, 2, 5))
# Marks the traces of reference lines.
REFERENCE = "reference line"
# Opacities of bands of quantiles, the outermost first.
FAN = (0.16, 0.3, 0.4)


class Series(NamedTuple):
    """A line of a figure.

    Attributes:
        label: in the legend.
        values: of the points.
        ends: of the intervals of the values; None without intervals.
        colour: of the line and its band.
        symbol: of the markers, as plotly names it.
        dash: of the line, as plotly names it.
    """

    label: str
    values: Any
    ends: Ends | None = None
    colour: str = BLUE
    symbol: str = "circle"
    dash: str = "solid"


def lines(names: tuple[Any, ...], series: list[Series], title: str, quantity: str, axis: str, log: bool = False) -> go.Figure:
    """Line plot of one or more series over layers, numbers or names. Intervals are bands, and whiskers over names.

    Args:
        names: labels along the axis.
        series: the lines.
        title: of the figure.
        quantity: title of the vertical axis.
        axis: name of the horizontal axis.
        log: whether the vertical axis is logarithmic where all values are positive.
    """
    shown = known_sites(names, np.stack([one.values for one in series]), axis)
    names = names[shown]
    series = [one._replace(values=one.values[shown], ends=one.ends and one.ends.at(shown)) for one in series]
    fig = go.Figure()
    numbers = is_numeric_axis(names, axis)
    x = list(names) if numbers else list(range(len(names)))
    bands = len(names) > 1 and (numbers or axis in LAYER_AXES)
    values = np.stack([one.values for one in series])
    known = values[np.isfinite(values)]
    log = log and bool(len(known)) and bool((known > 0).all())
    for one in series:
        if one.ends is not None and bands:
            ends = on_log_axis(one.ends, one.values) if log else one.ends
            add_band(fig, x, ends, one.colour, legendgroup=one.label)
    for one in series:
        fig.add_scatter(
            x=x,
            y=one.values,
            name=one.label,
            mode="lines+markers" if bands and len(names) <= MOST_MARKERS else "lines" if bands else "markers",
            line={"color": one.colour, "dash": one.dash},
            marker={"symbol": one.symbol, "color": one.colour},
            # Markers at 0 stand on the axis, whole.
            cliponaxis=False,
            **point_hover(list(names), one.ends, one.label),
            **({} if one.ends is None else {"legendgroup": one.label}),
            **({"error_y": whiskers(one.values, one.ends)} if one.ends is not None and not bands else {}),
        )
    label_axis(fig, names, axis)
    if log:
        fig.update_yaxes(title=quantity, **log_axis(float(known.min()), float(known.max())))
    else:
        # A few curves without negative values start at 0: a cut axis makes a ripple look like a fall.
        from_zero = bool((np.nan_to_num(values) >= 0).all()) and len(series) < 4
        fig.update_yaxes(title=quantity, rangemode="tozero" if from_zero else "normal")
    return styled(fig, title).update_layout(showlegend=len(series) > 1)


def known_sites(names: tuple[Any, ...], values: Any, axis: str) -> slice:
    """The sites from the first to the last at which any series is known: all, if none is, or the axis has no sites.

    Args:
        names: labels along the axis.
        values: `series point`.
        axis: its name.
    """
    known = np.flatnonzero(np.isfinite(values).any(axis=0))
    return slice(int(known[0]), int(known[-1]) + 1) if axis in LAYER_AXES and len(known) else slice(0, len(names))


def with_least_span(fig: go.Figure, bounds: tuple[float, float]) -> go.Figure:
    """The line plot of a bounded quantity, with a vertical axis of at least a tenth of the bounds: noise is no dip.

    Args:
        fig: of lines; heatmaps, and axes that begin at 0 or are logarithmic, stay as they are.
        bounds: of the quantity, infinite where there is none.
    """
    axis = fig.layout.yaxis
    if not np.isfinite(bounds).all() or axis.rangemode == "tozero" or axis.type == "log" or axis.range is not None:
        return fig
    if any(trace.type != "scatter" for trace in fig.data):
        return fig
    drawn = [float(y) for trace in fig.data for y in np.asarray(trace.y, dtype=float)]
    known = [y for y in drawn if math.isfinite(y)]
    least = (bounds[1] - bounds[0]) / 10
    if not known or max(known) - min(known) >= least:
        return fig
    middle = float(np.clip((max(known) + min(known)) / 2, bounds[0] + least / 2, bounds[1] - least / 2))
    return fig.update_yaxes(range=[middle - 0.53 * least, middle + 0.53 * least])


def from_lower_bound(fig: go.Figure, low: float) -> go.Figure:
    """The line plot of a quantity with a positive lower bound, on a vertical axis from a little below the bound.

    Args:
        fig: of lines; heatmaps, and axes that do not begin at 0, stay as they are.
        low: the bound, such as 1 for a ratio that is at least 1; infinite where there is none.
    """
    if not 0 < low < math.inf or fig.layout.yaxis.rangemode != "tozero" or any(trace.type != "scatter" for trace in fig.data):
        return fig
    bars = [0.0 if trace.error_y.array is None else trace.error_y.array for trace in fig.data]
    drawn = [np.asarray(trace.y, dtype=float) + np.nan_to_num(bar) for trace, bar in zip(fig.data, bars, strict=True)]
    high = max([float(y) for y in np.concatenate(drawn) if math.isfinite(y)], default=low)
    span = (high - low) or 1.0
    # Of values far above the bound, a twentieth of the axis would reach below 0.
    return fig.update_yaxes(range=[max(0.0, low - 0.05 * span), high + 0.08 * span])


def is_numeric_axis(names: tuple[Any, ...], axis: str) -> bool:
    """Whether the labels of an axis are positions along it; classes are names, even where they are numbers.

    Args:
        names: labels along the axis.
        axis: its name.
    """
    return axis not in (*LAYER_AXES, "label") and all(isinstance(name, int | float) for name in names)


def label_axis(fig: go.Figure, names: tuple[Any, ...], axis: str) -> None:
    """Title and ticks of the horizontal axis.

    Args:
        fig: whose axis.
        names: labels along the axis.
        axis: its name.
    """
    if axis in LAYER_AXES:
        after = not names or names[0].endswith("resid_pre")
        own = axis if axis in ("centre", "skipped", "vision_layer", "text_layer") else "residual" if after else "layer"
        layer_axis(fig.update_xaxes, names, axis_title(own))
        turn_labels(fig, names)
    elif is_numeric_axis(names, axis):
        fig.update_xaxes(title=axis_title(axis))
    else:
        ticks = {"tickmode": "array", "tickvals": list(range(len(names))), "ticktext": [str(name) for name in names]}
        # No point of a few names stands at the edge.
        edges = {"range": [-0.5, len(names) - 0.5]} if names else {}
        fig.update_xaxes(title=axis_title(axis), **ticks, **edges)


def on_log_axis(ends: Ends, values: Any) -> Ends:
    """The ends on a logarithmic axis, which has no 0: there the lower ends are half the smallest positive value.

    Args:
        ends: of the intervals.
        values: of the points.
    """
    above = [number for number in (*values, *ends.low) if number > 0]
    return Ends(np.where(ends.low <= 0, min(above, default=1.0) / 2, ends.low), ends.high)


def with_baseline(fig: go.Figure, name: str, value: float, dash: str = "dash") -> go.Figure:
    """The line plot with one more horizontal reference line.

    Args:
        fig: of one series.
        name: of the line.
        value: at which it stands.
        dash: of the line, as plotly names it.
    """
    places = list(fig.data[-1].x)
    # The vertical axis names the curve: the legend is for such lines alone.
    fig.update_traces(showlegend=False, selector=lambda trace: trace.meta != REFERENCE)
    ends = {"x": [places[0], places[-1]], "y": [value, value], "meta": REFERENCE}
    fig.add_scatter(**ends, name=f"{name}: {value:.4g}", mode="lines", line={"color": GREY, "width": 1.5, "dash": dash})
    return fig.update_layout(showlegend=True)


def quantile_lines(
    levels: tuple[float, ...], names: tuple[Any, ...], values: Any, titles: tuple[str, str], axis: str, ends: Ends | None
) -> go.Figure:
    """Quantiles over tokens as bands around the median, over layers. Intervals of the median are whiskers.

    Args:
        levels: of the quantiles.
        names: labels along the axis.
        values: `quantile layer`.
        titles: of the figure, and of the vertical axis.
        axis: name of the horizontal axis.
        ends: of the intervals of the values; None without intervals.
    """
    shown = known_sites(names, values, axis)
    names, values, ends = names[shown], values[:, shown], ends and ends.at((slice(None), shown))
    fig = go.Figure()
    add_fan(fig, list(range(len(names))), (levels, names), values, ends, BLUE)
    label_axis(fig, names, axis)
    fig.update_yaxes(title=titles[1], rangemode="tozero" if bool((np.nan_to_num(values) >= 0).all()) else "normal")
    return styled(fig, titles[0])


def add_fan(
    fig: go.Figure,
    x: list[int],
    labels: tuple[tuple[float, ...], tuple[Any, ...]],
    values: Any,
    ends: Ends | None,
    colour: str,
    name: str = "",
    **place: Any,
) -> None:
    """Add quantiles as nested bands, and the one nearest to the median as a line.

    Args:
        fig: the figure.
        x: of the points.
        labels: levels of the quantiles, in ascending order, and names of the points.
        values: `quantile point`.
        ends: of the intervals of the values; None without intervals.
        colour: as "#rrggbb".
        name: of the line in the legend, in which bands then have no entry; by default "median", and an entry for each band.
        **place: `row` and `col` of a panel.
    """
    levels, names = labels
    middle = min(range(len(levels)), key=lambda n: abs(levels[n] - 0.5))
    pairs = [(n, len(levels) - 1 - n) for n in range(len(levels) // 2)]
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    for number, pair in enumerate(pairs):
        alpha = FAN[min(number, len(FAN) - 1)]
        for n in pair:
            label, upper = series_label("quantile", levels[n]), n == pair[1]
            fig.add_scatter(
                x=x,
                y=values[n],
                name=f"{levels[pair[0]]:.0%} to {levels[pair[1]]:.0%} of tokens" if upper else label,
                mode="lines",
                line={"width": 0.5, "color": f"rgba({red}, {green}, {blue}, 0.4)"},
                **({"fill": "tonexty", "fillcolor": f"rgba({red}, {green}, {blue}, {alpha})"} if upper else {}),
                legendgroup=name or f"{number}",
                showlegend=upper and not name,
                **point_hover(list(names), None if ends is None else ends.at(n), f"{name} {label}".strip()),
                **place,
            )
    own = None if ends is None else ends.at(middle)
    label = "median" if levels[middle] == 0.5 else series_label("quantile", levels[middle])
    fig.add_scatter(
        x=x,
        y=values[middle],
        name=name or label,
        mode="lines+markers",
        legendgroup=name or label,
        line={"color": colour},
        marker={"color": colour},
        **point_hover(list(names), own, f"{name} {label}".strip()),
        **({} if own is None else {"error_y": whiskers(values[middle], own)}),
        **place,
    )


def sublayer_lines(names: tuple[str, ...], values: Any, title: str, quantity: str, ends: Ends | None = None) -> go.Figure:
    """Line plot over blocks of one value of each sublayer: one line for each of attention, attention to an encoder, and MLP.

    Args:
        names: of the sites of sublayers, such as `blocks.0.hook_attn_out`.
        values: `sublayer`.
        title: of the figure.
        quantity: title of the vertical axis.
        ends: of the intervals of the values; None without intervals.
    """
    fig = go.Figure()
    known = values[np.isfinite(values)]
    # The MLP of the first block often multiplies the norm, and would flatten all other values on a linear axis.
    wide = len(known) > 0 and bool(known.min() > 0) and bool(known.max() > LOG_FACTOR * known.min())
    drawn = on_log_axis(ends, values) if ends is not None and wide else ends
    blocks = tuple(dict.fromkeys(name.rsplit(".", 1)[0] for name in names))
    kinds = (
        ("attn", "Attention", BLUE, "circle"),
        ("cross_attn", "Attention to the encoder", GREEN, "diamond"),
        ("mlp", "MLP", ORANGE, "square"),
    )
    for kind, label, colour, symbol in kinds:
        chosen = [n for n, name in enumerate(names) if name.endswith(f".hook_{kind}_out")]
        if not chosen:
            continue
        x = [blocks.index(names[n].rsplit(".", 1)[0]) for n in chosen]
        if drawn is not None:
            add_band(fig, x, drawn.at(chosen), colour, legendgroup=label)
        fig.add_scatter(
            x=x,
            y=values[chosen],
            name=label,
            mode="lines+markers",
            line={"color": colour},
            marker={"color": colour, "symbol": symbol},
            **point_hover([names[n] for n in chosen], None if ends is None else ends.at(chosen), label),
            **({} if ends is None else {"legendgroup": label}),
        )
    layer_axis(fig.update_xaxes, tuple(f"{block}.hook_resid_post" for block in blocks), axis_title("layer"))
    # Cosines have a line at 0.
    zero = {"rangemode": "tozero", "zeroline": True, "zerolinecolor": "#888888"}
    fig.update_yaxes(title=quantity, **(log_axis(float(known.min()), float(known.max())) if wide else zero))
    return styled(fig, title)


def spectra(values: Any, labels: list[str]) -> go.Figure:
    """Singular values by number, on a logarithmic axis: a colour for each block, and a dash for each pair of tokens.

    Args:
        values: `block pair direction`.
        labels: of all pairs of the first block, then of the second, and so on.
    """
    fig = go.Figure()
    blocks, pairs, count = values.shape
    colours = PALETTE[:blocks] if blocks <= len(PALETTE) else ordered_colours(blocks)
    looks = [(colours[block], DASHES[pair % len(DASHES)]) for block in range(blocks) for pair in range(pairs)]
    for label, row, (colour, dash) in zip(labels, values.reshape(-1, count), looks, strict=True):
        hover = "number %{x}<br>%{y:.4g}<extra>" + label + "</extra>"
        positive, line = np.where(row > 0, row, np.nan), {"color": colour, "dash": dash}
        fig.add_scatter(x=list(range(1, count + 1)), y=positive, name=label, mode="lines", line=line, hovertemplate=hover)
    known = values[values > 0]
    step = next(step for step in STEPS if count <= step * MOST_NUMBER_TICKS)
    ticks = [1, *range(step if step > 1 else 2, count + 1, step)]
    fig.update_xaxes(title=axis_title("direction"), tickmode="array", tickvals=ticks, range=[1 - count / 50, count * 1.02])
    fig.update_yaxes(title="Singular value", **(log_axis(float(known.min()), float(known.max())) if len(known) else {}))
    return with_room_for_legend(styled(fig, "Singular values of the Jacobians").update_layout(showlegend=True))
