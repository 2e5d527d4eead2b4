"""Figures of matrices: layers by layers, series by layers, and tiles of small matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from ..core.results import Result
from .interval_bands import Ends, cell_hover, hover_texts
from .labels import axis_title
from .site_labels import heads_in_block
from .style import colour_bar, layer_axis, styled, turn_labels


def layer_heatmap(
    result: Result, values: Any, axes: tuple[str, ...], title: str, quantity: str, ends: Ends | None = None
) -> go.Figure:
    """Heatmap of layers by layers, of one model or of two; between blocks the diagonal is left out.

    Args:
        result: whose layers and models stand on the axes.
        values: `row column`.
        axes: their names.
        title: of the figure.
        quantity: title of the colour bar.
        ends: of the intervals of the values; None without intervals.
    """
    rows, columns = (result.coordinates(axis) for axis in axes)
    low, high = min(0.0, float(np.nan_to_num(values).min())), 1.0
    if axes[0] == "row_block" and len(rows) > 1:
        # A block in its own basis is diagonal by definition, and its values would hide those between blocks.
        values = np.where(np.eye(len(rows), dtype=bool), np.nan, values)
        low, high = (float(f(values)) for f in (np.nanmin, np.nanmax)) if not np.isnan(values).all() else (0.0, 1.0)
    if axes[0] == "skipped":
        # A relative change of 1 or more is a contribution that has nothing left in common; few outliers would hide the rest.
        high = min(1.0, float(np.nanmax(values))) if not np.isnan(values).all() else 1.0
        quantity += " (top: 1 or more)" if high == 1.0 else ""
    heat = go.Heatmap(
        z=values,
        x=list(range(len(columns))),
        y=list(range(len(rows))),
        zmin=low,
        zmax=high,
        colorscale="Viridis",
        colorbar=colour_bar(quantity),
        **cell_hover(rows, columns, ends),
    )
    fig = go.Figure(heat)
    models = result.provenance.model.split(" | ")
    names = [f"Block of {model}" for model in (models[-1], models[0])] if len(models) > 1 else ["After block"] * 2
    names = ["Singular vectors of block", "Jacobian of block"] if axes[0] == "row_block" else names
    named = axes[0] in ("skipped", "vision_layer", "text_layer")
    names = [axis_title(axis) for axis in axes[::-1]] if named else names
    layer_axis(fig.update_xaxes, columns, names[0])
    layer_axis(fig.update_yaxes, rows, names[1])
    fig.update_yaxes(autorange="reversed", scaleanchor="x", constrain="domain")
    fig.update_xaxes(constrain="domain")
    turn_labels(fig, columns)
    # Labels of heads need more room than numbers of blocks.
    side = 760 if heads_in_block(rows) or heads_in_block(columns) else 520
    return styled(fig, title, height=side, width=side + 100)


def series_heatmap(
    result: Result, values: Any, axes: tuple[str, ...], title: str, quantity: str, ends: Ends | None = None
) -> go.Figure:
    """Heatmap of many series over layers or dimensions: one row for each series, with its label.

    Args:
        result: whose labels stand on the axes.
        values: `series layer`.
        axes: their names.
        title: of the figure.
        quantity: title of the colour bar.
        ends: of the intervals of the values; None without intervals.
    """
    rows, columns = (result.coordinates(axis) for axis in axes)
    hover: dict[str, Any] = {"customdata": [list(columns) for _ in rows], "hovertemplate": "%{customdata}<br>%{z:.5g}"}
    if ends is not None:
        texts = hover_texts(ends, ".5g")
        hover["customdata"] = [list(zip(columns, own, strict=True)) for own in texts]
        hover["hovertemplate"] = "%{customdata[0]}<br>%{z:.5g}%{customdata[1]}"
    hover["hovertemplate"] = f"{axis_title(axes[0])} %{{y}}<br>{hover['hovertemplate']}<extra></extra>"
    heat = go.Heatmap(
        z=values,
        x=list(range(len(columns))),
        y=[str(row) for row in rows],
        colorscale="Viridis",
        colorbar=colour_bar(quantity),
        **hover,
    )
    fig = go.Figure(heat)
    if all(isinstance(column, str) for column in columns):
        layer_axis(fig.update_xaxes, columns, axis_title("layer"))
        turn_labels(fig, columns)
    else:
        # Dimensions of the stream, which have numbers.
        fig.update_xaxes(title=axis_title(axes[1]))
    fig.update_yaxes(title=axis_title(axes[0]), type="category")
    return styled(fig, title, height=520, width=620)


def matrix_tiles(matrices: Any, labels: tuple[str, ...], title: str) -> go.Figure:
    """Small matrices side by side, each divided by its largest entry, with gaps between.

    Args:
        matrices: `row column k k`.
        labels: of rows and columns.
        title: of the figure.
    """
    rows, columns, k, _ = matrices.shape
    top = np.maximum(matrices.max(axis=(2, 3), keepdims=True), 1e-300)
    padded = np.full((rows, columns, k + 1, k + 1), np.nan)
    padded[:, :, :k, :k] = matrices / top
    heat = go.Heatmap(
        z=padded.transpose(0, 2, 1, 3).reshape(rows * (k + 1), columns * (k + 1)),
        zmin=0.0,
        zmax=1.0,
        colorscale="Viridis",
        colorbar=colour_bar("Entry / largest entry of its matrix"),
        hovertemplate="%{z:.3f}<extra></extra>",
    )
    fig = go.Figure(heat)
    at = [(k + 1) * n + (k - 1) / 2 for n in range(max(rows, columns))]
    step = max(1, -(-len(labels) // 16))
    for update, name in ((fig.update_xaxes, "Singular vectors of block"), (fig.update_yaxes, "Jacobian of block")):
        shown = {"tickvals": at[: len(labels) : step], "ticktext": list(labels[::step])}
        update(title=name, tickmode="array", showgrid=False, zeroline=False, constrain="domain", **shown)
    fig.update_yaxes(autorange="reversed", scaleanchor="x")
    return styled(fig, title, height=700, width=780)
