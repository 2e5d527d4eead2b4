"""Bar charts with intervals as whiskers: counts by block or by name."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from .interval_bands import Ends, hover_texts, whiskers
from .lines import label_axis
from .style import BLUE, DARK, styled


def bars(names: tuple[Any, ...], values: Any, ends: Ends | None, axis: str, titles: tuple[str, str]) -> go.Figure:
    """Bar chart with intervals as whiskers.

    Args:
        names: labels along the axis.
        values: heights of the bars.
        ends: ends of the confidence intervals; None without intervals.
        axis: name of the horizontal axis.
        titles: titles of the figure and of the vertical axis.
    """
    margins = [""] * len(names) if ends is None else hover_texts(ends, ",.4g")
    fig = go.Figure(
        go.Bar(
            x=list(range(len(names))),
            y=values,
            marker={"color": BLUE},
            # Whiskers are dark, so that they are seen inside the bar too.
            error_y=None if ends is None else whiskers(values, ends) | {"color": DARK},
            customdata=list(zip(names, margins, strict=True)),
            hovertemplate="%{customdata[0]}<br>%{y:,.4g}%{customdata[1]}<extra></extra>",
        )
    )
    label_axis(fig, names, axis)
    fig.update_yaxes(title=titles[1], rangemode="tozero")
    return styled(fig, titles[0])
