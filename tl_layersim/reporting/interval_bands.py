"""Confidence intervals in figures, as bands, whiskers and hover texts."""

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
    """Lower and upper ends of 95 % intervals, two arrays in the shape of the values; NaN for unknown ends."""

    low: Any
    high: Any

    def at(self, index: Any) -> Ends:
        """The ends at an index of both arrays."""
        return Ends(self.low[index], self.high[index])


def interval_ends(result: Result, what: str | Callable[[Any], Any]) -> Ends | None:
    """The ends of the intervals of a field; None for a result or a field without intervals.

    Args:
        result: the result.
        what: name of the field, "values" for the field of `values_name`, or a function of the result, see `Result.interval`.
    """
    if not result.has_intervals or (isinstance(what, str) and bounds_of(result).get(what, ()) is None):
        return None
    _, low, high, _ = result.interval(what)
    return Ends(low.numpy(), high.numpy())


def hover_texts(ends: Ends, digits: str = ".4f") -> Any:
    """Intervals as text after a value, such as " (0.29 to 0.33)"; empty if an end is unknown.

    Args:
        ends: ends of the intervals, arrays of any shape.
        digits: format of a number.
    """
    texts = np.empty(np.shape(ends.low), dtype=object)
    for index in np.ndindex(texts.shape):
        low, high = float(ends.low[index]), float(ends.high[index])
        texts[index] = f" ({low:{digits}} to {high:{digits}})" if np.isfinite(low) and np.isfinite(high) else ""
    return texts


def point_hover(names: Sequence[Any], ends: Ends | None, label: str) -> dict[str, Any]:
    """Data and template of the hover text at a point: its name, its value, and its interval if there is one.

    Args:
        names: names of the points.
        ends: ends of the confidence intervals; None without intervals.
        label: label of the line, as markup.
    """
    if ends is None:
        return {"customdata": list(names), "hovertemplate": "%{customdata}<br>%{y:.4f}<extra>" + label + "</extra>"}
    data = [list(pair) for pair in zip(names, hover_texts(ends), strict=True)]
    return {"customdata": data, "hovertemplate": "%{customdata[0]}<br>%{y:.4f}%{customdata[1]}<extra>" + label + "</extra>"}


def cell_hover(rows: Sequence[Any], columns: Sequence[Any], ends: Ends | None, quantity: str) -> dict[str, Any]:
    """Data and template of the hover text at a cell: row, column, value, and interval if there is one.

    Args:
        rows: names of the rows.
        columns: names of the columns.
        ends: ends of the confidence intervals, `row column`; None without intervals.
        quantity: name of the quantity, as markup.
    """
    texts = None if ends is None else hover_texts(ends)
    data = [
        [(row, column) if texts is None else (row, column, texts[i, j]) for j, column in enumerate(columns)]
        for i, row in enumerate(rows)
    ]
    words = "row: %{customdata[0]}<br>column: %{customdata[1]}<br>" + quantity + ": %{z:.4f}"
    own = "" if ends is None else "%{customdata[2]}"
    return {"hoverongaps": False, "customdata": data, "hovertemplate": f"{words}{own}<extra></extra>"}


def add_band(fig: go.Figure, x: Any, ends: Ends, colour: str, **trace: Any) -> None:
    """Add a shaded band to a figure. Lines that are added later lie above it; points without an interval leave a gap.

    Args:
        fig: the figure.
        x: x of the points, in ascending order.
        ends: ends of the confidence intervals.
        colour: colour of the line, as "#rrggbb".
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
        line={"width": 1, "color": shade.format(OUTLINE)},
        fill="toself",
        fillcolor=shade.format(FILL),
        hoverinfo="skip",
        showlegend=False,
        meta=INTERVALS,
        **trace,
    )


def whiskers(values: Any, ends: Ends) -> dict[str, Any]:
    """Error bars for `error_x` or `error_y` of a trace; none if an end is unknown."""
    return {
        "type": "data",
        "symmetric": False,
        "array": ends.high - values,
        "arrayminus": values - ends.low,
        "thickness": 1,
        "width": 3,
    }


def intervals_in_words(fig: go.Figure) -> str:
    """How a figure marks its intervals, in words; empty if it draws none.

    Args:
        fig: a figure with bands from `add_band` and error bars from `whiskers`.

    Examples:
        >>> bars = whiskers(np.array([0.3]), Ends(np.array([0.2]), np.array([0.5])))
        >>> intervals_in_words(go.Figure(go.Scatter(x=[0], y=[0.3], error_y=bars)))
        'whiskers: 95 % intervals'
    """
    bars = [trace[side].array for trace in fig.data for side in ("error_x", "error_y") if side in trace]
    marks = ["bands"] * any(trace.meta == INTERVALS for trace in fig.data)
    marks += ["whiskers"] * any(bar is not None and np.nansum(np.array(bar, dtype=float)) > 0 for bar in bars)
    return f"{' and '.join(marks)}: {INTERVALS}" if marks else ""
