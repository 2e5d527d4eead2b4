"""Lines of stitches between models, by stitch point."""

from __future__ import annotations

import html
from typing import Any

import numpy as np
import plotly.graph_objects as go

from .interval_bands import Ends, hover_texts, whiskers
from .site_labels import axis_title, short_names
from .style import DASHES, GREY, PALETTE, layer_axis, styled, with_room_for_legend

# Lines that are nearer than the range of all values divided by this are one line on the screen.
SAME = 1000
# Markers of models with themselves.
OWN_SYMBOLS = ("x", "cross", "star", "diamond-open")


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
