"""Figures of curves: fields over layers or thresholds, spectra, trainings, regressions, batches and stitches."""

from __future__ import annotations

import html
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
from plotly.colors import qualitative, sample_colorscale

from .interval_bands import Ends, add_band, point_hover, whiskers
from .labels import axis_title
from .site_labels import short_names
from .style import BLUE, BUTTONS, FAINT, GREEN, ORANGE, SOLID, layer_axis, styled, turn_labels

# Most points of a regression that carry their names.
MOST_NAMES = 24
# Axes of a result whose labels are layers.
LAYER_AXES = ("row", "column", "residual", "layer", "centre", "skipped", "vision_layer", "text_layer")


class Series(NamedTuple):
    """A line of a figure.

    Attributes:
        label: in the legend.
        values: of the points.
        strength: opacity of the line.
        ends: of the intervals of the values; None without intervals.
        drawn: whether the intervals are drawn, and not only shown where the pointer is.
    """

    label: str
    values: Any
    strength: float
    ends: Ends | None = None
    drawn: bool = True


def lines(names: tuple[Any, ...], series: list[Series], title: str, quantity: str, axis: str, log: bool = False) -> go.Figure:
    """Line plot of one or more series over layers, numbers or names. Intervals are bands, and whiskers over names.

    Args:
        names: labels along the axis.
        series: the lines.
        title: of the figure.
        quantity: title of the vertical axis.
        axis: name of the horizontal axis.
        log: whether the vertical axis is logarithmic.
    """
    fig = go.Figure()
    # Classes are names, even where they are numbers.
    numbers = axis not in (*LAYER_AXES, "label") and all(isinstance(name, int | float) for name in names)
    x = list(names) if numbers else list(range(len(names)))
    bands = len(names) > 1 and (numbers or axis in LAYER_AXES)
    for one in series:
        if one.ends is not None and one.drawn and bands:
            ends = _on_log_axis(one.ends, one.values) if log else one.ends
            add_band(fig, x, ends, BLUE, one.strength, legendgroup=one.label)
    for one in series:
        fig.add_scatter(
            x=x,
            y=one.values,
            name=one.label,
            mode="lines+markers",
            line={
                "color": BLUE if one.strength == 1.0 else FAINT.format(round(one.strength, 2)),
                "width": 2.5 if one.strength == 1.0 else 1.5,
            },
            marker={"size": 5},
            **point_hover(list(names), one.ends, one.label),
            **({} if one.ends is None else {"legendgroup": one.label}),
            **({"error_y": whiskers(one.values, one.ends)} if one.ends is not None and one.drawn and not bands else {}),
        )
    if axis in LAYER_AXES:
        after = not names or names[0].endswith("resid_pre")
        own = axis if axis in ("skipped", "vision_layer", "text_layer") else "residual" if after else "layer"
        layer_axis(fig.update_xaxes, names, axis_title(own))
        turn_labels(fig, names)
    elif numbers:
        fig.update_xaxes(title=axis_title(axis))
    else:
        ticks = {"tickmode": "array", "tickvals": list(range(len(names))), "ticktext": [str(name) for name in names]}
        fig.update_xaxes(title=axis_title(axis), **ticks)
    # A few curves without negative values start at 0: a cut axis makes a ripple look like a fall.
    from_zero = bool((np.nan_to_num(np.stack([one.values for one in series])) >= 0).all()) and len(series) < 4 and not log
    fig.update_yaxes(title=quantity, rangemode="tozero" if from_zero else "normal", **({"type": "log"} if log else {}))
    styled(fig, title, height=420, width=620).update_layout(showlegend=len(series) > 1)
    if fig.layout.xaxis.tickangle:
        # Turned labels would reach into the legend.
        fig.update_layout(height=460 + BUTTONS, legend_y=-0.36)
    return fig


def _on_log_axis(ends: Ends, values: Any) -> Ends:
    """The ends on a logarithmic axis, which has no 0: there the lower ends are half the smallest positive value."""
    above = [number for number in (*values, *ends.low) if number > 0]
    return Ends(np.where(ends.low <= 0, min(above, default=1.0) / 2, ends.low), ends.high)


def with_baseline(fig: go.Figure, name: str, value: float) -> go.Figure:
    """The line plot with a dashed horizontal line.

    Args:
        fig: of one series.
        name: of the line.
        value: at which it stands.
    """
    places = list(fig.data[-1].x)
    ends = {"x": [places[0], places[-1]], "y": [value, value]}
    dashed = {"color": "grey", "width": 1.5, "dash": "dash"}
    fig.add_scatter(**ends, name=f"{name}: {value:.3f}", mode="lines", line=dashed)
    return fig.update_layout(showlegend=True)


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
    wide = len(known) > 0 and bool(known.min() > 0) and bool(known.max() > 20 * known.min())
    drawn = _on_log_axis(ends, values) if ends is not None and wide else ends
    blocks = tuple(dict.fromkeys(name.rsplit(".", 1)[0] for name in names))
    kinds = (("attn", "Attention", BLUE), ("cross_attn", "Attention to the encoder", GREEN), ("mlp", "MLP", ORANGE))
    for kind, label, colour in kinds:
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
            line={"color": colour, "width": 2},
            marker={"size": 6, "symbol": "circle" if kind == "attn" else "square"},
            **point_hover([names[n] for n in chosen], None if ends is None else ends.at(chosen), label),
            **({} if ends is None else {"legendgroup": label}),
        )
    layer_axis(fig.update_xaxes, tuple(f"{block}.hook_resid_post" for block in blocks), axis_title("layer"))
    # Cosines have a line at 0.
    shape: dict[str, Any] = {"rangemode": "tozero", "zerolinecolor": "#888"}
    if wide:
        ticks = [step * 10.0**decade for decade in range(-12, 13) for step in (1, 2, 5)]
        shape = {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
    fig.update_yaxes(title=quantity, **shape)
    return styled(fig, title, height=420, width=620)


def spectra(values: Any, labels: list[str]) -> go.Figure:
    """Singular values by number, on a logarithmic axis.

    Args:
        values: `series direction`.
        labels: of the series.
    """
    fig = go.Figure()
    numbers = list(range(1, values.shape[1] + 1))
    for n, (label, row) in enumerate(zip(labels, values, strict=True)):
        [colour] = sample_colorscale("Viridis", [0.9 * n / max(1, len(labels) - 1)])
        fig.add_scatter(x=numbers, y=np.where(row > 0, row, np.nan), name=label, line={"color": colour, "width": 1.5})
    fig.update_xaxes(title=axis_title("direction"))
    fig.update_yaxes(title="Singular value", type="log")
    return styled(fig, "Singular values of the Jacobians", height=420, width=720)


def regression(x: Any, y: Any, names: list[str], line: dict[str, Any], titles: tuple[str, str, str]) -> go.Figure:
    """Points with their names, the line through them, and its confidence band.

    Args:
        x: of the points.
        y: of the points.
        names: of the points.
        line: `x`, `fit`, `low` and `high` of the line and its band.
        titles: of the figure and its two axes.
    """
    fig = go.Figure()
    band = {"mode": "lines", "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
    fig.add_scatter(x=line["x"], y=line["high"], **band)
    fig.add_scatter(x=line["x"], y=line["low"], fill="tonexty", fillcolor=FAINT.format(0.15), **band)
    fig.add_scatter(x=line["x"], y=line["fit"], mode="lines", line=SOLID, hoverinfo="skip")
    few = len(names) <= MOST_NAMES
    hover = "%{text}<br>%{x:.4g}, %{y:.4g}<extra></extra>"
    points = {"mode": "markers+text" if few else "markers", "textposition": "top center", "hovertemplate": hover}
    marker = {"size": 8 if few else 5, "color": BLUE}
    fig.add_scatter(x=x, y=y, text=[html.escape(name) for name in names], marker=marker, cliponaxis=False, **points)
    fig.update_layout(showlegend=False)
    fig.update_xaxes(title=titles[1])
    fig.update_yaxes(title=titles[2])
    return styled(fig, titles[0], height=460, width=620)


def learning_curve(losses: Any, loss: float, alone: float, unit: str) -> go.Figure:
    """Loss by training step, its moving mean, and the held-out losses of the stitched model and of the back alone.

    Args:
        losses: `step`.
        loss: of the stitched model on held-out data.
        alone: of the back alone on the same data.
        unit: of a loss.
    """
    fig = go.Figure()
    steps = np.arange(1, len(losses) + 1)
    fig.add_scatter(x=steps, y=losses, name="each step", mode="lines", line={"color": FAINT.format(0.4), "width": 1})
    width = min(25, len(losses) // 4)
    if width > 1:
        smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
        centre = steps[: len(smooth)] + (width - 1) / 2
        fig.add_scatter(x=centre, y=smooth, name=f"mean of {width} steps", mode="lines", line=SOLID)
    for value, name, dash in ((loss, "stitched, held-out", "dot"), (alone, "back alone, held-out", "dash")):
        fig.add_scatter(
            x=[1, max(len(losses), 2)],
            y=[value, value],
            name=f"{name}: {value:.3f}",
            mode="lines",
            line={"dash": dash, "color": "#444", "width": 1.5},
        )
    fig.update_xaxes(title=axis_title("step"))
    fig.update_yaxes(title=f"Loss ({unit})")
    return styled(fig, "Learning curve of the adapter", height=420, width=720)


def over_groups(values: Any, interval: tuple[float, float, float], title: str, unit: str) -> go.Figure:
    """The penalty of each batch, with the mean as a line and its interval as a band.

    Args:
        values: `batch`.
        interval: the mean, and the lower and upper end of its interval.
        title: of the figure.
        unit: of the values.
    """
    fig = go.Figure()
    middle, low, high = interval
    numbers = np.arange(len(values))
    if np.isfinite(low):
        fig.add_hrect(y0=low, y1=high, fillcolor=FAINT.format(0.15), line_width=0)
    fig.add_hline(y=middle, line={"color": BLUE, "width": 1.5}, annotation_text=f"{middle:.4g}")
    fig.add_scatter(x=numbers, y=values, mode="markers", name="each batch", marker={"color": BLUE, "size": 6})
    fig.update_xaxes(title=axis_title("batch"))
    fig.update_yaxes(title=f"Penalty ({unit})")
    return styled(fig, title, height=420, width=720)


def directions(
    values: Any, low: Any, high: Any, names: tuple[str, ...], seams: tuple[str, ...], title: str, unit: str
) -> go.Figure:
    """Line plot over stitch points of one value of each stitch, with its interval.

    Two models have one colour, solid in one direction and dotted in the other; a model with itself is dashed and grey.

    Args:
        values: `front back point`.
        low: lower ends of the intervals.
        high: upper ends of the intervals.
        names: of the models.
        seams: names of the stitch points.
        title: of the figure.
        unit: of the values.
    """
    fig = go.Figure()
    places = np.arange(len(seams))
    pairs, colours = _pairs(len(names))
    # A little side by side, so that intervals at one point do not hide each other.
    shifts = np.linspace(-0.05, 0.05, len(pairs)) if len(pairs) > 1 else np.zeros(1)
    for (a, b), shift in zip(pairs, shifts, strict=True):
        label = f"{names[a]} into {names[b]}"
        dash = "dash" if a == b else "solid" if a < b else "dot"
        fig.add_scatter(
            x=places + shift,
            y=values[a, b],
            name=label,
            mode="lines+markers",
            line={"color": colours[a, b], "dash": dash, "width": 1.5 if a == b else 2},
            marker={"symbol": "x" if a == b else "circle" if a < b else "circle-open", "size": 7},
            error_y=whiskers(values[a, b], Ends(low, high).at((a, b))),
            customdata=[[seam] for seam in seams],
            hovertemplate="%{customdata[0]}<br>%{y:.4f}<extra>" + html.escape(label) + "</extra>",
        )
    one_name = all("," not in seam for seam in seams)
    fig.update_xaxes(tickvals=places, ticktext=short_names(seams) if one_name else list(seams), title="After block")
    name = title.split(":")[0]
    fig.update_yaxes(title=f"{name[:1].upper()}{name[1:]} ({unit})", rangemode="tozero")
    return styled(fig, title, height=480, width=760)


def _pairs(count: int) -> tuple[list[tuple[int, int]], dict[tuple[int, int], str]]:
    """Pairs of models in plotting order, both directions of a pair together and self-pairs last; and a colour for each."""
    together = [(a, b) for a in range(count) for b in range(a + 1, count)]
    greys = ["#333", "#777", "#999", "#bbb"]
    colours = {(a, a): greys[a % len(greys)] for a in range(count)}
    for number, (a, b) in enumerate(together):
        colours[a, b] = colours[b, a] = qualitative.D3[number % len(qualitative.D3)]
    return [pair for a, b in together for pair in ((a, b), (b, a))] + [(a, a) for a in range(count)], colours
