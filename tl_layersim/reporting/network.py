"""Figures of blocks as a network: the coupling of each two as an edge."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from .interval_bands import Ends, hover_texts
from .site_labels import short_names
from .style import FAINT, styled

# Edges of a similar strength are drawn as one trace: plotly is slow with thousands of traces.
LEVELS = 20


def coupling_network(
    strength: Any, strongest: float, names: tuple[str, ...], title: str, ends: Ends | None = None
) -> go.Figure:
    """Blocks on a circle with an edge between each pair of blocks; the stronger their coupling, the more opaque the edge.

    Args:
        strength: `layer layer`, symmetric, 0 for no edge.
        strongest: strength of an edge that is fully opaque.
        names: of the blocks.
        title: of the figure.
        ends: of the intervals of the strengths; None without intervals.
    """
    texts = np.full(strength.shape, "", dtype=object) if ends is None else hover_texts(ends, ".3f")
    blocks = len(names)
    angle = np.pi / 2 - 2 * np.pi * np.arange(blocks) / blocks
    x, y = np.cos(angle), np.sin(angle)
    fig = go.Figure()
    opacity = np.clip(strength / max(strongest, 1e-12), 0, 1)
    for level in range(1, LEVELS + 1):
        pairs = [(a, b) for a in range(blocks) for b in range(a) if int(np.ceil(LEVELS * opacity[a, b])) == level]
        if pairs:
            xs = [v for a, b in pairs for v in (x[a], x[b], None)]
            ys = [v for a, b in pairs for v in (y[a], y[b], None)]
            line = {"color": FAINT.format(level / LEVELS), "width": 0.5 + 3.5 * level / LEVELS}
            fig.add_scatter(x=xs, y=ys, mode="lines", line=line, hoverinfo="skip")
    middle = [
        ((x[a] + x[b]) / 2, (y[a] + y[b]) / 2, names[a], names[b], strength[a, b], texts[a, b])
        for a in range(blocks)
        for b in range(a)
    ]
    fig.add_scatter(
        x=[edge[0] for edge in middle],
        y=[edge[1] for edge in middle],
        mode="markers",
        marker={"size": 9, "opacity": 0},
        customdata=[edge[2:] for edge in middle],
        hovertemplate="%{customdata[0]}<br>%{customdata[1]}<br>"
        "%{customdata[2]:.3f}%{customdata[3]} beyond chance<extra></extra>",
    )
    fig.add_scatter(
        x=1.08 * x,
        y=1.08 * y,
        mode="text",
        text=short_names(names),
        customdata=list(names),
        hovertemplate="%{customdata}<extra></extra>",
    )
    fig.update_layout(showlegend=False)
    fig.update_xaxes(visible=False)
    fig.update_yaxes(visible=False, scaleanchor="x")
    below = f"Edges: coupling beyond chance (0: chance, 1: full); darkest edge: {strongest:.2f}"
    fig.add_annotation(text=below, x=0.5, y=-0.06, xref="paper", yref="paper", showarrow=False)
    return styled(fig, title, height=500, width=480)
