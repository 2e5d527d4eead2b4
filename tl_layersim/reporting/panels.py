"""Several figures as panels of one: the first picture of each result of a report."""

from __future__ import annotations

import copy
import html
import re
from collections.abc import Mapping
from typing import Literal

import plotly.graph_objects as go

from ..core.errors import LayersimError
from ..core.results import Result
from .style import GREY, PAPER_SIZES, on_what, with_size

# Pixels between the panels of a row, and of the line above all panels.
BETWEEN, LINE = 16, 24
AXIS = re.compile(r"([xy])(?:axis)?(\d*)( domain)?")
# Properties of an axis that name another axis.
REFERENCES = ("anchor", "overlaying", "scaleanchor", "matches")


def report_figure(
    report: Mapping[str, Result], width: Literal["column", "text"] | None = None, title: str | None = None
) -> go.Figure:
    """The first picture of each result of a report, in rows of two panels, or below one another in a column.

    Args:
        report: any.
        width: "column" or "text" for the size of a paper; None for the screen.
        title: above all panels; None for the model and the data of the run on the screen, "" for none.

    Raises:
        LayersimError: no result of the report has a picture.
    """
    results = {name: result for name, result in report.items() if result.pictures}
    if not results:
        raise LayersimError(f"No result of the report has a picture; it has {', '.join(report) or 'no results'}.")
    samples = [on_what(one.provenance, one.measured_on(one.pictures[0].field)) for one in results.values()]
    same = len(set(samples)) == 1
    figures = []
    for result in results.values():
        # The words below a title are those of all panels, or of the panel's own data.
        figure = result.plot(width=width)
        if same and width is None:
            common = html.escape(samples[0])
            own = [
                part.replace(common, "").removeprefix(" · ") for part in (figure.layout.title.subtitle.text or "").split("<br>")
            ]
            figure.layout.title.subtitle.text = "<br>".join(filter(None, own))
        figures.append(figure)
    above = title if title is not None else samples[0] if same and width is None else ""
    return panels(figures, width, above)


def panels(figures: list[go.Figure], width: str | None = None, title: str = "") -> go.Figure:
    """One figure with a panel for each of several.

    Args:
        figures: in order.
        width: "column" or "text" for the size of a paper; None for the screen.
        title: above all panels.
    """
    columns = 1 if width == "column" else min(2, len(figures))
    rows = [figures[n : n + columns] for n in range(0, len(figures), columns)]
    size = PAPER_SIZES[width]
    each = (size.width - BETWEEN * (columns - 1)) // columns if width else 500
    for figure in figures:
        with_size(figure, width, None, each)
    top = LINE if title else 0
    # Rows of one height on the screen, where narrow pages of the documentation put the panels in one column.
    heights = [max(figure.layout.height for figure in (row if width else figures)) for row in rows]
    whole = go.Figure(layout={"template": size.template, "width": each * columns + BETWEEN * (columns - 1)})
    words = {"text": html.escape(title), "x": 0, "pad": {"l": 10}, "y": 1, "yanchor": "top", "yref": "container"}
    whole.update_layout(
        height=sum(heights) + top,
        margin=dict.fromkeys("lrb", 0) | {"t": top},
        title=words | {"pad": {"t": 6, "l": 10}, "font": {"size": size.font, "color": GREY}},
        meta={"panels": len(figures), "rows": len(rows), "columns": columns},
    )
    for n, row in enumerate(rows):
        for m, figure in enumerate(row):
            _add_panel(whole, figure, m * (each + BETWEEN), sum(heights[:n]))
    return whole


def _add_panel(whole: go.Figure, figure: go.Figure, x: float, y: float) -> None:
    """Add a figure with its upper left corner at these pixels of the whole."""
    own, margin = figure.layout, figure.layout.margin
    wide, tall = whole.layout.width, whole.layout.height - whole.layout.margin.t
    left, right = (x + margin.l) / wide, (x + own.width - margin.r) / wide
    high, low = 1 - (y + margin.t) / tall, 1 - (y + own.height - margin.b) / tall
    present = whole.layout.to_plotly_json()
    offset = [sum(key.startswith(f"{side}axis") for key in present) for side in "xy"]
    layout = {"xaxis": {}, "yaxis": {}, **copy.deepcopy(own.to_plotly_json())}
    for key, axis in layout.items():
        if re.fullmatch(r"[xy]axis\d*", key):
            start, end = (left, right) if key[0] == "x" else (low, high)
            first, last = axis.get("domain", (0, 1))
            axis |= {"domain": [start + first * (end - start), start + last * (end - start)], "automargin": False}
            axis.setdefault("anchor", "y" if key[0] == "x" else "x")
            axis |= {name: _renamed(axis[name], offset) for name in REFERENCES if name in axis}
            whole.layout[_renamed(key, offset)] = axis
    number = sum(key.startswith("legend") for key in present) + 1
    legend = f"legend{number}" if number > 1 else "legend"
    shown = own.showlegend or (own.showlegend is None and len(figure.data) > 1)
    for trace in figure.data:
        drawn = copy.deepcopy(trace.to_plotly_json())
        drawn["xaxis"], drawn["yaxis"] = (_renamed(drawn.get(f"{side}axis", side), offset) for side in "xy")
        if drawn["type"] != "heatmap":
            drawn |= {"legend": legend, "showlegend": shown and drawn.get("showlegend", True)}
        for holder in (drawn, drawn.get("marker", {})):
            if "colorbar" in holder:
                place = {"x": right + 4 / wide, "xanchor": "left", "y": (low + high) / 2, "yanchor": "middle"}
                holder["colorbar"] |= place | {"len": high - low}
        whole.add_trace(drawn)
    below = {"x": (left + right) / 2, "xanchor": "center", "y": 1 - (y + own.height) / tall, "yanchor": "bottom"}
    whole.layout[legend] = {"orientation": "h", "xref": "paper", "yref": "paper", **below}
    for shape in layout.get("shapes", ()):
        whole.add_shape(shape | {f"{side}ref": _renamed(shape.get(f"{side}ref", side), offset) for side in "xy"})
    small = own.title.subtitle.text
    words = f"<b>{own.title.text}</b>" + (f'<br><span style="color: {GREY}">{small}</span>' if small else "")
    note = {"xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "top", "align": "left", "showarrow": False}
    at = {"x": (x + 8) / wide, "y": 1 - (y + 4) / tall}
    whole.add_annotation(text=words, font={"size": min(own.title.font.size, 14)}, **note, **at)


def _renamed(axis: str, offset: list[int]) -> str:
    """The name of an axis of a panel in the whole: `x2` or `xaxis2` with a higher number."""
    match = AXIS.fullmatch(axis)
    if match is None:
        return axis
    number = int(match[2] or 1) + offset["xy".index(match[1])]
    return f"{axis[: match.start(2)]}{number if number > 1 else ''}{match[3] or ''}"
