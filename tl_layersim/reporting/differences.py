"""Figures of the difference of two results: heatmaps about 0, and curves with bands."""

from __future__ import annotations

import html
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import hex_to_rgb

from ..core.jackknife import ConfidenceInterval
from ..core.results import Result
from .colour_scales import about_zero, on_cells
from .curves import LAYER_AXES
from .figures import LAYER_MATRICES
from .labels import axis_title
from .matrix import square_cells
from .site_labels import short_names
from .style import PALETTE, colour_bar, layer_axis, styled, turn_labels, with_subtitle

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
    names: tuple[str, str],
) -> go.Figure:
    """The figure of the difference of one field.

    Args:
        result: one of the two results.
        field: its field.
        labels: along one axis or two, names of sites or relative depths.
        found: the difference and its interval.
        level: of the interval.
        relative_depth: whether sites stand at their relative depths.
        names: of the two runs.
    """
    words = result.declared(field).words
    unit = f"Difference: {words}"
    title = f"Difference: {words.partition(' (')[0]}"
    of_runs = f"{names[1]} minus {names[0]}"
    axes = tuple(labels)
    if len(axes) == 1 or (axes not in LAYER_MATRICES and len(labels[axes[0]]) <= MOST_CURVES):
        fig = _curves(labels, found)
        fig.update_yaxes(title=unit, zeroline=True, zerolinecolor="#888")
        _label(fig.update_xaxes, axes[-1], labels[axes[-1]], relative_depth)
        styled(fig, title, height=420).update_layout(showlegend=len(axes) > 1, margin_b=56 if len(axes) == 1 else 110)
        note = f"{of_runs}; band: {level:.0%} interval of each point"
    else:
        fig = _heatmap(labels, found, title, words, relative_depth)
        note = f"{of_runs}; dot: the {level:.0%} interval of the cell excludes 0, not corrected for the number of cells"
    return with_subtitle(fig, html.escape(note, quote=False))


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
    scale = about_zero(value)
    dots = np.where((low > 0) | (high < 0), "•", "")
    fig = go.Figure(
        go.Heatmap(
            z=value,
            x=list(range(len(columns))),
            y=list(range(len(rows))),
            colorbar=colour_bar(f"Difference: {unit}"),
            text=on_cells(dots.tolist(), value, scale),
            texttemplate="%{text}",
            textfont={"size": 14},
            hoverongaps=False,
            **scale.trace(),
            customdata=[
                [(row, column, low[i, j], high[i, j]) for j, column in enumerate(columns)] for i, row in enumerate(rows)
            ],
            hovertemplate="row: %{customdata[0]}<br>column: %{customdata[1]}<br>difference: %{z:.4g} "
            "(%{customdata[2]:.4g} to %{customdata[3]:.4g})<extra></extra>",
        )
    )
    _label(fig.update_xaxes, column_axis, columns, relative_depth)
    _label(fig.update_yaxes, row_axis, rows, relative_depth)
    if not relative_depth and column_axis in LAYER_AXES:
        turn_labels(fig, columns)
    height = 500
    if (row_axis, column_axis) in LAYER_MATRICES:
        shown = [short_names(names) if not relative_depth else ["0.00"] * len(names) for names in (rows, columns)]
        height = square_cells(fig, shown[0], shown[1])
    fig.update_xaxes(showgrid=False)
    fig.update_yaxes(showgrid=False)
    return styled(fig, title, height=height)


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
