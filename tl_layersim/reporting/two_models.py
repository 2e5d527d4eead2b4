"""Figures of two models side by side, such as before and after a training: two hues, and the better one in words."""

from __future__ import annotations

import html
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ..core.fields import Declaration
from .curves import LOG_FACTOR, Series, lines
from .interval_bands import Ends
from .style import series_look, with_subtitle


def model_lines(
    labels: tuple[tuple[str, ...], tuple[str, ...]],
    values: Any,
    titles: tuple[str, str],
    axis: str,
    ends: Ends | None,
    declared: Declaration,
) -> go.Figure:
    """Line plot over layers of one value of each of two models; below the title, at how many layers each is better.

    Args:
        labels: names of the models, and of the layers.
        values: `model layer`.
        titles: of the figure, and of the vertical axis.
        axis: name of the horizontal axis.
        ends: of the intervals of the values; None without intervals.
        declared: of the field.
    """
    models, names = labels
    known = values[np.isfinite(values)]
    wide = declared.scale == "log" and bool(len(known)) and bool(known.max() > LOG_FACTOR * max(known.min(), 0))
    looks = series_look(len(models), ordered=False)
    series = [
        Series(html.escape(model), values[n], ends and ends.at(n), **look)
        for n, (model, look) in enumerate(zip(models, looks, strict=True))
    ]
    fig = lines(names, series, titles[0], titles[1], axis, log=wide)
    return with_subtitle(fig, html.escape(better_in_words(models, values, declared.better)))


def better_in_words(models: tuple[str, ...], values: Any, direction: str) -> str:
    """At how many layers each of two models is better, or higher where neither is better.

    Args:
        models: names of the models.
        values: `model layer`.
        direction: "higher" or "lower", of the better value; "" where neither is.

    Examples:
        >>> better_in_words(("before", "after"), np.array([[3.0, 2.0, 1.0], [2.0, 1.0, 1.5]]), "lower")
        'after is better (lower) at 2 of 3 layers, before at 1'
    """
    if len(models) != 2:
        return ""
    first, second = values
    known = int((np.isfinite(first) & np.isfinite(second)).sum())
    above = [int((first > second).sum()), int((second > first).sum())]
    counts = above[::-1] if direction == "lower" else above
    if not max(counts):
        return f"Equal at {known} of {known} layers" if known else ""
    more = int(counts[1] >= counts[0])
    word = f"better ({direction})" if direction else "higher"
    rest = f", {models[1 - more]} at {counts[1 - more]}" if counts[1 - more] else ""
    return f"{models[more]} is {word} at {counts[more]} of {known} layers{rest}"
