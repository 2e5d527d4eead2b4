"""Several figures as panels of one: the first picture of each result of a report."""

from __future__ import annotations

import copy
import html
import re
from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from ..core.errors import LayersimError
from ..core.results import Result
from .style import GREY, on_what, styled

PANELS_IN_A_ROW = 2
# Pixels of a panel with its title, axis labels and colour bar; fractions of it that these take.
WIDTH, HEIGHT = 500, 420
LEFT, RIGHT, TOP, BOTTOM = 0.15, 0.18, 0.12, 0.2
# Fewest pixels from the tick of "embed" to the next one with a label.
EMBED_ROOM = 36
AXIS = re.compile(r"([xy])(?:axis)?(\d*)(?: domain)?")
# Properties of an axis that name another axis.
REFERENCES = ("anchor", "overlaying", "scaleanchor", "matches")


def report_figure(report: Mapping[str, Result]) -> go.Figure:
    """The first picture of each result of a report, in rows of two panels.

    Args:
        report: any.

    Raises:
        LayersimError: no result of the report has a picture.
    """
    results = {name: result for name, result in report.items() if result.pictures}
    figures = [(name, result.plot(result.pictures[0].field)) for name, result in results.items()]
    if not figures:
        raise LayersimError(f"No result of the report has a picture; it has {', '.join(report) or 'no results'}.")
    return panels(figures, [on_what(one.provenance, one.measured_on(one.pictures[0].field)) for one in results.values()])


def panels(figures: list[tuple[str, go.Figure]], samples: list[str]) -> go.Figure:
    """One figure with a panel for each of several.

    Args:
        figures: names and figures. A name follows the title of a panel where another panel has the same title.
        samples: of each panel the model and what it was measured on, in words: above all panels where they are the same, else
            below the title of each.
    """
    columns = min(PANELS_IN_A_ROW, len(figures))
    rows = -(-len(figures) // columns)
    whole = styled(go.Figure(), "", height=rows * HEIGHT, width=columns * WIDTH)
    # Pages of the documentation that are narrow put the panels in one column.
    whole.update_layout(meta={"panels": len(figures), "rows": rows, "columns": columns})
    same = len(set(samples)) == 1
    common = html.escape(samples[0]) if same else ""
    title = {"text": common, "font": {"size": 13, "color": GREY}, "pad": {"t": 10, "l": 10}}
    whole.update_layout(title=title, margin={"l": 10, "r": 10, "t": 44 if common else 30, "b": 10})
    titles = [_panel_title(figure) for _, figure in figures]
    for number, (name, figure) in enumerate(figures):
        row, column = divmod(number, columns)
        cell = (column / columns, 1 - (row + 1) / rows, (column + 1) / columns, 1 - row / rows)
        words = f"<b>{titles[number]}{f' ({html.escape(name)})' if titles.count(titles[number]) > 1 else ''}</b>"
        if samples[number] and not same:
            words += f'<br><span style="font-size: 12px; color: {GREY}">{html.escape(samples[number])}</span>'
        _add_panel(whole, words, figure, cell)
    return whole


def _panel_title(figure: go.Figure) -> str:
    return (figure.layout.title.text or "").replace("<br>", " ")


def _add_panel(whole: go.Figure, title: str, figure: go.Figure, cell: tuple[float, float, float, float]) -> None:
    """Add the traces, axes, annotations and shapes of a figure within a part of the whole (left, bottom, right, top)."""
    left, bottom, right, top = cell
    inner = (
        left + LEFT * (right - left),
        bottom + BOTTOM * (top - bottom),
        right - RIGHT * (right - left),
        top - TOP * (top - bottom),
    )
    layout = copy.deepcopy(figure.layout.to_plotly_json())
    offset = (
        sum(1 for key in whole.layout.to_plotly_json() if key.startswith("xaxis")),
        sum(1 for key in whole.layout.to_plotly_json() if key.startswith("yaxis")),
    )
    for axis in ("xaxis", "yaxis"):
        layout.setdefault(axis, {})
    for key, axis in layout.items():
        if re.fullmatch(r"[xy]axis\d*", key):
            low, high = (inner[0], inner[2]) if key[0] == "x" else (inner[1], inner[3])
            begin, end = axis.get("domain", (0, 1))
            axis["domain"] = [low + begin * (high - low), low + end * (high - low)]
            axis.setdefault("anchor", "y" if key[0] == "x" else "x")
            if key[0] == "x":
                _make_room_for_embed(axis)
            for name in REFERENCES:
                if name in axis:
                    axis[name] = _renamed(axis[name], offset)
            whole.layout[_renamed(key, offset)] = axis
    for trace in figure.data:
        own = copy.deepcopy(trace.to_plotly_json())
        own["xaxis"], own["yaxis"] = (_renamed(own.get(f"{axis}axis", axis), offset) for axis in "xy")
        own["showlegend"] = False
        if own.get("colorbar") is not None or own["type"] == "heatmap":
            bar = {**(own.get("colorbar") or {}), "x": inner[2] + 0.005, "xanchor": "left", "xref": "paper"}
            own["colorbar"] = bar | {"y": (inner[1] + inner[3]) / 2, "yanchor": "middle", "len": inner[3] - inner[1]}
        whole.add_trace(own)
    for kind in ("annotations", "shapes"):
        for drawn in layout.get(kind, ()):
            whole.layout[kind] = (*whole.layout[kind], _in_panel(drawn, inner, offset))
    whole.add_annotation(
        text=title,
        align="left",
        font={"size": 14},
        x=left,
        y=top,
        xref="paper",
        yref="paper",
        xanchor="left",
        yanchor="top",
        showarrow=False,
    )


def _make_room_for_embed(axis: dict[str, Any]) -> None:
    """Leave out the label beside "embed" on the horizontal axis of a panel whose ticks are too close for both."""
    texts, at = list(axis.get("ticktext", ())), axis.get("tickvals", ())
    if len(texts) < 2 or texts[0] != "embed":
        return
    # The cells of a heat map are square, and its axis may be shorter than the panel is wide.
    wide, high = WIDTH * (1 - LEFT - RIGHT), HEIGHT * (1 - TOP - BOTTOM)
    room = min(wide, high) if axis.get("constrain") == "domain" else wide
    if room * (at[1] - at[0]) / (at[-1] - at[0] + 1) < EMBED_ROOM:
        axis["ticktext"] = [texts[0], "", *texts[2:]]


def _renamed(axis: str, offset: tuple[int, int]) -> str:
    """The name of an axis of a panel in the whole: `x2` or `xaxis2` with a higher number."""
    match = AXIS.fullmatch(axis)
    if match is None:
        return axis
    number = int(match[2] or 1) + offset["xy".index(match[1])]
    return axis.replace(axis[: match.end(2)], f"{axis[: match.start(2)]}{number if number > 1 else ''}", 1)


def _in_panel(drawn: dict[str, Any], inner: tuple[float, float, float, float], offset: tuple[int, int]) -> dict[str, Any]:
    """An annotation or a shape with its place in the whole."""
    placed = dict(drawn)
    for axis, low, high in (("x", inner[0], inner[2]), ("y", inner[1], inner[3])):
        reference = placed.get(f"{axis}ref", "paper")
        if reference == "paper":
            for key in (axis, f"{axis}0", f"{axis}1"):
                if key in placed:
                    placed[key] = low + placed[key] * (high - low)
        placed[f"{axis}ref"] = _renamed(reference, offset)
    return placed
