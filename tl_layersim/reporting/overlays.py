"""Figures of several runs together: their curves in one plot, and their matrices side by side with one colour scale."""

from __future__ import annotations

import html
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ..core.results import Result
from .interval_bands import Ends, add_band, cell_hover, interval_ends, intervals_in_words, point_hover
from .matrix import drawn_values, matrix_scale, sides_of
from .site_labels import short_names, site_axis_title
from .style import DASHES, PALETTE, SYMBOLS, WIDTH, colour_bar, layer_axis, styled, turn_labels, with_subtitle
from .sweeps import DEPTH_TITLE

# Letters of a label that needs not be turned.
SHORT_LABEL = 3

# Matrices in a row, most ticks of one, and pixels between two and around all.
PER_ROW, MOST_TICKS, BETWEEN, AROUND = 2, 10, 92, 160


class RunCurve(NamedTuple):
    """A field of one run over its sites.

    Attributes:
        name: of the run.
        sites: names of the sites.
        depth: relative depth of each site.
        values: of the sites.
        ends: of the intervals; None without intervals.
    """

    name: str
    sites: tuple[str, ...]
    depth: tuple[float, ...]
    values: Any
    ends: Ends | None


def overlaid_curves(curves: Sequence[RunCurve], title: str, quantity: str, note: str) -> go.Figure:
    """Line plot of several runs over sites of the same names, or over relative depth where the runs have other sites.

    Args:
        curves: of the runs.
        title: of the figure.
        quantity: title of the vertical axis.
        note: below the title.
    """
    fig = go.Figure()
    shared = all(curve.sites == curves[0].sites for curve in curves)
    places = [list(range(len(curve.sites))) if shared else list(curve.depth) for curve in curves]
    looks = [
        (PALETTE[n % len(PALETTE)], DASHES[n // len(PALETTE) % len(DASHES)], SYMBOLS[n % len(SYMBOLS)])
        for n in range(len(curves))
    ]
    for curve, x, (colour, _, _) in zip(curves, places, looks, strict=True):
        if curve.ends is not None:
            add_band(fig, x, curve.ends, colour, legendgroup=curve.name)
    for curve, x, (colour, dash, symbol) in zip(curves, places, looks, strict=True):
        label = html.escape(curve.name, quote=False)
        fig.add_scatter(
            x=x,
            y=curve.values,
            name=label,
            legendgroup=curve.name,
            mode="lines+markers",
            line={"color": colour, "dash": dash},
            marker={"symbol": symbol},
            **point_hover(list(curve.sites), curve.ends, label),
        )
    if shared:
        after = curves[0].sites[0].endswith("resid_pre")
        layer_axis(fig.update_xaxes, curves[0].sites, "After block" if after else "Block")
        turn_labels(fig, curves[0].sites)
    else:
        fig.update_xaxes(title=DEPTH_TITLE)
    fig.update_yaxes(title=quantity)
    note = "; ".join(filter(None, (note, intervals_in_words(fig))))
    rows = -(-len(curves) // 2)
    styled(fig, title, height=400 + 22 * rows).update_layout(showlegend=True, margin_b=74 + 22 * rows)
    return with_subtitle(fig, html.escape(note, quote=False))


def overlaid_heatmaps(
    results: dict[str, Result], field: str, axes: tuple[str, ...], titles: tuple[str, str], note: str
) -> go.Figure:
    """Heatmaps of one field of several runs side by side, with one colour scale.

    Args:
        results: by name of the run.
        field: name of the field.
        axes: of the field.
        titles: of the figure and of the colour bar.
        note: below the title.
    """
    matrices = [drawn_values(result, field, axes) for result in results.values()]
    first = next(iter(results.values()))
    scale = matrix_scale(first, field, axes, np.concatenate([values.ravel() for values in matrices]))
    columns = min(PER_ROW, len(matrices))
    rows = -(-len(matrices) // columns)
    cells = (WIDTH - AROUND - BETWEEN * (columns - 1)) / columns
    plot = rows * cells + BETWEEN * (rows - 1)
    fig = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=[html.escape(name, quote=False) for name in results],
        horizontal_spacing=BETWEEN / (WIDTH - AROUND) if columns > 1 else 0,
        vertical_spacing=BETWEEN / plot if rows > 1 else 0,
    )
    fig.update_annotations(font={"size": 13})
    plain = {"showgrid": False, "showline": False, "tickcolor": "rgba(0, 0, 0, 0)", "constrain": "domain"}
    for number, (result, values) in enumerate(zip(results.values(), matrices, strict=True)):
        at = {"row": number // columns + 1, "col": number % columns + 1}
        names = [result.coordinates(axis) for axis in axes]
        ends = interval_ends(result, field)
        hover = cell_hover(names[0], names[1], ends, html.escape(titles[1], quote=False))
        places = {"x": list(range(len(names[1]))), "y": list(range(len(names[0])))}
        fig.add_trace(go.Heatmap(z=values, coloraxis="coloraxis", **places, **hover), **at)
        sides = sides_of(result, axes)
        updates = partial(fig.update_yaxes, **at), partial(fig.update_xaxes, **at)
        for update, own, side in zip(updates, names, sides, strict=True):
            step = max(1, -(-len(own) // MOST_TICKS))
            labels = short_names(own)[::step]
            ticks = {"tickmode": "array", "tickvals": list(range(0, len(own), step)), "ticktext": labels}
            update(title=site_axis_title(own, side), tickfont={"size": 10}, tickangle=0, **ticks, **plain)
        if max(map(len, short_names(names[1]))) > SHORT_LABEL:
            fig.update_xaxes(tickangle=-90, **at)
        anchor = fig.get_subplot(at["row"], at["col"]).xaxis.plotly_name.replace("axis", "")
        fig.update_yaxes(autorange="reversed", scaleanchor=anchor, **at)
    bar = colour_bar(titles[1])
    fig.update_layout(
        coloraxis={"colorscale": scale.name, "cmin": scale.low, "cmax": scale.high, "colorbar": bar | {"thickness": 16}}
    )
    styled(fig, titles[0], height=int(plot + 140))
    # Room for the names of the runs above their matrices.
    fig.update_layout(height=fig.layout.height + 20, margin_t=fig.layout.margin.t + 20)
    return with_subtitle(fig, html.escape("; ".join(filter(None, (note, scale.note))), quote=False))
