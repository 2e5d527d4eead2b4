"""`figure`: the figure of one field of a result; `panels`: several figures side by side."""

from __future__ import annotations

import copy
import html
import math
import re
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ..core.errors import LayersimError
from ..core.intervals import bounds_of, field_named
from ..core.results import UNTRAINED, Result
from .heat_map import MATRICES, fraction_heat_map, matrix_heat_map, series_heat_map, token_grid
from .lines_and_bars import (
    ZERO_LINE,
    Ends,
    Series,
    bars,
    interval_ends,
    is_wide,
    lines,
    named_points,
    paths,
    quantile_lines,
    sublayer_series,
    widen_axis,
    with_baselines,
)
from .many_model_figures import model_heatmap
from .site_labels import axis_title, markup, series_label, short_names, site_words
from .style import DASHES, GREY, MOST_LINES, PAPER_SIZES, series_look, with_provenance, with_size

# Axes whose series are ordered.
ORDERED_AXES = ("direction", "k", "look", "threshold", "length")


def figure(result: Result, field: str | None = None, width: str | None = None, title: str | None = None) -> go.Figure:
    """Draw one field of a result with its intervals.

    Model and number of tokens stand below the title.

    Args:
        result: the result.
        field: name of the field, or "untrained " and the name; None for the field of the first picture.
        width: "column" or "text" for the size of a paper; None for the screen.
        title: title of the figure; None for the field's title, "" for none.

    Raises:
        LayersimError: the result has no such field, or the field was not measured or has more than two axes.
    """
    if not field:
        field = result.pictures[0].name if result.pictures else "values"
    if field.startswith(UNTRAINED):
        return with_size(_untrained_figure(result, field.removeprefix(UNTRAINED)), width, title)
    field_name = field_named(result, field)
    if bool(getattr(result, field_name).isnan().all()):
        raise LayersimError(f"`field` is {field!r}, which this run did not measure: all values are NaN.")
    bounds = bounds_of(result).get(field_name) or (-math.inf, math.inf)
    fig = widen_axis(_field_figure(result, field_name, width), bounds)
    return with_size(with_provenance(fig, result.provenance, result.measured_on(field_name)), width, title)


def _untrained_figure(result: Result, field: str) -> go.Figure:
    """Draw the mean of a field over untrained models."""
    field_name = field_named(result, field)
    untrained = result.of_untrained(field_name)
    if untrained is None:
        raise LayersimError(f"`untrained {field}` was not measured; pass baseline='untrained' to `analyze`.")
    means: dict[str, Any] = {field_name: untrained.mean(0)}
    fig = figure(replace(result, **means, replicates=(), block_tokens=(), untrained=()), field)
    return fig.update_layout(title_text=f"{fig.layout.title.text}, untrained, mean of {len(untrained)} seeds")


def _field_figure(result: Any, field: str, width: str | None) -> go.Figure:
    declared = result.declared(field)
    axes = result.tensor_fields()[field]
    values = getattr(result, field).numpy()
    titles = (site_words(result.layers, declared.title), declared.words)
    ends = interval_ends(result, field)
    labels = [result.coordinates(axis) for axis in axes]
    if declared.drawn == "tokens":
        return token_grid(result, titles, width)
    if declared.drawn == "paths":
        skipped = int(result.provenance.options.get("skip_first", 0))
        shares = result.explained.tolist()
        return paths(values, shares, result.tokens, result.layers, titles[0], skipped)
    if declared.drawn == "bars":
        return bars(labels[0], values, ends, axes[0], titles)
    if declared.drawn == "fractions":
        return fraction_heat_map(result, field, axes, titles)
    if declared.drawn == "lines":
        return _many_lines(result, axes, labels, values, titles)
    if declared.drawn:
        # One field over another, with a point for each label of their axis.
        points = (getattr(result, declared.drawn).numpy(), values)
        ends_of_points = (interval_ends(result, declared.drawn), ends)
        names = [f"{label:g}" for label in labels[0]]
        words_of_axes = (titles[0], result.declared(declared.drawn).words, declared.words)
        return named_points(points, ends_of_points, names, axis_title(axes[0]), words_of_axes)
    if axes == ("row_model", "column_model"):
        return model_heatmap(result, *titles, ends)
    if axes in MATRICES:
        return matrix_heat_map(result, field, axes, titles, ends)
    if len(axes) == 1:
        return _curve(result, field, axes[0], values, titles, ends)
    if len(axes) != 2:
        raise LayersimError(f"`field` is {field!r}, which has {len(axes)} axes; a figure shows one or two. Use .to_frame().")
    if axes[0] == "quantile":
        return quantile_lines(labels[0], labels[1], values, titles, axes[1], ends)
    if axes[1] == "direction":
        # Lines over depth for a few directions: the first, the last, and some between.
        directions = sorted({round(n) for n in np.geomspace(1, len(labels[1]), min(len(labels[1]), MOST_LINES))})
        rows = np.array(directions) - 1
        axes = axes[::-1]
        labels = [tuple(directions), labels[0]]
        values = values.T[rows]
        if ends is not None:
            ends = Ends(ends.low.T[rows], ends.high.T[rows])
    elif len(labels[0]) > MOST_LINES and axes[0] not in ("model", "stage"):
        return series_heat_map(result, field, axes, titles, ends)
    looks = series_look(len(labels[0]), ordered=axes[0] in ORDERED_AXES)
    names = [markup(series_label(axes[0], label)) for label in labels[0]]
    series = [Series(name, values[n], ends and ends.at(n), **looks[n]) for n, name in enumerate(names)]
    quantity = f"{titles[1]}<br>{declared.better} is better" if declared.better else titles[1]
    log = axes[0] == "direction" or (declared.scale == "log" and is_wide(values))
    return lines(labels[1], series, titles[0], quantity, axes[1], log)


def _many_lines(result: Result, axes: tuple[str, ...], labels: list[Any], values: Any, titles: tuple[str, str]) -> go.Figure:
    """Draw lines over the last axis of a field, on a logarithmic scale.

    Each label of the first axis has a colour.

    Labels of further axes differ in their dashes.
    """
    labels_of_lines = []
    for labels_of_axis in labels[:-1]:
        are_sites = labels_of_axis and str(labels_of_axis[0]) in result.layers
        labels_of_lines.append(short_names(labels_of_axis) if are_sites else labels_of_axis)
    looks = series_look(len(labels[0]), ordered=len(labels[0]) > MOST_LINES)
    rows = values.reshape(-1, values.shape[-1])
    lines_of_colour = len(rows) // len(labels[0])
    series = []
    for n, (row, line_labels) in enumerate(zip(rows, product(*labels_of_lines), strict=True)):
        name = ", ".join(markup(series_label(axis, label)) for axis, label in zip(axes, line_labels, strict=False))
        look = looks[n // lines_of_colour] | {"dash": DASHES[n % lines_of_colour % len(DASHES)]}
        # A logarithmic scale has no place for 0.
        series.append(Series(name, np.where(row > 0, row, np.nan), **look))
    return lines(labels[-1], series, *titles, axes[-1], log=True)


def _curve(result: Result, field: str, axis: str, values: Any, titles: tuple[str, str], ends: Ends | None) -> go.Figure:
    """Draw a field over its only axis."""
    declared = result.declared(field)
    names = result.coordinates(axis)
    baselines = result.baselines(field)
    if axis == "sublayer":
        blocks = list(dict.fromkeys(name.rsplit(".", 1)[0] for name in names))
        # The MLP of the first block often multiplies the norm, and would flatten all other values on a linear axis.
        wide = is_wide(values)
        sites = tuple(f"{block}.hook_resid_post" for block in blocks)
        fig = lines(sites, sublayer_series(names, blocks, values, ends), *titles, "layer", wide)
        return fig if fig.layout.yaxis.type == "log" else fig.update_yaxes(ZERO_LINE)
    untrained = result.of_untrained(field)
    if untrained is None:
        # With reference lines, the legend has no room for the unit.
        series = [Series(declared.label if baselines else declared.words, values, ends)]
    else:
        name = f"untrained, mean of {len(untrained)} seeds"
        series = [
            Series("trained", values, ends),
            Series(name, untrained.mean(0).numpy(), None, GREY, "square", "dash"),
        ]
    fig = lines(names, series, *titles, axis, declared.scale == "log" and is_wide(values))
    if declared.scale == "free" or axis == "step":
        fig.update_yaxes(rangemode="normal")
    return with_baselines(fig, baselines)


# Pixels between panels of a row.
BETWEEN = 16
# Pixels of the title above all panels.
LINE = 24
# Width of a panel on the screen, in pixels.
PANEL_WIDTH = 500
AXIS = re.compile(r"([xy])(?:axis)?(\d*)( domain)?")
# Properties of an axis that name another axis.
REFERENCES = ("anchor", "overlaying", "scaleanchor", "matches")


def panels(figures: list[go.Figure], width: str | None = None, title: str = "") -> go.Figure:
    """Combine figures as panels of one figure.

    Args:
        figures: the figures, in order.
        width: "column" or "text" for the size of a paper; None for the screen.
        title: title above all panels.
    """
    columns = 1 if width == "column" else min(2, len(figures))
    rows = [figures[n : n + columns] for n in range(0, len(figures), columns)]
    size = PAPER_SIZES[width]
    gaps = BETWEEN * (columns - 1)
    panel_width = (size.width - gaps) // columns if width else PANEL_WIDTH
    for figure in figures:
        with_size(figure, width, None, panel_width)
    top = LINE if title else 0
    heights = [max(figure.layout.height for figure in row) for row in rows]
    if not width:
        # Rows of one height on the screen, where narrow pages of the documentation put the panels in one column.
        heights = [max(heights)] * len(rows)
    whole = go.Figure(layout={"template": size.template, "width": panel_width * columns + gaps})
    whole.update_layout(
        height=sum(heights) + top,
        margin={"l": 0, "r": 0, "b": 0, "t": top},
        title={
            "text": html.escape(title),
            "x": 0,
            "pad": {"t": 6, "l": 10},
            "y": 1,
            "yanchor": "top",
            "yref": "container",
            "font": {"size": size.font, "color": GREY},
        },
        meta={"panels": len(figures), "rows": len(rows), "columns": columns},
    )
    for number, row in enumerate(rows):
        for column, figure in enumerate(row):
            _add_panel(whole, figure, column * (panel_width + BETWEEN), sum(heights[:number]))
    return whole


def _add_panel(whole: go.Figure, figure: go.Figure, x: float, y: float) -> None:
    """Add a figure as a panel, with its upper left corner at pixel (x, y)."""
    panel = figure.layout
    margin = panel.margin
    whole_width = whole.layout.width
    whole_height = whole.layout.height - whole.layout.margin.t
    # Sides of the panel's plot area, as fractions of the whole figure.
    left = (x + margin.l) / whole_width
    right = (x + panel.width - margin.r) / whole_width
    top = 1 - (y + margin.t) / whole_height
    bottom = 1 - (y + panel.height - margin.b) / whole_height
    present = whole.layout.to_plotly_json()
    # Numbers of x axes and of y axes that the whole figure has already.
    offset = [sum(key.startswith(f"{side}axis") for key in present) for side in "xy"]
    layout = {"xaxis": {}, "yaxis": {}, **copy.deepcopy(panel.to_plotly_json())}
    for key, axis in layout.items():
        if re.fullmatch(r"[xy]axis\d*", key):
            start, end = (left, right) if key[0] == "x" else (bottom, top)
            first, last = axis.get("domain", (0, 1))
            axis |= {"domain": [start + first * (end - start), start + last * (end - start)], "automargin": False}
            axis.setdefault("anchor", "y" if key[0] == "x" else "x")
            axis |= {name: _renamed(axis[name], offset) for name in REFERENCES if name in axis}
            whole.layout[_renamed(key, offset)] = axis
    number = sum(key.startswith("legend") for key in present) + 1
    legend = f"legend{number}" if number > 1 else "legend"
    has_legend = panel.showlegend or (panel.showlegend is None and len(figure.data) > 1)
    colour_bar_place = {
        "x": right + 4 / whole_width,
        "xanchor": "left",
        "y": (bottom + top) / 2,
        "yanchor": "middle",
        "len": top - bottom,
    }
    for trace in figure.data:
        drawn = copy.deepcopy(trace.to_plotly_json())
        for side in "xy":
            drawn[f"{side}axis"] = _renamed(drawn.get(f"{side}axis", side), offset)
        if drawn["type"] != "heatmap":
            drawn |= {"legend": legend, "showlegend": has_legend and drawn.get("showlegend", True)}
        for holder in (drawn, drawn.get("marker", {})):
            if "colorbar" in holder:
                holder["colorbar"] |= colour_bar_place
        whole.add_trace(drawn)
    whole.layout[legend] = {
        "orientation": "h",
        "xref": "paper",
        "yref": "paper",
        "x": (left + right) / 2,
        "xanchor": "center",
        "y": 1 - (y + panel.height) / whole_height,
        "yanchor": "bottom",
    }
    for shape in layout.get("shapes", ()):
        whole.add_shape(shape | {f"{side}ref": _renamed(shape.get(f"{side}ref", side), offset) for side in "xy"})
    subtitle = panel.title.subtitle.text
    title = f"<b>{panel.title.text}</b>"
    if subtitle:
        title += f'<br><span style="color: {GREY}">{subtitle}</span>'
    whole.add_annotation(
        text=title,
        font={"size": min(panel.title.font.size, 14)},
        x=(x + 8) / whole_width,
        y=1 - (y + 4) / whole_height,
        xref="paper",
        yref="paper",
        xanchor="left",
        yanchor="top",
        align="left",
        showarrow=False,
    )


def _renamed(axis: str, offset: list[int]) -> str:
    """Name of a panel's axis in the combined figure, such as `x2` or `xaxis2`."""
    match = AXIS.fullmatch(axis)
    if match is None:
        return axis
    number = int(match[2] or 1) + offset["xy".index(match[1])]
    return f"{axis[: match.start(2)]}{number if number > 1 else ''}{match[3] or ''}"
