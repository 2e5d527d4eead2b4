"""The data of a figure as plain JSON with short numbers, for pages."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import plotly.graph_objects as go

# Hover texts show four or five digits.
DIGITS = 6


def figure_json(figure: go.Figure) -> dict[str, Any]:
    """Traces and layout of a figure as lists, dicts and numbers of six significant digits; None for undefined numbers.

    Args:
        figure: any plotly figure.
    """
    whole = figure.to_plotly_json()
    return {"data": [_plain(trace) for trace in whole["data"]], "layout": _plain(whole["layout"])}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return _plain(_decoded(value)) if "bdata" in value else {key: _plain(own) for key, own in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(own) for own in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    return shortened(value) if isinstance(value, float) else value


def shortened(value: float) -> float | int | None:
    """A number with six significant digits, whole where it is whole; None where it is not finite.

    Examples:
        >>> shortened(0.12345678), shortened(3.0), shortened(float("nan"))
        (0.123457, 3, None)
    """
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() else short


def _decoded(packed: dict[str, Any]) -> np.ndarray:
    """The array that plotly wrote as base 64."""
    array = np.frombuffer(base64.b64decode(packed["bdata"]), dtype=np.dtype(packed["dtype"]))
    shape = packed.get("shape")
    return array.reshape([int(size) for size in str(shape).split(",")]) if shape else array
