"""The figure of a result's field, chosen by its axes: a heatmap over two layer axes, curves over one."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from ..core.results import Result
from .curves import Series, lines, sublayer_lines, with_baseline
from .interval_bands import interval_ends
from .labels import quantity
from .matrix import layer_heatmap, series_heatmap
from .site_labels import site_words
from .style import SHADES, described

LAYER_MATRICES = (
    ("row", "column"),
    ("row_block", "column_block"),
    ("skipped", "affected"),
    ("vision_layer", "text_layer"),
    ("vision_layer", "other_vision_layer"),
    ("text_layer", "other_text_layer"),
)


def figure(result: Result, field: str, axes: tuple[str, ...]) -> go.Figure:
    """The figure of one field, with its intervals where the result has them, and with model and tokens below its title.

    Args:
        result: whose field.
        field: its name.
        axes: its axes: any one, two of layers, or another one and one of layers.

    Raises:
        ValueError: the field has other axes.
    """
    return described(_figure(result, field, axes), result.provenance)


def _figure(result: Result, field: str, axes: tuple[str, ...]) -> go.Figure:
    values = (result.values if field == result.values_name else getattr(result, field)).numpy()
    picture = next((p for p in result.pictures if p.field == field), None)
    unit = quantity(type(result).__name__, field)
    title = site_words(result.layers, picture.title if picture else unit)
    ends = interval_ends(result, field)
    if axes in LAYER_MATRICES:
        return layer_heatmap(result, field, axes, title, unit, ends)
    if axes == ("sublayer",):
        return sublayer_lines(result.coordinates("sublayer"), values, title, unit, ends)
    if len(axes) == 1:
        fig = lines(result.coordinates(axes[0]), [Series(unit, values, 1.0, ends)], title, unit, axes[0])
        reference = result.baseline(field)
        return fig if reference is None else with_baseline(fig, *reference)
    if axes in (("layer", "direction"), ("residual", "direction")):
        # By depth, a line for each of a few directions: the first, the last, and some between.
        labels = result.coordinates("direction")
        shown = sorted({round(n) for n in np.geomspace(1, len(labels), min(len(labels), len(SHADES)))})
        series = [
            Series(f"number {n}", values[:, n - 1], shade, ends and ends.at((slice(None), n - 1)))
            for n, shade in zip(shown, SHADES, strict=False)
        ]
        return lines(result.coordinates(axes[0]), series, title, unit, axes[0], log=True)
    if len(axes) == 2 and axes[0] == "quantile":
        levels = result.coordinates("quantile")
        # The median stands out; the further from it, the fainter. Bands of all quantiles would hide each other.
        distances = [abs(level - 0.5) for level in levels]
        series = [
            Series(f"{level:.0%} of tokens below", values[n], 1.0 - 1.6 * away, ends and ends.at(n), away == min(distances))
            for n, (level, away) in enumerate(zip(levels, distances, strict=True))
        ]
        return lines(result.coordinates(axes[1]), series, title, unit, axes[1])
    if len(axes) == 2 and len(result.coordinates(axes[0])) <= len(SHADES):
        labels = result.coordinates(axes[0])
        # Of evaluations during a training, and of models before and after one, the last stands out.
        shades = SHADES[: len(labels)][::-1] if axes[0] in ("look", "model", "stage") else SHADES
        names = [str(label) if axes[0] in ("model", "stage", "comparison") else f"{axes[0]} = {label}" for label in labels]
        series = [
            Series(name, values[n], shade, ends and ends.at(n))
            for n, (name, shade) in enumerate(zip(names, shades, strict=False))
        ]
        return lines(result.coordinates(axes[1]), series, title, unit, axes[1])
    if len(axes) == 2:
        return series_heatmap(result, field, axes, title, unit, ends)
    raise ValueError(f"no plot of {field!r} over {axes}: use to_frame({field!r})")
