"""Figures of the difference of two results: heatmaps about 0, and curves with bands."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import hex_to_rgb

from ..core.jackknife import ConfidenceInterval
from ..core.results import Result
from .curves import LAYER_AXES
from .figures import LAYER_MATRICES
from .labels import axis_title, quantity
from .site_labels import heads_in_block
from .style import DIVERGING, PALETTE, colour_bar, layer_axis, styled, turn_labels

# Series over layers up to this number are curves, more are a heatmap.
MOST_CURVES = 5
DEPTH = "Relative depth"


def difference_figure(
    result: Result,
    field: str,
    labels: dict[str, tuple[Any, ...]],
    found: ConfidenceInterval,
    level: float,
    relative_depth: bool,
) -> go.Figure:
    """The figure of the difference of one field.

    Args:
        result: one of the two results.
        field: its field.
        labels: along one axis or two, names of sites or relative depths.
        found: the difference and its interval.
        level: of the interval.
        relative_depth: whether sites stand at their relative depths.
    """
    own = result.values_name if field == "values" else field
    unit = f"Difference: {quantity(type(result).__name__, own)}"
    title = f"Second minus first, {level:.0%} intervals"
    axes = tuple(labels)
    if len(axes) == 1 or (axes not in LAYER_MATRICES and len(labels[axes[0]]) <= MOST_CURVES):
        fig = _curves(labels, found)
        fig.update_yaxes(title=unit, zeroline=True, zerolinecolor="#888")
        _label(fig.update_xaxes, axes[-1], labels[axes[-1]], relative_depth)
        return styled(fig, title).update_layout(showlegend=len(axes) > 1)
    title = f"Second minus first (dot: {level:.0%} interval excludes 0)"
    return _heatmap(labels, found, title, unit, relative_depth)


def _curves(labels: dict[str, tuple[Any, ...]], found: ConfidenceInterval) -> go.Figure:
    names = list(labels.values())[-1]
    value, low, high = (np.atleast_2d(end.numpy()) for end in found[:3])
    series = [f"{axis} = {label}" for axis, own in list(labels.items())[:-1] for label in own] or ["difference"]
    fig = go.Figure()
    x = list(range(len(names)))
    for number, label in enumerate(series):
        colour = PALETTE[number % len(PALETTE)]
        band = "rgba({}, {}, {}, 0.15)".format(*hex_to_rgb(colour))
        edge: dict[str, Any] = {"mode": "lines", "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
        fig.add_scatter(x=x, y=high[number], legendgroup=label, **edge)
        fig.add_scatter(x=x, y=low[number], fill="tonexty", fillcolor=band, legendgroup=label, **edge)
        fig.add_scatter(
            x=x,
            y=value[number],
            name=label,
            legendgroup=label,
            mode="lines+markers",
            line={"color": colour},
            marker={"color": colour},
            customdata=np.stack([np.array(names, dtype=object), low[number], high[number]], axis=-1),
            hovertemplate="%{customdata[0]}<br>%{y:.4g} (%{customdata[1]:.4g} to %{customdata[2]:.4g})<extra></extra>",
        )
    return fig


def _heatmap(
    labels: dict[str, tuple[Any, ...]], found: ConfidenceInterval, title: str, unit: str, relative_depth: bool
) -> go.Figure:
    (row_axis, rows), (column_axis, columns) = labels.items()
    value, low, high = (end.numpy() for end in found[:3])
    top = float(np.nanmax(np.abs(value))) if np.isfinite(value).any() else 1.0
    fig = go.Figure(
        go.Heatmap(
            z=value,
            x=list(range(len(columns))),
            y=list(range(len(rows))),
            zmid=0.0,
            zmin=-top,
            zmax=top,
            colorscale=DIVERGING,
            colorbar=colour_bar(unit),
            text=np.where((low > 0) | (high < 0), "•", ""),
            texttemplate="%{text}",
            customdata=[
                [(row, column, low[i, j], high[i, j]) for j, column in enumerate(columns)] for i, row in enumerate(rows)
            ],
            hovertemplate="%{customdata[0]}<br>%{customdata[1]}<br>%{z:.4g} "
            "(%{customdata[2]:.4g} to %{customdata[3]:.4g})<extra></extra>",
        )
    )
    _label(fig.update_xaxes, column_axis, columns, relative_depth)
    _label(fig.update_yaxes, row_axis, rows, relative_depth)
    if (row_axis, column_axis) in LAYER_MATRICES:
        fig.update_yaxes(autorange="reversed", scaleanchor="x", constrain="domain")
        fig.update_xaxes(constrain="domain")
    if not relative_depth and column_axis in LAYER_AXES:
        turn_labels(fig, columns)
    side = 760 if not relative_depth and column_axis in LAYER_AXES and heads_in_block(columns) else 520
    return styled(fig, title, height=side, width=side + 100)


def _label(update: Any, axis: str, names: tuple[Any, ...], relative_depth: bool) -> None:
    """Label an axis whose positions are 0, 1, 2, ...: sites, relative depths, or other labels."""
    if relative_depth and all(isinstance(name, float) for name in names):
        step = max(1, -(-len(names) // 12))
        ticks = [f"{name:.2f}" for name in names]
        update(title=DEPTH, tickvals=list(range(0, len(names), step)), ticktext=ticks[::step])
    elif all(isinstance(name, str) for name in names):
        layer_axis(update, names, "After block")
    else:
        step = max(1, -(-len(names) // 12))
        shown = [str(name) for name in names]
        update(title=axis_title(axis), tickvals=list(range(0, len(names), step)), ticktext=shown[::step])
