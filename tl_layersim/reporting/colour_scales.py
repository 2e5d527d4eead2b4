"""Colour scales of heat maps, with limits for each field, and text colours that are readable on every cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from plotly.colors import sample_colorscale, unlabel_rgb

from ..core.intervals import bounds_of
from ..core.results import Result
from .style import DIVERGING, SEQUENTIAL

# Standard deviations have a scale of their own, so that their figure is not taken for one of the values.
SPREAD = "Magma"
# End of the scale of p-values: 0.05 is its middle.
HIGHEST_P = 0.1
# Fields that hold what chance gives. Their differences are noise, so they have the scale of the measure, which shows none.
CHANCE = ("null_mean", "null_threshold")
# Most decimals of a number in a cell.
MOST_CELL_DECIMALS = 4
# A diagonal of ones hides the rest where this many sites or more have values below the second number off the diagonal.
MANY_SITES, FAR_BELOW_ONE = 25, 0.5
# Similarities below this are more than noise about 0, and need a scale about 0.
NEGATIVE = -0.1
# Numbers at which a scale may end, times a power of ten.
ENDS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
# Most rows and columns of a heatmap with its values in the cells.
MOST_NUMBERS = 12


class ColourScale(NamedTuple):
    """The colour scale of a heat map.

    Attributes:
        name: name of plotly's scale.
        low: value of the first colour.
        high: value of the last colour.
        note: note on values beyond the ends, which have the colour of the end; "" if there are none.
    """

    name: str
    low: float
    high: float
    note: str = ""

    def trace(self) -> dict[str, Any]:
        """Settings of a plotly heatmap."""
        return {"colorscale": self.name, "zmin": self.low, "zmax": self.high}

    def axis(self) -> dict[str, Any]:
        """Settings of a colour axis that several heat maps share."""
        return {"colorscale": self.name, "cmin": self.low, "cmax": self.high}


def scale_of(result: Result, field: str, values: Any) -> ColourScale:
    """The colour scale of a field: with fixed ends if the field has bounds, else with ends that fit the values.

    Args:
        result: the result.
        field: name of the field; "values" for the field of `values_name`.
        values: the values in the figure.
    """
    low, high = _limits(values)
    if field.endswith("std") or field == "sd":
        return ColourScale(SPREAD, 0.0, end_above(high))
    if field == "p_values":
        beyond = f"highest colour: {HIGHEST_P:g} or more" if high > HIGHEST_P else ""
        return ColourScale(f"{SEQUENTIAL}_r", 0.0, HIGHEST_P, beyond)
    bounds = bounds_of(result).get(field) or (-math.inf, math.inf)
    if field in CHANCE:
        own = scale_of(result, "values", result.values.numpy())
        # Values of random pairings that are clearly negative, such as R², lie outside a scale that begins at 0.
        return own if low >= min(own.low, NEGATIVE) else scale_within(values, bounds)
    return scale_within(values, bounds)


def scale_within(values: Any, bounds: tuple[float, float]) -> ColourScale:
    """The colour scale for values of a field with the given bounds.

    Clearly negative similarities get a scale from -1 to 1. Other scales begin at 0 or at the lowest value.

    Args:
        values: the values in the figure.
        bounds: lowest and highest possible value; infinite if there is none.

    Examples:
        >>> scale_within([[0.2, 1.0]], (-1, 1)), scale_within([[-0.5, 1.0]], (-1, 1))
        (ColourScale(name='Viridis', low=0.0, high=1, note=''), ColourScale(name='RdBu_r', low=-1, high=1, note=''))
        >>> scale_within([[0.2, 17.0]], (0, float("inf"))).high
        20.0
    """
    low, high = _limits(values)
    bounded = math.isfinite(bounds[1])
    if low < NEGATIVE:
        far = bounds[1] if bounded else end_above(max(-low, high))
        return ColourScale(DIVERGING, -far, far, f"lowest colour: {-far:g} or less" if low < -far else "")
    return ColourScale(SEQUENTIAL, min(0.0, low), bounds[1] if bounded else end_above(high))


def narrow_scale(values: Any, name: str = SEQUENTIAL) -> ColourScale:
    """The colour scale from the smallest to the largest value, for values far from the bounds of their field.

    Args:
        values: the values in the figure.
        name: name of plotly's scale.
    """
    low, high = _limits(values)
    return ColourScale(name, low, high if high > low else low + 1e-9)


def off_diagonal_scale(values: Any, scale: ColourScale) -> ColourScale:
    """The colour scale of the off-diagonal values if a diagonal of ones would hide them; else the scale of all values.

    Args:
        values: the values in the figure, `row column`.
        scale: colour scale of all values.

    Examples:
        >>> off_diagonal_scale(np.eye(30) * 0.9 + 0.1, ColourScale("Viridis", 0.0, 1.0))
        ColourScale(name='Viridis', low=0.0, high=0.1, note='diagonal: 1, beyond the colours')
    """
    array = np.asarray(values, dtype=float)
    if array.ndim != 2 or len(set(array.shape)) != 1 or len(array) < MANY_SITES or scale.name != SEQUENTIAL:
        return scale
    _, high = _limits(array[~np.eye(len(array), dtype=bool)])
    if not np.allclose(array.diagonal(), 1.0, atol=1e-6) or high >= FAR_BELOW_ONE:
        return scale
    return ColourScale(scale.name, scale.low, end_above(high), "diagonal: 1, beyond the colours")


def about_zero(values: Any) -> ColourScale:
    """The colour scale of differences, centred at 0."""
    low, high = _limits(values)
    far = end_above(max(high, -low))
    return ColourScale(DIVERGING, -far, far)


def end_above(value: float) -> float:
    """The smallest round number at or above a value, for the end of a scale.

    Examples:
        >>> end_above(0.113), end_above(17.0), end_above(0.0)
        (0.12, 20.0, 1.0)
    """
    if not value > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(round(end * power, 12) for end in ENDS if end * power >= value * (1 - 1e-9))


def cell_numbers(values: Any, scale: ColourScale, fewest: int = 2) -> dict[str, Any]:
    """Settings of a plotly heatmap that write each value into its cell if there is room.

    Narrow scales get more decimals, so that the numbers in different cells differ.

    Args:
        values: the matrix, `row column`.
        scale: colour scale of the heatmap.
        fewest: smallest number of decimals.
    """
    if max(np.shape(values)) > MOST_NUMBERS:
        return {}
    span = scale.high - scale.low
    low, high = _limits(values)
    decimals = min(max(fewest, 1 - math.floor(math.log10(span))), MOST_CELL_DECIMALS) if high > low else fewest
    texts = [
        ["" if math.isnan(value) else f"{0.0 if round(value, decimals) == 0 else value:.{decimals}f}" for value in row]
        for row in np.asarray(values).tolist()
    ]
    # Long numbers in narrow cells.
    size = 9 if decimals > 3 else 11
    return {"text": on_cells(texts, values, scale), "texttemplate": "%{text}", "textfont": {"size": size}}


def on_cells(texts: Sequence[Sequence[str]], values: Any, scale: ColourScale) -> list[list[str]]:
    """Texts as markup, each in black or white for the higher contrast with its cell.

    Args:
        texts: `row column`, markup.
        values: values of the cells, `row column`.
        scale: colour scale of the heatmap.
    """
    colours = text_colours(values, scale)
    return [
        [f'<span style="color:{colour}">{text}</span>' if text else "" for text, colour in zip(*row, strict=True)]
        for row in zip(texts, colours, strict=True)
    ]


def text_colours(values: Any, scale: ColourScale) -> list[list[str]]:
    """Black or white for the text in each cell, by WCAG 2 contrast, which is at least 4.5 on every colour.

    Args:
        values: the matrix, `row column`.
        scale: colour scale of the heatmap.
    """
    array = np.nan_to_num(np.asarray(values, dtype=float), nan=scale.low, posinf=scale.high, neginf=scale.low)
    places = np.clip((array - scale.low) / (scale.high - scale.low), 0.0, 1.0)
    colours = sample_colorscale(scale.name, places.ravel().tolist())
    light = [1.05 / (luminance(unlabel_rgb(colour)) + 0.05) for colour in colours]
    # Contrasts with white and with black multiply to 21.
    chosen = ["#ffffff" if contrast > math.sqrt(21) else "#000000" for contrast in light]
    width = array.shape[1]
    return [chosen[start : start + width] for start in range(0, len(chosen), width)] if width else [[] for _ in array]


def luminance(colour: Sequence[float]) -> float:
    """Relative luminance of a colour, from 0 for black to 1 for white, as WCAG 2 defines it.

    Args:
        colour: red, green and blue, 0 to 255.

    Examples:
        >>> luminance((0, 0, 0)), luminance((255, 255, 255))
        (0.0, 1.0)
    """
    parts = [part / 255 for part in colour]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _limits(values: Any) -> tuple[float, float]:
    """The smallest and the largest finite value; 0 and 1 if there is none."""
    known = np.asarray(values, dtype=float)
    known = known[np.isfinite(known)]
    return (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
