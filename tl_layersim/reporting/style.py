"""Fonts, colours and axes that all figures share."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any

import plotly.graph_objects as go

FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"
# Opacities of the lines of a few series, the strongest first.
SHADES = (1.0, 0.75, 0.5, 0.35, 0.25)
BLUE, FAINT = "#2a5c9a", "rgba(42, 92, 154, {})"
SOLID = {"color": BLUE, "width": 2}
# Most tick labels on an axis of layers.
MOST_TICKS = 24


def styled(fig: go.Figure, title: str, height: int, width: int) -> go.Figure:
    """The figure with its title, size, font and margins."""
    return fig.update_layout(
        title={"text": title, "font": {"size": 16}},
        template="plotly_white",
        font={"family": FONT, "size": 12},
        height=height,
        width=width,
        margin={"l": 60, "r": 20, "t": 50, "b": 50},
        legend={"orientation": "h", "yanchor": "top", "y": -0.18},
    )


def colour_bar(title: str) -> dict[str, Any]:
    """A colour bar with its title along its side."""
    return {"title": {"text": title, "side": "right"}}


def layer_axis(update: Callable[..., go.Figure], names: tuple[str, ...], title: str) -> None:
    """Label the layers along an axis, and skip some of them where labels would overlap.

    Args:
        update: `update_xaxes` or `update_yaxes` of a figure, whose positions are 0, 1, 2, ...
        names: of the layers.
        title: of the axis, in which "block" becomes "module" where the layers are other modules.
    """
    step = max(1, -(-len(names) // MOST_TICKS))
    labels = short_names(names)
    if not all(name.startswith("blocks.") for name in names):
        title = re.sub(r"\b([Bb])lock\b", lambda match: "Module" if match[1] == "B" else "module", title, count=1)
    at = list(range(0, len(names), step))
    update(title=title, tickmode="array", tickvals=at, ticktext=[labels[i] for i in at])


def short_names(names: tuple[str, ...]) -> list[str]:
    """Tick labels: the block's number, `embed` for the input of block 0, and `into 3` for the input of a later one.

    Sites that are no blocks keep their path, without the prefix that all of them share.

    Examples:
        >>> short_names(("blocks.0.hook_resid_pre", "blocks.0.hook_resid_post"))
        ['embed', '0']
        >>> short_names(("model.layers.0.mlp.input", "model.layers.0.mlp", "model.layers.1.mlp"))
        ['into 0.mlp', '0.mlp', '1.mlp']
    """
    if not all(name.startswith("blocks.") for name in names):
        parts = [name.removesuffix(".input").split(".") for name in names]
        # Never the last part, which tells sites apart.
        common = 0
        while all(len(part) > common + 1 and part[common] == parts[0][common] for part in parts):
            common += 1
        return [
            f"into {'.'.join(part[common:])}" if name.endswith(".input") else ".".join(part[common:])
            for name, part in zip(names, parts, strict=True)
        ]
    numbers = [(re.findall(r"\d+", name) or [name])[-1] for name in names]
    return [
        ("embed" if number == "0" else f"into {number}") if name.endswith("resid_pre") else number
        for name, number in zip(names, numbers, strict=True)
    ]


def token_text(token: str, bold: bool = False) -> str:
    """A token as text that plotly does not read as markup.

    Examples:
        >>> token_text("<b>"), token_text("")
        ('&lt;b&gt;', '(empty)')
    """
    plain = html.escape(token).replace("\n", "\\n") or "(empty)"
    return f"<b>{plain}</b>" if bold else plain
