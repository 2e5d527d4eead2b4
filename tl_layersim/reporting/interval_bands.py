"""Confidence intervals in figures: the ends of a field's intervals as bands, whiskers and hover texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
from plotly.colors import hex_to_rgb

from ..core.intervals import bounds_of
from ..core.results import Result

# The mark of a trace that is the band of intervals.
INTERVALS = "95 % intervals"
# Opacities of a band and of its outline, which shows the interval of a point without neighbours.
FILL, OUTLINE = 0.16, 0.22


class Ends(NamedTuple):
    """Lower and upper ends of the 95 % intervals of some values, as arrays in the shape of the values; NaN where unknown."""

    low: Any
    high: Any

    def at(self, index: Any) -> Ends:
        """The ends at an index of both arrays."""
        return Ends(self.low[index], self.high[index])


def interval_ends(result: Result, what: str | Callable[[Any], Any]) -> Ends | None:
    """The ends of the intervals of a field; None for a result or a field without intervals.

    Args:
        result: whose field.
        what: name of the field, or a function of the result, see `Result.interval`.
    """
    field = "values" if what == result.values_name else what
    if not result.has_intervals or (isinstance(field, str) and bounds_of(result).get(field, ()) is None):
        return None
    _, low, high, _ = result.interval(what)
    return Ends(low.numpy(), high.numpy())


def hover_texts(ends: Ends, digits: str = ".4f") -> Any:
    """The intervals as text behind a value, such as " (0.29 to 0.33)"; empty where an end is unknown.

    Args:
        ends: of any shape.
        digits: format of a number.
    """
    texts = np.empty(np.shape(ends.low), dtype=object)
    for index in np.ndindex(texts.shape):
        low, high = float(ends.low[index]), float(ends.high[index])
        texts[index] = f" ({low:{digits}} to {high:{digits}})" if np.isfinite(low) and np.isfinite(high) else ""
    return texts


def point_hover(names: Sequence[Any], ends: Ends | None, label: str) -> dict[str, Any]:
    """Data and template of the text at a point of a line: its name, its value, and its interval where it has one.

    Args:
        names: of the points.
        ends: of the intervals; None without intervals.
        label: of the line, as markup.
    """
    if ends is None:
        return {"customdata": list(names), "hovertemplate": "%{customdata}<br>%{y:.4f}<extra>" + label + "</extra>"}
    data = [list(pair) for pair in zip(names, hover_texts(ends), strict=True)]
    return {"customdata": data, "hovertemplate": "%{customdata[0]}<br>%{y:.4f}%{customdata[1]}<extra>" + label + "</extra>"}


def cell_hover(
    rows: Sequence[str],
    columns: Sequence[str],
    ends: Ends | None,
    quantity: str = "",
    sides: tuple[str, str] = ("row", "column"),
    digits: str = ".4f",
) -> dict[str, Any]:
    """Data and template of the text at a cell: the names of its row and column, its value, and its interval where it has one.

    Args:
        rows: names of the rows.
        columns: names of the columns.
        ends: of the intervals, `row column`; None without intervals.
        quantity: the value in words, as markup.
        sides: what rows and columns are, as markup.
        digits: format of a number.
    """
    names = [[(row, column) for column in columns] for row in rows]
    before = f"{sides[0]}: %{{customdata[0]}}<br>{sides[1]}: %{{customdata[1]}}<br>"
    value = f"{quantity}: %{{z:{digits}}}" if quantity else f"%{{z:{digits}}}"
    cells: dict[str, Any] = {"hoverongaps": False}
    if ends is None:
        return cells | {"customdata": names, "hovertemplate": f"{before}{value}<extra></extra>"}
    data = [
        [(*pair, text) for pair, text in zip(*row, strict=True)] for row in zip(names, hover_texts(ends, digits), strict=True)
    ]
    return cells | {"customdata": data, "hovertemplate": f"{before}{value}%{{customdata[2]}}<extra></extra>"}


def add_band(fig: go.Figure, x: Any, ends: Ends, colour: str, strength: float = 1.0, **trace: Any) -> None:
    """Add a shaded band to a figure; lines that are added later lie above it. Points without an interval leave a gap.

    Args:
        fig: the figure.
        x: of the points, in order.
        ends: of the points.
        colour: of the line, as "#rrggbb".
        strength: opacity of the line, from 0 to 1.
        **trace: further properties, such as `legendgroup`.
    """
    xs: list[Any] = []
    ys: list[Any] = []
    known = np.isfinite(ends.low) & np.isfinite(ends.high)
    for run in np.split(np.arange(len(known)), np.flatnonzero(np.diff(known)) + 1):
        if len(run) and known[run[0]]:
            # Forth along the upper ends and back along the lower ones; None parts the runs.
            xs += [*(x[n] for n in run), *(x[n] for n in run[::-1]), None]
            ys += [*ends.high[run], *ends.low[run[::-1]], None]
    if not xs:
        return
    shade = f"rgba({', '.join(map(str, hex_to_rgb(colour)))}, {{}})"
    fig.add_scatter(
        x=xs[:-1],
        y=ys[:-1],
        mode="lines",
        line={"width": 1, "color": shade.format(round(OUTLINE * strength, 3))},
        fill="toself",
        fillcolor=shade.format(round(FILL * strength, 3)),
        hoverinfo="skip",
        showlegend=False,
        meta=INTERVALS,
        **trace,
    )


def whiskers(values: Any, ends: Ends) -> dict[str, Any]:
    """Error bars from the lower to the upper ends, for `error_x` or `error_y` of a trace; none where an end is unknown.

    Args:
        values: of the points.
        ends: of the points.
    """
    return {
        "type": "data",
        "symmetric": False,
        "array": ends.high - values,
        "arrayminus": values - ends.low,
        "thickness": 1,
        "width": 3,
    }


def intervals_in_words(fig: go.Figure) -> str:
    """The marks of the intervals in a figure; empty for a figure that draws no intervals.

    Args:
        fig: with bands of `add_band` and error bars of `whiskers`.

    Examples:
        >>> bars = whiskers(np.array([0.3]), Ends(np.array([0.2]), np.array([0.5])))
        >>> intervals_in_words(go.Figure(go.Scatter(x=[0], y=[0.3], error_y=bars)))
        'whiskers: 95 % intervals'
    """
    bars = [trace[side].array for trace in fig.data for side in ("error_x", "error_y") if side in trace]
    marks = ["bands"] * any(trace.meta == INTERVALS for trace in fig.data)
    marks += ["whiskers"] * any(bar is not None and np.nansum(np.array(bar, dtype=float)) > 0 for bar in bars)
    return f"{' and '.join(marks)}: {INTERVALS}" if marks else ""
