"""Figures of matrices: layers by layers, and series by layers."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ..core.provenance import JOINT
from ..core.results import Result
from .colour_scales import (
    CHANCE,
    SPREAD,
    ColourScale,
    cell_numbers,
    chance_decimals,
    narrow_scale,
    off_diagonal_scale,
    range_in_words,
    scale_of,
)
from .interval_bands import Ends, cell_hover
from .labels import axis_title
from .site_labels import short_names
from .style import SEQUENTIAL, WIDTH, colour_bar, layer_axis, model_name, styled, turn_labels, with_subtitle

# Titles of the rows and columns of matrices whose sides are not the layers of the stream.
SIDES = {"row_block": ("Jacobian of block l", "Singular vectors of block l'")}
# Of coupling, the attribute that holds what random vectors give.
NULLS = {"coupling": "null_coupling", "miscoupling": "null"}
# Pixels beside the cells: of a colour bar, of a letter of a label, and of what stands above and below.
BAR, LETTER, ABOVE_AND_BELOW = 88, 7.2, 94
# Rows or columns of a heatmap without lines between its cells.
MOST_GAPS = 24
# Highest heatmap, for many more rows than columns.
HIGHEST = 900


def layer_heatmap(
    result: Result, field: str, axes: tuple[str, ...], title: str, quantity: str, ends: Ends | None = None
) -> go.Figure:
    """Heatmap of layers by layers, of one model or of two; between blocks the diagonal is left out.

    First and last rows and columns without any value are left out, and named below the title.

    Args:
        result: whose field.
        field: its name.
        axes: of the field.
        title: of the figure.
        quantity: title of the colour bar.
        ends: of the intervals of the values; None without intervals.
    """
    rows, columns = (result.coordinates(axis) for axis in axes)
    values = drawn_values(result, field, axes)
    scale = matrix_scale(result, field, axes, values)
    left_out = axes[0] == "row_block" and len(rows) > 1
    whole = slice(0, len(rows)), slice(0, len(columns))
    shown = whole if left_out or axes[0] == "skipped" else (_columns_with_values(values.T), _columns_with_values(values))
    notes = [null_note(result, field), scale.note, _left_out_in_words(rows, columns, shown)]
    note = _between_blocks(result, field) if left_out else "; ".join(filter(None, notes))
    decimals = 3 if field == "p_values" else chance_decimals(values) if field in CHANCE else 2
    rows, columns, values, ends = rows[shown[0]], columns[shown[1]], values[shown], ends and ends.at(shown)
    fig = go.Figure(
        go.Heatmap(
            z=values,
            x=list(range(len(columns))),
            y=list(range(len(rows))),
            colorbar=colour_bar(quantity, above=field == "p_values"),
            xgap=1 if len(columns) <= MOST_GAPS else 0,
            ygap=1 if len(rows) <= MOST_GAPS else 0,
            **scale.trace(),
            **cell_numbers(values, scale, decimals),
            **cell_hover(rows, columns, ends, html.escape(quantity, quote=False)),
        )
    )
    sides = sides_of(result, axes)
    layer_axis(fig.update_yaxes, rows, sides[0])
    layer_axis(fig.update_xaxes, columns, sides[1])
    turn_labels(fig, columns)
    height = square_cells(fig, short_names(rows), short_names(columns))
    return with_subtitle(styled(fig, title, height=height), html.escape(note, quote=False))


def series_heatmap(
    result: Result, field: str, axes: tuple[str, ...], title: str, quantity: str, ends: Ends | None = None
) -> go.Figure:
    """Heatmap of many series over layers or dimensions: one row for each series, with its label.

    Args:
        result: whose field.
        field: its name.
        axes: of the field.
        title: of the figure.
        quantity: title of the colour bar.
        ends: of the intervals of the values; None without intervals.
    """
    rows, columns = (result.coordinates(axis) for axis in axes)
    values = (result.values if field == result.values_name else getattr(result, field)).numpy()
    scale = scale_of(result, field, values)
    layers = all(isinstance(column, str) for column in columns)
    titles = axis_title(axes[0]), axis_title("layer" if layers else axes[1])
    names = [str(row) for row in rows]
    heat = go.Heatmap(
        z=values,
        x=list(range(len(columns))),
        y=names,
        colorbar=colour_bar(quantity),
        **scale.trace(),
        **cell_hover(names, [str(column) for column in columns], ends, html.escape(quantity, quote=False), titles, ".5g"),
    )
    fig = go.Figure(heat)
    if layers:
        layer_axis(fig.update_xaxes, columns, titles[1])
        turn_labels(fig, columns)
    else:
        # Dimensions of the stream, which have numbers.
        fig.update_xaxes(title=titles[1])
    fig.update_xaxes(showgrid=False)
    fig.update_yaxes(title=titles[0], type="category", showgrid=False, tickfont={"size": 11})
    return with_subtitle(styled(fig, title, height=500), html.escape(scale.note, quote=False))


def square_cells(fig: go.Figure, row_labels: Sequence[str], column_labels: Sequence[str]) -> int:
    """Make the cells of a heatmap square, with the first row at the top, and return the height that leaves no empty space.

    Args:
        fig: of one heatmap.
        row_labels: tick labels of all rows.
        column_labels: tick labels of all columns.
    """
    # Invisible ticks keep labels away from the cells.
    plain = {"constrain": "domain", "showgrid": False, "showline": False, "tickcolor": "rgba(0, 0, 0, 0)"}
    fig.update_yaxes(autorange="reversed", scaleanchor="x", **plain)
    fig.update_xaxes(**plain)
    left = max(64.0, 44 + LETTER * max(map(len, row_labels), default=0))
    turned = fig.layout.xaxis.tickangle
    below = LETTER * max(map(len, column_labels), default=0) * (abs(np.sin(np.radians(turned))) if turned else 0)
    cells = (WIDTH - left - BAR) * max(len(row_labels), 1) / max(len(column_labels), 1)
    return int(min(cells, HIGHEST) + below + ABOVE_AND_BELOW)


def drawn_values(result: Result, field: str, axes: tuple[str, ...]) -> Any:
    """The values of a matrix, without those of blocks and p-values of layers with themselves, as an array.

    Args:
        result: whose field.
        field: its name.
        axes: of the field.
    """
    values = (result.values if field in ("values", result.values_name) else getattr(result, field)).numpy()
    # A block in its own basis is diagonal by definition, and its values would hide those between blocks.
    # Nor is the p-value of a layer with itself a finding.
    own = len(values) > 1 and (axes[0] == "row_block" or _of_own_layers(result, field))
    return np.where(np.eye(len(values), dtype=bool), np.nan, values) if own else values


def matrix_scale(result: Result, field: str, axes: tuple[str, ...], values: Any) -> ColourScale:
    """The colour scale of a matrix, or of several of one field.

    Args:
        result: whose field.
        field: its name.
        axes: of the field.
        values: that are drawn.
    """
    scale = scale_of(result, field, values)
    if axes[0] == "row_block":
        return narrow_scale(values, SPREAD if scale.name == SPREAD else SEQUENTIAL)
    if axes[0] == "skipped":
        # A relative change of 1 or more is a contribution that has nothing left in common; few outliers would hide the rest.
        beyond = bool((np.nan_to_num(values) > 1).any())
        return ColourScale(scale.name, 0.0, min(1.0, scale.high), "highest colour: 1 or more" if beyond else "")
    return off_diagonal_scale(values, scale)


def sides_of(result: Result, axes: tuple[str, ...]) -> tuple[str, str]:
    """Titles of the rows and of the columns of a matrix.

    Args:
        result: whose matrix.
        axes: of the field.
    """
    if axes[0] in SIDES:
        return SIDES[axes[0]]
    if axes[0] in ("skipped", "vision_layer", "text_layer"):
        return axis_title(axes[0]), axis_title(axes[1])
    models = result.provenance.model.split(JOINT)
    first, last = (f"After block of {html.escape(model_name(model), quote=False)}" for model in (models[0], models[-1]))
    return (first, last) if len(models) > 1 else ("After block", "After block")


def null_note(result: Result, field: str) -> str:
    """What limits the values of a permutation null: the smallest possible p-value, or their range; empty for other fields.

    Args:
        result: whose field.
        field: its name.
    """
    if field == "p_values":
        count = int(getattr(result, "permutations", 0))
        own = "; a layer with itself is left out" if _of_own_layers(result, field) and len(result.layers) > 1 else ""
        return f"{count:,} permutations; smallest possible {1 / (count + 1):.2g}{own}" if count else ""
    if field in CHANCE:
        values = getattr(result, field)
        known = values[values.isfinite()]
        if known.numel():
            return f"range {range_in_words(float(known.min()), float(known.max()))}, on the scale of the measure"
    return ""


def _of_own_layers(result: Result, field: str) -> bool:
    """Whether a field holds p-values between the layers of one model."""
    return field == "p_values" and JOINT not in result.provenance.model


def _columns_with_values(values: Any) -> slice:
    """The columns from the first to the last with a value; all if none has one."""
    known = np.flatnonzero(np.isfinite(values).any(axis=0))
    return slice(int(known[0]), int(known[-1]) + 1) if len(known) else slice(0, values.shape[1])


def _left_out_in_words(rows: tuple[str, ...], columns: tuple[str, ...], shown: tuple[slice, slice]) -> str:
    """The rows and columns that are not shown, in words; empty if all are."""
    labels = [(short_names(names), own) for names, own in zip((rows, columns), shown, strict=True)]
    sides = [[*names[: own.start], *names[own.stop :]] for names, own in labels]
    if sides[0] == sides[1]:
        words = ", ".join(sides[0])
    else:
        named = [(side, "row" if n == 0 else "column") for n, side in enumerate(sides) if side]
        words = " and ".join(f"{noun}{'s' if len(side) > 1 else ''} {', '.join(side)}" for side, noun in named)
    return f"without {words}, where no value is defined" if words else ""


def _between_blocks(result: Result, field: str) -> str:
    """What is left out of a matrix of blocks by blocks, and what random vectors give."""
    null = getattr(result, NULLS.get(field, ""), None)
    found = "" if null is None else f" Random vectors give {float(null[~np.eye(len(null), dtype=bool)].nanmean()):.2f}."
    return "A block with itself is left out." + found
