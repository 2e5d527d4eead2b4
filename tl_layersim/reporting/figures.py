"""The figure of a result's field, chosen by its axes: a heatmap over two layer axes, curves over one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ..core.errors import LayersimError
from ..core.intervals import bounds_of
from ..core.provenance import JOINT
from ..core.results import Result
from .curves import (
    LOG_FACTOR,
    Series,
    from_lower_bound,
    lines,
    quantile_lines,
    sublayer_lines,
    with_baseline,
    with_least_span,
)
from .interval_bands import Ends, interval_ends
from .labels import series_label
from .matrix import layer_heatmap, series_heatmap
from .names_of_models import names_of_models
from .site_labels import site_words
from .stitches import step_curve
from .style import GREY, MOST_LINES, described, series_look
from .two_models import model_lines

LAYER_MATRICES = (
    ("row", "column"),
    ("row_block", "column_block"),
    ("skipped", "affected"),
    ("vision_layer", "text_layer"),
    ("vision_layer", "other_vision_layer"),
    ("text_layer", "other_text_layer"),
)
# Axes along which a few series have an order.
ORDERED_AXES = ("direction", "k", "look", "threshold", "length")


def figure(result: Result, field: str, axes: tuple[str, ...]) -> go.Figure:
    """The figure of one field, with its intervals where the result has them, and with model and tokens below its title.

    Args:
        result: whose field.
        field: its name.
        axes: its axes: any one, two of layers, or another one and one of layers.

    Raises:
        ValueError: the field has other axes.
    """
    held = "values" if field == result.values_name else field
    bounds = bounds_of(result).get(held) or (-math.inf, math.inf)
    fig = from_lower_bound(with_least_span(_field_figure(result, field, axes), bounds), bounds[0])
    return described(fig, result.provenance, result.measured_on(field))


def untrained_figure(result: Result, field: str) -> go.Figure:
    """The figure of the mean of a field over untrained models.

    Args:
        result: with untrained models.
        field: its name.

    Raises:
        LayersimError: the run had no untrained models.
    """
    held = "values" if field == result.values_name else field
    twins = result.of_untrained(held)
    if twins is None:
        raise LayersimError(f"`untrained {field}` was not measured; baseline='untrained' of `analyze` measures it.")
    own: dict[str, Any] = {held: twins.mean(0)}
    shown = replace(result, **own, replicates=(), block_tokens=(), untrained=())
    fig = shown.plot(field)
    return fig.update_layout(title_text=f"{fig.layout.title.text}, untrained, mean of {len(twins)} seeds")


def title_of(result: Result, field: str) -> str:
    """The title of a field's figure: that of its picture in reports, else its title in words.

    Args:
        result: whose field.
        field: its name.
    """
    return site_words(result.layers, result.declared(field).title)


def _field_figure(result: Result, field: str, axes: tuple[str, ...]) -> go.Figure:
    values = (result.values if field == result.values_name else getattr(result, field)).numpy()
    unit, title, ends = result.declared(field).words, title_of(result, field), interval_ends(result, field)
    if axes in LAYER_MATRICES:
        return layer_heatmap(result, field, axes, title, unit, ends)
    if len(axes) == 1:
        return _curve(result, field, axes[0], values, ends)
    if len(axes) != 2:
        raise ValueError(f"no plot of {field!r} over {axes}: use to_frame({field!r})")
    labels, names = result.coordinates(axes[0]), result.coordinates(axes[1])
    if axes in (("layer", "direction"), ("residual", "direction")):
        # By depth, a line for each of a few directions: the first, the last, and some between.
        shown = sorted({round(n) for n in np.geomspace(1, len(names), min(len(names), MOST_LINES))})
        series = [
            Series(series_label("direction", n), values[:, n - 1], ends and ends.at((slice(None), n - 1)), **look)
            for n, look in zip(shown, series_look(len(shown), ordered=True), strict=True)
        ]
        return lines(labels, series, title, unit, axes[0], log=True)
    if axes[0] == "quantile":
        return quantile_lines(labels, names, values, (title, unit), axes[1], ends)
    if axes[0] in ("model", "stage"):
        return model_lines((labels, names), values, (title, unit), axes[1], ends, result.declared(field))
    if len(labels) <= MOST_LINES:
        looks = series_look(len(labels), ordered=axes[0] in ORDERED_AXES)
        series = [
            Series(series_label(axes[0], label), values[n], ends and ends.at(n), **look)
            for n, (label, look) in enumerate(zip(labels, looks, strict=True))
        ]
        return lines(names, series, title, unit, axes[1])
    return series_heatmap(result, field, axes, title, unit, ends)


def _of_two_models(
    result: Result, field: str, first: Series, names: tuple[Any, ...]
) -> tuple[tuple[Any, ...], list[Series]] | None:
    """A curve of each of two compared models, over the sites of the deeper one; None if the field is not of both."""
    other = f"column_{field}"
    if JOINT not in result.provenance.model or other not in result.tensor_fields():
        return None
    columns = result.coordinates("column")
    shorter, longer = sorted((names, columns), key=len)
    if longer[: len(shorter)] != shorter:
        return None
    second = Series("", getattr(result, other).numpy(), interval_ends(result, other))
    models, looks = names_of_models(result.provenance), series_look(2, ordered=False)
    if len(models) != 2:
        # Both were loaded from the same class or path.
        models = ("first model", "second model")
    series = [
        Series(
            model,
            _padded(one.values, longer),
            one.ends and Ends(_padded(one.ends.low, longer), _padded(one.ends.high, longer)),
            **look,
        )
        for model, one, look in zip(models, (first, second), looks, strict=True)
    ]
    return longer, series


def _padded(values: Any, names: tuple[Any, ...]) -> Any:
    return np.pad(np.asarray(values, dtype=float), (0, len(names) - len(values)), constant_values=np.nan)


def _curve(result: Result, field: str, axis: str, values: Any, ends: Ends | None) -> go.Figure:
    """The figure of a field over one axis."""
    unit, title, names = result.declared(field).words, title_of(result, field), result.coordinates(axis)
    if axis == "sublayer":
        return sublayer_lines(names, values, title, unit, ends)
    if axis == "step" and len(values):
        return step_curve(values, title, unit, ends)
    known = values[np.isfinite(values)]
    declared = result.declared(field)
    log = declared.scale == "log" and bool(len(known)) and bool(known.max() > LOG_FACTOR * max(known.min(), 0))
    reference = result.baseline(field)
    # Beside a reference line, the legend has no room for the unit, which stands on the axis.
    own = Series(unit if reference is None else unit.partition(" (")[0], values, ends)
    both = _of_two_models(result, field, own, names)
    names, series = both or (names, [own])
    twins = result.of_untrained("values" if field == result.values_name else field)
    if both is None and twins is not None:
        label = f"untrained, mean of {len(twins)} seeds"
        series = [own._replace(label="trained"), Series(label, twins.mean(0).numpy(), None, GREY, "square", "dash")]
    fig = lines(names, series, title, unit, axis, log)
    if declared.scale == "free":
        fig.update_yaxes(rangemode="normal")
    return fig if reference is None else with_baseline(fig, *reference)
