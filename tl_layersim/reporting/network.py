"""Network of blocks on a circle."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from .lines_and_bars import Ends, hover_texts
from .site_labels import markup, short_names
from .style import DARK, colour_bar, styled, with_subtitle

# Number of traces of edges: plotly is slow with thousands of traces.
LEVELS = 20
NAME_ONLY = "%{customdata}<extra></extra>"


def block_network(strength: Any, strongest: float, names: tuple[str, ...], title: str, ends: Ends | None) -> go.Figure:
    """Draw blocks on a circle, with an edge for each coupling.

    Args:
        strength: couplings `layer layer`, symmetric; 0 for no edge.
        strongest: strength of the darkest colour.
        names: names of the blocks.
        title: title of the figure.
        ends: ends of the confidence intervals of the strengths; None without intervals.
    """

    def edge_colour(level: float) -> str:
        """Colour of an edge, from nearly white to dark blue."""
        return str(sample_colorscale("Blues", [0.08 + 0.92 * level])[0])

    texts = np.full(strength.shape, "", dtype=object) if ends is None else hover_texts(ends, ".3f")
    blocks = len(names)
    angle = np.pi / 2 - 2 * np.pi * np.arange(blocks) / blocks
    x = np.cos(angle)
    y = np.sin(angle)
    fig = go.Figure()
    opacity = np.clip(strength / max(strongest, 1e-12), 0, 1)
    # Every pair once: edges have no direction.
    edges = [(a, b) for a in range(blocks) for b in range(a)]
    # Weak edges first, below the strong ones.
    for level in range(1, LEVELS + 1):
        xs: list[Any] = []
        ys: list[Any] = []
        for a, b in edges:
            if int(np.ceil(LEVELS * opacity[a, b])) == level:
                # None ends a line.
                xs += [x[a], x[b], None]
                ys += [y[a], y[b], None]
        if xs:
            line = {"color": edge_colour(level / LEVELS), "width": 0.5 + 4.5 * level / LEVELS}
            fig.add_scatter(x=xs, y=ys, mode="lines", line=line, hoverinfo="skip")
    scale = [[n / 10, edge_colour(n / 10)] for n in range(11)]
    bar = colour_bar("Coupling beyond chance (1: full)") | {"thickness": 16, "outlinewidth": 0}
    colours = {"colorscale": scale, "cmin": 0.0, "cmax": strongest if strongest > 0 else 1.0, "colorbar": bar}
    fig.add_scatter(
        x=[(x[a] + x[b]) / 2 for a, b in edges],
        y=[(y[a] + y[b]) / 2 for a, b in edges],
        mode="markers",
        # Invisible points that carry the hover texts of edges and the colour bar.
        marker={"size": 9, "opacity": 0, "color": [strength[a, b] for a, b in edges], "showscale": True, **colours},
        customdata=[(markup(names[a]), markup(names[b]), strength[a, b], texts[a, b]) for a, b in edges],
        hovertemplate="%{customdata[0]}<br>%{customdata[1]}<br>"
        "%{customdata[2]:.3f}%{customdata[3]} beyond chance<extra></extra>",
    )
    fig.add_scatter(
        x=x,
        y=y,
        mode="markers",
        marker={"size": 8, "color": DARK},
        customdata=list(map(markup, names)),
        hovertemplate=NAME_ONLY,
    )
    fig.add_scatter(
        x=1.1 * x,
        y=1.1 * y,
        mode="text",
        text=list(map(markup, short_names(names))),
        textfont={"size": 13},
        customdata=list(map(markup, names)),
        hovertemplate=NAME_ONLY,
    )
    fig.update_layout(showlegend=False)
    fig.update_xaxes(visible=False, range=[-1.2, 1.2], constrain="domain")
    fig.update_yaxes(visible=False, range=[-1.2, 1.2], scaleanchor="x", constrain="domain")
    note = "Blocks clockwise from the top; an edge is the coupling of two blocks beyond that of random vectors"
    return with_subtitle(styled(fig, title, height=520).update_layout(margin_l=16, margin_b=16), note)
