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
    return {"data": [_json_value(trace) for trace in whole["data"]], "layout": _json_value(whole["layout"])}


def _json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return _json_value(_decoded(value)) if "bdata" in value else {key: _json_value(own) for key, own in value.items()}
    if isinstance(value, np.ndarray):
        return _json_value(value.tolist())
    if isinstance(value, list | tuple):
        return [_json_value(own) for own in value]
    if isinstance(value, np.generic):
        return _json_value(value.item())
    return rounded(value) if isinstance(value, float) else value


def rounded(value: float) -> float | int | None:
    """A number with six significant digits, whole where it is whole; None where it is not finite.

    Examples:
        >>> rounded(0.12345678), rounded(3.0), rounded(float("nan"))
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
