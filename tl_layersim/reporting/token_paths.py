"""Figure of the paths of one prompt's tokens through the layers, with labels that do not overlap."""

from __future__ import annotations

import html
from typing import Any

import numpy as np
import plotly.graph_objects as go

from .site_labels import short_names
from .style import GREY, WIDTH, colour_bar, ordered_colour, styled
from .tokens import visible_token

# Pixels beside the plot, of which the right ones are of the colour bar; of the plot.
LEFT, RIGHT = 64, 84
PLOT = (WIDTH - LEFT - RIGHT, 400)
# Pixels of a letter and of a line of a label, and between a point and its label; points of a path's segment that labels avoid.
LETTER, LINE, GAP, PER_SEGMENT = 6.6, 14, 6, 32
# Most letters of a token and of its number in a label, and most labels.
LETTERS, MOST_LABELS = 14, 24
# Tokens beyond which paths are fainter.
MOST_STRONG = 25
# Places of a label beside its point: plotly's name, and the place of its middle in widths, lines and gaps from the point.
PLACES = {
    "middle right": (0.5, 0.0, 1, 0),
    "middle left": (-0.5, 0.0, -1, 0),
    "top center": (0.0, 0.5, 0, 1),
    "bottom center": (0.0, -0.5, 0, -1),
    "top right": (0.5, 0.5, 1, 0),
    "top left": (-0.5, 0.5, -1, 0),
    "bottom right": (0.5, -0.5, 1, 0),
    "bottom left": (-0.5, -0.5, -1, 0),
}


def token_paths(
    coordinates: Any, explained: list[float], tokens: tuple[str, ...], layers: tuple[str, ...], skipped: int = 0
) -> go.Figure:
    """Paths of tokens in the plane of two principal components, coloured by position; the first and the last are thick.

    Args:
        coordinates: `token layer 2`.
        explained: fraction of the last layer's variance along each component.
        tokens: of the prompt.
        layers: names of the residual layers.
        skipped: number of positions of the prompt before the first of these tokens.
    """
    fig = go.Figure()
    last = len(tokens) - 1
    plain = [f"{n + skipped} {visible_token(token, LETTERS)}" for n, token in enumerate(tokens)]
    names = [html.escape(name, quote=False) for name in plain]
    looks = {0: f"first token: {names[0]}", last: f"last token: {names[last]}"}
    faint = 0.7 if len(tokens) <= MOST_STRONG else 0.35
    places = short_names(layers)
    # The first and the last token are drawn last, above the others.
    for i in [*range(1, last), 0, last]:
        label, colour = looks.get(i, ""), ordered_colour(i / max(1, last))
        at = [("before the first block" if n == 0 else f"after block {place}") for n, place in enumerate(places)]
        fig.add_scatter(
            x=coordinates[i, :, 0],
            y=coordinates[i, :, 1],
            mode="lines+markers",
            name=label or names[i],
            showlegend=bool(label),
            opacity=1 if label else faint,
            line={"color": colour, "width": 3 if label else 1.2},
            marker={"size": [7] + [4] * (len(layers) - 2) + [8], "symbol": _symbols(len(layers)), "color": colour},
            customdata=[f"token <b>{names[i]}</b><br>{where}<br>{name}" for where, name in zip(at, layers, strict=True)],
            hovertemplate="%{customdata}<extra></extra>",
        )
    for name, symbol in (("first layer", "circle-open"), ("last layer", "square")):
        marker = {"symbol": symbol, "size": 8, "color": GREY}
        fig.add_scatter(x=[None], y=[None], mode="markers", marker=marker, name=name)
    ranges = [_range(coordinates[..., n], side) for n, side in enumerate(PLOT)]
    ends = coordinates[:, -1]
    placed = _placed(_pixels(ends, ranges), [len(name) for name in plain], _pixels(_along(coordinates), ranges))
    if placed:
        shown = list(placed)
        fig.add_scatter(
            x=ends[shown, 0],
            y=ends[shown, 1],
            mode="text",
            # The first and the last token are bold. A space between the point and a label beside it.
            text=[
                f"\u2002{text}" if "right" in placed[n] else f"{text}\u2002" if "left" in placed[n] else text
                for n, text in ((n, f"<b>{names[n]}</b>" if n in looks else names[n]) for n in shown)
            ],
            textposition=[placed[n] for n in shown],
            textfont={"size": 12, "color": "#333333"},
            hoverinfo="skip",
            showlegend=False,
            cliponaxis=False,
        )
    fig.update_xaxes(title=f"Principal component 1 ({explained[0]:.0%} of the last layer's variance)", range=ranges[0])
    fig.update_yaxes(title=f"Principal component 2 ({explained[1]:.0%})", range=ranges[1])
    _position_bar(fig, skipped, last)
    fig = styled(fig, "Paths of tokens through the layers", height=PLOT[1] + 130)
    return fig.update_layout(margin_b=90, margin_l=LEFT, margin_r=RIGHT)


def _position_bar(fig: go.Figure, first: int, count: int) -> None:
    """A colour bar of the tokens' positions, from the first to `count` tokens after it."""
    scale = [[n / 10, ordered_colour(n / 10)] for n in range(11)]
    ticks = sorted({first + round(count * n / 5) for n in range(6)})
    bar = colour_bar("Position in the prompt") | {"tickmode": "array", "tickvals": ticks, "ticktext": [str(n) for n in ticks]}
    marker = {"color": [first], "cmin": first, "cmax": first + max(1, count), "colorscale": scale, "showscale": True}
    fig.add_scatter(
        x=[None],
        y=[None],
        mode="markers",
        marker=marker | {"colorbar": bar | {"thickness": 12}},
        hoverinfo="skip",
        showlegend=False,
    )


def _along(coordinates: Any) -> Any:
    """Points along all paths, `point 2`."""
    steps = np.linspace(0, 1, PER_SEGMENT)[:, None, None, None]
    return (coordinates[:, :-1] * (1 - steps) + coordinates[:, 1:] * steps).reshape(-1, 2)


def _symbols(layers: int) -> list[str]:
    """An open circle at the first layer, a square at the last, and dots between them."""
    return ["circle-open", *["circle"] * (layers - 2), "square"]


def _range(values: Any, pixels: int) -> list[float]:
    """The range of an axis with room for labels at its ends."""
    low, high = float(values.min()), float(values.max())
    room = 0.5 * LETTER * (LETTERS + 3) / pixels * ((high - low) or 1.0)
    return [low - room, high + room]


def _pixels(points: Any, ranges: list[list[float]]) -> Any:
    """Points of the plot in pixels, from its lower left corner."""
    low = np.array([own[0] for own in ranges])
    span = np.array([own[1] - own[0] for own in ranges])
    return (points - low) / span * np.array(PLOT)


def _placed(points: Any, letters: list[int], paths: Any) -> dict[int, str]:
    """The place of each label that overlaps no other label and no other end of a path; others are left out.

    The last token comes first, then the first one, then those at the edge of the figure. Of several places, a label takes the
    one on which the fewest points of paths lie.

    Args:
        points: `token 2`, ends of the paths in pixels.
        letters: `token`, lengths of the labels.
        paths: `point 2`, points along all paths in pixels.
    """
    away = np.linalg.norm(points - points.mean(0), axis=1)
    first = [len(points) - 1, 0]
    order = first + [int(n) for n in np.argsort(-away) if int(n) not in first]
    taken: list[tuple[float, float, float, float]] = []
    found: dict[int, str] = {}
    for n in order:
        if len(found) == MOST_LABELS:
            break
        width = letters[n] * LETTER
        free: list[tuple[int, str, tuple[float, float, float, float]]] = []
        for place, (right, up, gap_x, gap_y) in PLACES.items():
            x = points[n, 0] + right * width + gap_x * GAP
            y = points[n, 1] + up * LINE + gap_y * GAP
            box = (x - width / 2, y - LINE / 2, x + width / 2, y + LINE / 2)
            inside = box[0] > 0 and box[1] > 0 and box[2] < PLOT[0] and box[3] < PLOT[1]
            covered = [m for m in range(len(points)) if m != n and _holds(box, points[m])]
            if inside and not covered and not any(_overlap(box, other) for other in taken):
                free.append((_points_in(box, paths), place, box))
        if free:
            _, found[n], box = min(free, key=lambda one: one[0])
            taken.append(box)
    return found


def _holds(box: tuple[float, float, float, float], point: Any) -> bool:
    return bool(box[0] < point[0] < box[2] and box[1] < point[1] < box[3])


def _points_in(box: tuple[float, float, float, float], points: Any) -> int:
    x, y = points.T
    return int(((box[0] < x) & (x < box[2]) & (box[1] < y) & (y < box[3])).sum())


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
