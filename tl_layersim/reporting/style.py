"""Fonts, colours and axes that all figures share."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import plotly.graph_objects as go

from .site_labels import heads_in_block, short_names, site_axis_title

FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"
# Opacities of the lines of a few series, the strongest first.
SHADES = (1.0, 0.75, 0.5, 0.35, 0.25)
BLUE, FAINT = "#2a5c9a", "rgba(42, 92, 154, {})"
ORANGE = "#c8641e"
GREEN = "#4f8a4b"
SOLID = {"color": BLUE, "width": 2}
# Most tick labels on an axis of layers.
MOST_TICKS = 24
MOST_HEAD_TICKS = 40
# Pixels above the title, where plotly shows its buttons.
BUTTONS = 24
# Number of letters from which a tick label is turned.
LONG_LABEL = 6


def styled(fig: go.Figure, title: str, height: int, width: int) -> go.Figure:
    """The figure with its title, size, font and margins."""
    return fig.update_layout(
        title={"text": title, "font": {"size": 16}, "y": 1, "yanchor": "top", "pad": {"t": BUTTONS + 10}},
        template="plotly_white",
        font={"family": FONT, "size": 12},
        height=height + BUTTONS,
        width=width,
        margin={"l": 60, "r": 20, "t": 46 + BUTTONS, "b": 50},
        legend={"orientation": "h", "yanchor": "top", "y": -0.18},
    )


def colour_bar(title: str) -> dict[str, Any]:
    """A colour bar with its title along its side."""
    return {"title": {"text": title, "side": "right"}}


def layer_axis(update: Callable[..., go.Figure], names: tuple[str, ...], title: str) -> None:
    """Label the sites along an axis, and skip some of them where labels would overlap.

    Args:
        update: `update_xaxes` or `update_yaxes` of a figure, whose positions are 0, 1, 2, ...
        names: of the sites.
        title: of the axis where the sites are residual layers, see `site_axis_title`.
    """
    heads = heads_in_block(names)
    step = max(1, -(-len(names) // (MOST_HEAD_TICKS if heads else MOST_TICKS)))
    if heads and step > 1:
        # The first head of a block, of every second block, ...
        step = heads * max(1, -(-len(names) // (heads * MOST_TICKS)))
    labels = short_names(names)
    at = list(range(0, len(names), step))
    size = {"tickfont": {"size": 9}} if heads else {}
    update(title=site_axis_title(names, title), tickmode="array", tickvals=at, ticktext=[labels[i] for i in at], **size)


def turn_labels(fig: go.Figure, names: tuple[str, ...]) -> None:
    """Turn the labels of sites along the horizontal axis where they are long, so that each ends at its tick and none is cut.

    Args:
        fig: whose horizontal axis `layer_axis` labelled.
        names: of the sites.
    """
    if heads_in_block(names):
        fig.update_xaxes(tickangle=-90)
    elif len(names) > 1 and max(map(len, short_names(names))) > LONG_LABEL:
        fig.update_xaxes(tickangle=-45)


def token_text(token: str, bold: bool = False) -> str:
    """A token as text that plotly does not read as markup.

    Examples:
        >>> token_text("<b>"), token_text("")
        ('&lt;b&gt;', '(empty)')
    """
    plain = html.escape(token).replace("\n", "\\n") or "(empty)"
    return f"<b>{plain}</b>" if bold else plain
