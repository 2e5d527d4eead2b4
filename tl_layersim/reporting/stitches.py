"""Figures of stitches and trainings: losses by step, penalties by batch, and penalties between models by stitch point."""

from __future__ import annotations

import html
from typing import Any

import numpy as np
import plotly.graph_objects as go

from .colour_scales import range_in_words
from .interval_bands import Ends, hover_texts, whiskers
from .labels import axis_title
from .site_labels import short_names
from .style import BLUE, DASHES, FAINT, GREEN, GREY, ORANGE, PALETTE, layer_axis, styled, with_room_for_legend

# Most steps in the moving mean of a training.
SMOOTHED = 25
# Lines that are nearer than the range of all values divided by this are one line on the screen.
SAME = 1000
# Markers of models with themselves.
OWN_SYMBOLS = ("x", "cross", "star", "diamond-open")


def step_curve(losses: Any, title: str, quantity: str, ends: Ends | None = None) -> go.Figure:
    """Loss by training step, and its moving mean.

    Args:
        losses: `step`.
        title: of the figure.
        quantity: title of the vertical axis.
        ends: of the intervals of the losses, shown where the pointer is; None without intervals.
    """
    fig = go.Figure()
    steps = np.arange(1, len(losses) + 1)
    width = min(SMOOTHED, len(losses) // 4)
    each = {"color": FAINT.format(0.45), "width": 1} if width > 1 else {"color": BLUE}
    texts = [""] * len(losses) if ends is None else list(hover_texts(ends))
    hover = {"customdata": texts, "hovertemplate": "step %{x}<br>%{y:.4f}%{customdata}<extra></extra>"}
    fig.add_scatter(
        x=steps,
        y=losses,
        name="training, each step",
        mode="lines" if width > 1 else "lines+markers",
        line=each,
        **hover,
    )
    if width > 1:
        smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
        centre = steps[: len(smooth)] + (width - 1) / 2
        mean = {
            "name": f"training, mean of {width} steps",
            "hovertemplate": "%{y:.4f}<extra>mean of " + f"{width} steps</extra>",
        }
        fig.add_scatter(x=centre, y=smooth, mode="lines", line={"color": BLUE}, **mean)
    fig.update_xaxes(title=axis_title("step"))
    fig.update_yaxes(title=quantity)
    return styled(fig, title).update_layout(showlegend=width > 1)


def learning_curve(losses: Any, loss: float, alone: float, unit: str) -> go.Figure:
    """Loss by training step, its moving mean, and the held-out losses of the stitched model and of the back alone.

    Args:
        losses: `step`.
        loss: of the stitched model on held-out data.
        alone: of the back alone on the same data.
        unit: of a loss.
    """
    fig = step_curve(losses, "Learning curve of the adapter", f"Cross-entropy ({unit})")
    for value, name, dash, colour in (
        (loss, "stitched, held-out", "dash", ORANGE),
        (alone, "back alone, held-out", "dot", GREEN),
    ):
        fig.add_scatter(
            x=[1, max(len(losses), 2)],
            y=[value, value],
            name=f"{name}: {value:.3f}",
            mode="lines",
            line={"dash": dash, "color": colour},
            hoverinfo="name",
        )
    return fig.update_layout(showlegend=True)


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
    numbers = list(range(len(values)))
    ends = [-0.5, len(values) - 0.5]
    if np.isfinite(low):
        band = {"fill": "toself", "fillcolor": FAINT.format(0.15), "line": {"width": 0}, "hoverinfo": "skip"}
        name = f"95 % interval: {range_in_words(low, high, 3)}"
        fig.add_scatter(x=[*ends, *ends[::-1]], y=[high, high, low, low], mode="lines", name=name, **band)
    mean = {"name": f"mean: {middle:.3g}", "hoverinfo": "name"}
    fig.add_scatter(x=ends, y=[middle, middle], mode="lines", line={"color": BLUE}, **mean)
    hover = "batch %{x}<br>%{y:.4f}<extra></extra>"
    fig.add_scatter(x=numbers, y=values, mode="markers", name="each batch", marker={"color": ORANGE}, hovertemplate=hover)
    fig.update_xaxes(title=axis_title("batch"))
    fig.update_yaxes(title=f"Penalty ({unit})", zeroline=True, zerolinecolor="#888888")
    return styled(fig, title)


def directions(
    values: Any, low: Any, high: Any, names: tuple[str, ...], seams: tuple[str, ...], titles: tuple[str, str]
) -> go.Figure:
    """Line plot over stitch points of one value of each stitch, with its interval.

    Each direction between two models has its own colour; a model with itself is dashed and grey. Models whose stitches with
    themselves give the same values, such as 0, share one line.

    Args:
        values: `front back point`.
        low: lower ends of the intervals.
        high: upper ends of the intervals.
        names: of the models.
        seams: names of the stitch points.
        titles: of the figure, and of the vertical axis.
    """
    fig = go.Figure()
    places = np.arange(len(seams))
    pairs, looks = _pairs(len(names))
    own = values[range(len(names)), range(len(names))]
    # Closer than a pixel.
    together = len(names) > 1 and bool(np.allclose(own, own[0], rtol=0, atol=np.ptp(np.nan_to_num(values)) / SAME))
    pairs = pairs[: 1 - len(names)] if together else pairs
    # A little side by side, so that intervals at one point do not hide each other.
    shifts = np.linspace(-0.08, 0.08, len(pairs)) if len(pairs) > 1 else np.zeros(1)
    for (a, b), shift in zip(pairs, shifts, strict=True):
        label = "each into itself" if together and a == b else html.escape(f"{names[a]} into {names[b]}")
        ends = Ends(low, high).at((a, b))
        # Ends that equal the values are those of a field without intervals.
        texts = hover_texts(ends) if bool((ends.low < ends.high).any()) else [""] * len(seams)
        fig.add_scatter(
            x=places + shift,
            y=values[a, b],
            name=label,
            mode="lines+markers",
            line=looks[a, b],
            marker={"symbol": _symbol(a, b), "color": looks[a, b]["color"]},
            error_y=whiskers(values[a, b], ends),
            customdata=list(zip(seams, texts, strict=True)),
            hovertemplate="%{customdata[0]}<br>%{y:.4f}%{customdata[1]}<extra>" + label + "</extra>",
        )
    if all("," not in seam for seam in seams):
        layer_axis(fig.update_xaxes, seams, axis_title("residual"))
    else:
        fig.update_xaxes(tickvals=places, ticktext=_both_sides(seams), title="Stitch point (blocks of front, back)")
    # Near-zero penalties of models with themselves need no room below 0.
    fig.update_yaxes(title=titles[1], rangemode="tozero", zeroline=True, zerolinecolor="#888888")
    fig = styled(fig, titles[0], height=420).update_layout(showlegend=len(pairs) > 1)
    return with_room_for_legend(fig) if len(pairs) > 1 else fig


def _symbol(front: int, back: int) -> str:
    """The marker of a stitch: that of the direction, or one of the model with itself."""
    return OWN_SYMBOLS[front % len(OWN_SYMBOLS)] if front == back else "circle" if front < back else "square-open"


def _both_sides(seams: tuple[str, ...]) -> list[str]:
    """Tick labels of stitch points between different layers: the block of the front and of the back."""
    sides = [tuple(part.strip() for part in seam.split(",")) for seam in seams]
    return [", ".join(short_names(side)) for side in sides]


def _pairs(count: int) -> tuple[list[tuple[int, int]], dict[tuple[int, int], dict[str, Any]]]:
    """Pairs of models in plotting order, both directions of a pair together and self-pairs last; and the line of each."""
    together = [(a, b) for a in range(count) for b in range(a + 1, count)]
    looks = {(a, a): {"color": GREY, "dash": ("dash", "dashdot", "longdash")[a % 3], "width": 1.5} for a in range(count)}
    directed = [pair for a, b in together for pair in ((a, b), (b, a))]
    for number, pair in enumerate(directed):
        dash = DASHES[number // len(PALETTE) % len(DASHES)]
        looks[pair] = {"color": PALETTE[number % len(PALETTE)], "dash": dash}
    return directed + [(a, a) for a in range(count)], looks
