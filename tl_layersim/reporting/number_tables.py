"""The numbers of a figure as a table of text: a line for each site, with intervals, and models side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..core.intervals import margin_text
from ..core.label_table import COLUMNS
from ..core.results import Result
from .interval_bands import interval_ends
from .labels import axis_title
from .site_labels import short_names, site_axis_title

# Larger tables are left to `to_frame`.
MOST_LINES, MOST_COLUMNS = 300, 6


@dataclass(frozen=True)
class NumberTable:
    """Text of a table.

    Attributes:
        columns: their titles; the first is that of the sites or other labels.
        lines: of the table.
    """

    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


def number_table(result: Result, field: str) -> NumberTable | None:
    """The values of a field over one axis, or over a few series and one axis; None for a field of another form.

    A result of two models has a column for each, and a third with the second minus the first.

    Args:
        result: whose field.
        field: its name, as in a picture.
    """
    own = "values" if field == result.values_name else field
    axes = result.tensor_fields().get(own)
    if axes is None or not axes or len(axes) > 2:
        return None
    series = result.coordinates(axes[0]) if len(axes) == 2 else (result.declared(field).words,)
    labels = result.coordinates(axes[-1])
    if len(series) > MOST_COLUMNS or len(labels) > MOST_LINES or (len(axes) == 2 and axes[0] in COLUMNS):
        return None
    values = np.atleast_2d(getattr(result, own).numpy())
    ends = interval_ends(result, field)
    margins = np.atleast_2d((ends.high - ends.low) / 2) if ends is not None else np.full(values.shape, math.nan)
    cells = [[_number_text(values[row, at], margins[row, at]) for row in range(len(series))] for at in range(len(labels))]
    names = [f"{axis_title(axes[0])} {name}" if isinstance(name, int | float) else str(name) for name in series]
    if axes[0] == "model" and len(series) == 2:
        names.append("change")
        for at, cell in enumerate(cells):
            cell.append(_number_text(values[1, at] - values[0, at], math.nan, "+.4g"))
    sites = all(isinstance(label, str) for label in labels) and axes[-1] in (*COLUMNS, "layer", "skipped", "affected")
    shown = short_names(labels) if sites else [str(label) for label in labels]
    title = site_axis_title(labels, axis_title(axes[-1])) if sites else axis_title(axes[-1])
    return NumberTable((title, *names), tuple((name, *cell) for name, cell in zip(shown, cells, strict=True)))


def _number_text(value: float, margin: float, form: str = "") -> str:
    if not math.isfinite(value):
        return "–"
    return format(value, form) if form else margin_text(float(value), float(margin))
