"""Figure of the paths of one prompt's tokens through the layers, with labels that do not overlap."""

from __future__ import annotations

import html
from typing import Any

import numpy as np
import plotly.graph_objects as go

from .site_labels import short_names
from .style import DARK, FAINT, GREY, ORANGE, WIDTH, styled
from .tokens import visible_token

# Pixels of the plot, of a letter and of a line of a label, and between a point and its label.
PLOT, LETTER, LINE, GAP = (WIDTH - 88, 400), 6.6, 14, 6
# Most letters of a label, and most labels.
LETTERS, MOST_LABELS = 14, 24
# Tokens beyond which paths are fainter.
MANY = 25
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


def token_paths(coordinates: Any, explained: list[float], tokens: tuple[str, ...], layers: tuple[str, ...]) -> go.Figure:
    """Paths of tokens in the plane of two principal components; the first token's and the last token's stand out.

    Args:
        coordinates: `token layer 2`.
        explained: fraction of the last layer's variance along each component.
        tokens: of the prompt.
        layers: names of the residual layers.
    """
    fig = go.Figure()
    last = len(tokens) - 1
    names = [html.escape(visible_token(token, LETTERS), quote=False) for token in tokens]
    looks = {0: (ORANGE, 2.5, f"first token: {names[0]}"), last: (DARK, 2.5, f"last token: {names[last]}")}
    faint = (FAINT.format(0.45 if len(tokens) <= MANY else 0.25), 1.2, "")
    places = short_names(layers)
    # The first and the last token are drawn last, above the others.
    for i in [*range(1, last), 0, last]:
        colour, width, label = looks.get(i, faint)
        at = [("before the first block" if n == 0 else f"after block {place}") for n, place in enumerate(places)]
        fig.add_scatter(
            x=coordinates[i, :, 0],
            y=coordinates[i, :, 1],
            mode="lines+markers",
            name=label or names[i],
            showlegend=bool(label),
            line={"color": colour, "width": width},
            marker={"size": [7] + [4] * (len(layers) - 2) + [8], "symbol": _symbols(len(layers)), "color": colour},
            customdata=[f"token {i}: <b>{names[i]}</b><br>{where}<br>{name}" for where, name in zip(at, layers, strict=True)],
            hovertemplate="%{customdata}<extra></extra>",
        )
    for name, symbol in (("first layer", "circle-open"), ("last layer", "square")):
        marker = {"symbol": symbol, "size": 8, "color": GREY}
        fig.add_scatter(x=[None], y=[None], mode="markers", marker=marker, name=name)
    ranges = [_range(coordinates[..., n], side) for n, side in enumerate(PLOT)]
    ends = coordinates[:, -1]
    placed = _placed(_pixels(ends, ranges), [len(visible_token(token, LETTERS)) for token in tokens])
    if placed:
        shown = list(placed)
        fig.add_scatter(
            x=ends[shown, 0],
            y=ends[shown, 1],
            mode="text",
            # A space between the point and a label beside it.
            text=[
                f"\u2002{names[n]}" if "right" in placed[n] else f"{names[n]}\u2002" if "left" in placed[n] else names[n]
                for n in shown
            ],
            textposition=[placed[n] for n in shown],
            textfont={"size": 12, "color": [looks[n][0] if n in looks else "#444444" for n in shown]},
            hoverinfo="skip",
            showlegend=False,
            cliponaxis=False,
        )
    fig.update_xaxes(title=f"Principal component 1 ({explained[0]:.0%} of the last layer's variance)", range=ranges[0])
    fig.update_yaxes(title=f"Principal component 2 ({explained[1]:.0%})", range=ranges[1])
    return styled(fig, "Paths of tokens through the layers", height=PLOT[1] + 130).update_layout(margin_b=90)


def _symbols(layers: int) -> list[str]:
    """An open circle at the first layer, a square at the last, and dots between them."""
    return ["circle-open", *["circle"] * (layers - 2), "square"]


def _range(values: Any, pixels: int) -> list[float]:
    """The range of an axis with room for labels at its ends."""
    low, high = float(values.min()), float(values.max())
    room = 0.5 * LETTER * LETTERS / pixels * ((high - low) or 1.0)
    return [low - room, high + room]


def _pixels(points: Any, ranges: list[list[float]]) -> Any:
    """Points of the plot in pixels, from its lower left corner."""
    low = np.array([own[0] for own in ranges])
    span = np.array([own[1] - own[0] for own in ranges])
    return (points - low) / span * np.array(PLOT)


def _placed(points: Any, letters: list[int]) -> dict[int, str]:
    """The place of each label that overlaps no other label and no other end of a path; others are left out.

    The last token comes first, then the first one, then those at the edge of the figure.

    Args:
        points: `token 2`, ends of the paths in pixels.
        letters: `token`, lengths of the labels.
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
        for place, (right, up, gap_x, gap_y) in PLACES.items():
            x = points[n, 0] + right * width + gap_x * GAP
            y = points[n, 1] + up * LINE + gap_y * GAP
            box = (x - width / 2, y - LINE / 2, x + width / 2, y + LINE / 2)
            inside = box[0] > 0 and box[1] > 0 and box[2] < PLOT[0] and box[3] < PLOT[1]
            covered = [m for m in range(len(points)) if m != n and _holds(box, points[m])]
            if inside and not covered and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                found[n] = place
                break
    return found


def _holds(box: tuple[float, float, float, float], point: Any) -> bool:
    return bool(box[0] < point[0] < box[2] and box[1] < point[1] < box[3])


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
