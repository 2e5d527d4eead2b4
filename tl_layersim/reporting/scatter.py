"""Figures of a regression: one point for each model or prompt, the fit, and its confidence band."""

from __future__ import annotations

import html
from typing import Any

import numpy as np
import plotly.graph_objects as go

from .style import BLUE, FAINT, GREY, ORANGE, styled, with_subtitle

# Most points that carry their names.
MOST_NAMES = 24


def regression(x: Any, y: Any, names: list[str], line: dict[str, Any], titles: tuple[str, str, str, str]) -> go.Figure:
    """Points with their names, the fit through them, and its confidence band.

    Args:
        x: of the points.
        y: of the points.
        names: of the points.
        line: `x`, `fit`, `low` and `high` of the fit and its band.
        titles: of the figure, below it, and of its two axes.
    """
    fig = go.Figure()
    edge = {"mode": "lines", "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
    fig.add_scatter(x=line["x"], y=line["high"], **edge)
    fig.add_scatter(x=line["x"], y=line["low"], fill="tonexty", fillcolor=FAINT.format(0.15), **edge)
    fig.add_scatter(x=line["x"], y=line["fit"], mode="lines", line={"color": BLUE}, hoverinfo="skip")
    few = len(names) <= MOST_NAMES
    hover = "%{text}<br>%{x:.4g}, %{y:.4g}<extra></extra>"
    # Names of neighbours stand above and below their points in turn, so that fewer of them overlap.
    above = (np.argsort(np.argsort(x)) % 2 == 0).tolist()
    sides = ["top center" if own else "bottom center" for own in above]
    points = {"mode": "markers+text" if few else "markers", "textposition": sides, "hovertemplate": hover}
    marker = {"size": 9 if few else 6, "color": ORANGE}
    text = {"text": [html.escape(name) for name in names], "textfont": {"size": 11, "color": GREY}}
    fig.add_scatter(x=x, y=y, marker=marker, cliponaxis=False, **text, **points)
    fig.update_layout(showlegend=False)
    fig.update_xaxes(title=titles[2])
    fig.update_yaxes(title=titles[3])
    return with_subtitle(styled(fig, titles[0]), html.escape(titles[1]))
