"""The figure of a result's field, chosen by its axes and by what it declares: heat map, lines, bars, paths or token grid."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ..core.errors import LayersimError
from ..core.intervals import bounds_of, field_named
from ..core.provenance import JOINT
from ..core.results import UNTRAINED, Result
from .bars import bars
from .heat_map import MATRICES, fraction_heat_map, matrix_heat_map, series_heat_map
from .interval_bands import Ends, interval_ends
from .lines import (
    Series,
    is_wide,
    lines,
    named_points,
    paths,
    quantile_lines,
    step_curve,
    sublayer_lines,
    widen_axis,
    with_baselines,
)
from .models import model_heatmap
from .site_labels import axis_title, series_label, short_names, site_words
from .style import DASHES, GREY, MOST_LINES, names_of_models, series_look, with_provenance, with_size
from .token_grid import token_grid

# Axes along which a few series have an order.
ORDERED_AXES = ("direction", "k", "look", "threshold", "length")


def figure(result: Result, field: str | None = None, width: str | None = None, title: str | None = None) -> go.Figure:
    """The figure of one field, with its intervals where the result has them, and with model and tokens below its title.

    Args:
        result: whose field.
        field: its name, or "untrained " and its name; None for that of the first picture.
        width: "column" or "text" for the size of a paper; None for the screen.
        title: None for that of the field, "" for none.

    Raises:
        LayersimError: the result has no such field, it was not measured, or it has more than two axes.
    """
    field = field or (result.pictures[0].field if result.pictures else "values")
    if field.startswith(UNTRAINED):
        return with_size(_untrained_figure(result, field.removeprefix(UNTRAINED)), width, title)
    held = field_named(result, field)
    if bool(getattr(result, held).isnan().all()):
        raise LayersimError(f"`field` is {field!r}, which has no defined value: this run did not measure it.")
    fig = widen_axis(_field_figure(result, held, width), bounds_of(result).get(held) or (-math.inf, math.inf))
    return with_size(with_provenance(fig, result.provenance, result.measured_on(held)), width, title)


def _untrained_figure(result: Result, field: str) -> go.Figure:
    """The figure of the mean of a field over untrained models."""
    held = field_named(result, field)
    twins = result.of_untrained(held)
    if twins is None:
        raise LayersimError(f"`untrained {field}` was not measured; baseline='untrained' of `analyze` measures it.")
    own: dict[str, Any] = {held: twins.mean(0)}
    fig = figure(replace(result, **own, replicates=(), block_tokens=(), untrained=()), field)
    return fig.update_layout(title_text=f"{fig.layout.title.text}, untrained, mean of {len(twins)} seeds")


def _field_figure(result: Any, field: str, width: str | None) -> go.Figure:
    declared, axes, values = result.declared(field), result.tensor_fields()[field], getattr(result, field).numpy()
    titles, ends = (site_words(result.layers, declared.title), declared.words), interval_ends(result, field)
    labels = [result.coordinates(axis) for axis in axes]
    if declared.drawn == "tokens":
        return token_grid(result, titles, width)
    if declared.drawn == "paths":
        skipped = int(result.provenance.options.get("skip_first", 0))
        shares = result.explained.tolist()
        return paths(values, shares, result.tokens, result.layers, titles[0], skipped)
    if declared.drawn == "bars":
        return bars(labels[0], values, ends, axes[0], titles)
    if declared.drawn == "fractions":
        return fraction_heat_map(result, field, axes, titles)
    if declared.drawn == "lines":
        return _many_lines(result, axes, labels, values, titles)
    if declared.drawn:
        # Over another field, a point for each label of their axis.
        other = result.declared(declared.drawn)
        sides = getattr(result, declared.drawn).numpy(), values
        names = [f"{label:g}" for label in labels[0]]
        both = interval_ends(result, declared.drawn), ends
        return named_points(sides, both, names, axis_title(axes[0]), (titles[0], other.words, declared.words))
    if axes == ("row_model", "column_model"):
        return model_heatmap(result, *titles, ends)
    if axes in MATRICES:
        return matrix_heat_map(result, field, axes, titles, ends)
    if len(axes) == 1:
        return _curve(result, field, axes[0], values, titles, ends)
    if len(axes) != 2:
        raise LayersimError(f"`field` is {field!r}, which has {len(axes)} axes; a figure shows one or two. Use to_frame.")
    if axes[0] == "quantile":
        return quantile_lines(labels[0], labels[1], values, titles, axes[1], ends)
    if axes[1] == "direction":
        # By depth, a line for each of a few directions: the first, the last, and some between.
        shown = sorted({round(n) for n in np.geomspace(1, len(labels[1]), min(len(labels[1]), MOST_LINES))})
        axes, labels = axes[::-1], [tuple(shown), labels[0]]
        values, ends = values.T[np.array(shown) - 1], ends and Ends(*(end.T[np.array(shown) - 1] for end in ends))
    elif len(labels[0]) > MOST_LINES and axes[0] not in ("model", "stage"):
        return series_heat_map(result, field, axes, titles, ends)
    looks = series_look(len(labels[0]), ordered=axes[0] in ORDERED_AXES)
    names = [series_label(axes[0], label) for label in labels[0]]
    series = [Series(name, values[n], ends and ends.at(n), **looks[n]) for n, name in enumerate(names)]
    better = f"{titles[1]}<br>{declared.better} is better" if declared.better else titles[1]
    log = axes[0] == "direction" or (declared.scale == "log" and is_wide(values))
    return lines(labels[1], series, titles[0], better, axes[1], log)


def _many_lines(result: Result, axes: tuple[str, ...], labels: list[Any], values: Any, titles: tuple[str, str]) -> go.Figure:
    """Lines over the last axis, on a logarithmic axis: a colour for each label of the first, a dash for each of the others."""
    shown = [short_names(own) if own and str(own[0]) in result.layers else own for own in labels[:-1]]
    colours = series_look(len(labels[0]), ordered=len(labels[0]) > MOST_LINES)
    rows = values.reshape(-1, values.shape[-1])
    series, others = [], len(rows) // len(labels[0])
    for n, (row, parts) in enumerate(zip(rows, product(*shown), strict=True)):
        words = ", ".join(series_label(axis, part) for axis, part in zip(axes, parts, strict=False))
        look = colours[n // others] | {"dash": DASHES[n % others % len(DASHES)]}
        series.append(Series(words, np.where(row > 0, row, np.nan), **look))
    return lines(labels[-1], series, *titles, axes[-1], log=True)


def _of_two_models(result: Result, field: str, own: Series, names: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Series]]:
    """The labels and the curve of a field, or curves of both compared models over the sites of the deeper one."""
    other, columns = f"column_{field}", result.coordinates("column")
    shorter, longer = sorted((names, columns), key=len)
    if JOINT not in result.provenance.model or other not in result.tensor_fields() or longer[: len(shorter)] != shorter:
        return names, [own]

    def padded(values: Any) -> Any:
        return np.pad(np.asarray(values, dtype=float), (0, len(longer) - len(values)), constant_values=np.nan)

    models = names_of_models(result.provenance.model)
    if len(models) != 2:
        # Both were loaded from the same class or path.
        models = ("first model", "second model")
    both = (own.values, own.ends), (getattr(result, other).numpy(), interval_ends(result, other))
    looks = series_look(2, ordered=False)
    return longer, [
        Series(model, padded(values), ends and Ends(*map(padded, ends)), **look)
        for model, (values, ends), look in zip(models, both, looks, strict=True)
    ]


def _curve(result: Result, field: str, axis: str, values: Any, titles: tuple[str, str], ends: Ends | None) -> go.Figure:
    """The figure of a field over one axis."""
    declared, names, baselines = result.declared(field), result.coordinates(axis), result.baselines(field)
    if axis == "sublayer":
        return sublayer_lines(names, values, *titles, ends)
    if axis == "step" and len(values):
        return with_baselines(step_curve(values, *titles, ends), baselines)
    twins = result.of_untrained(field)
    # Beside a reference line, the legend has no room for the unit, which stands on the axis.
    own = Series(declared.label if baselines else declared.words, values, ends)
    names, series = _of_two_models(result, field, own, names)
    if len(series) == 1 and twins is not None:
        untrained = Series(f"untrained, mean of {len(twins)} seeds", twins.mean(0).numpy(), None, GREY, "square", "dash")
        series = [own._replace(label="trained"), untrained]
    fig = lines(names, series, *titles, axis, declared.scale == "log" and is_wide(values))
    if declared.scale == "free":
        fig.update_yaxes(rangemode="normal")
    return with_baselines(fig, baselines)
