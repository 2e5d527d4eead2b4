"""Figures of differences of two results: curves with bands, and heat maps about 0."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from ..core.errors import LayersimError
from .colour_scales import about_zero, on_cells
from .heat_map import MATRICES, HeatMapAxis, heat_map
from .interval_bands import Ends
from .lines import Series, lines
from .site_labels import axis_title, quantity_with_unit, series_label
from .style import MOST_LINES, model_name, series_look, with_room_for_legend, with_subtitle

if TYPE_CHECKING:
    import xarray

# Colour of cells without a difference, which no colour of the scale resembles.
UNDEFINED = "#c8c8c8"


def difference_figure(array: xarray.DataArray) -> go.Figure:
    """The figure of the difference of one field: curves with their intervals as bands, or a heat map.

    A dot in a cell of a heat map says that its adjusted p-value is below 1 minus the level. Cells that no block of the data
    changes, such as the diagonal of a similarity, are grey.

    Args:
        array: a variable of `difference`, over one axis or two beside `statistic`.

    Raises:
        LayersimError: the array has other axes.
    """
    axes = [str(dim) for dim in array.dims if dim != "statistic"]
    if axes == ["quantity"]:
        raise LayersimError("Headline numbers have different units and no figure; `.to_pandas()` is their table.")
    if len(axes) not in (1, 2):
        raise LayersimError(
            f"{array.name!r} has {len(axes)} axes beside `statistic`; a figure shows one or two. Select labels."
        )
    about = array.attrs
    words = quantity_with_unit(about, "Difference")
    titles = f"Difference: {words.partition(' (')[0]}", f"Difference: {words}"
    models = [model_name(str(about.get(which, which))) for which in ("first", "second")]
    of_runs = f"{models[1]} minus {models[0]}" if models[0] != models[1] else "second run minus first run"
    interval = f"{100 * about.get('level', 0.95):g} % interval"
    value, low, high, error, p = (
        array.sel(statistic=name).values for name in ("difference", "low", "high", "se", "p_adjusted")
    )
    labels = [tuple(array[axis].values.tolist()) for axis in axes]
    # Sites stand at relative depths where they have no names.
    places = [str(array[axis].attrs.get("long_name", "")) for axis in axes]
    if len(axes) == 1 or (tuple(axes) not in MATRICES and len(value) <= MOST_LINES):
        rows = zip(*(np.atleast_2d(one) for one in (value, low, high)), strict=True)
        names = [series_label(axes[0], label) for label in labels[0]] if len(axes) == 2 else ["difference"]
        looks = series_look(len(names), ordered=axes[0] in ("quantile", "k", "threshold"))
        series = [
            Series(name, own, Ends(least, most), **look)
            for name, look, (own, least, most) in zip(names, looks, rows, strict=True)
        ]
        fig = lines(labels[-1], series, *titles, "relative_depth" if places[-1] else axes[-1])
        fig.update_yaxes(rangemode="tozero", zeroline=True, zerolinecolor="#888888")
        note = f"{of_runs}; band: {interval} of each point"
        return with_subtitle(with_room_for_legend(fig) if len(names) > 1 else fig, html.escape(note, quote=False))
    defined = (error > 0) | (value != 0)
    shown = np.where(defined, value, np.nan)
    scale = about_zero(shown)
    # Two digits of the largest difference.
    decimals = max(0, 1 - math.floor(math.log10(scale.high)))
    sides = [_side(axis, own, place) for axis, own, place in zip(axes, labels, places, strict=True)]
    fig = heat_map(
        shown, (sides[0], sides[1]), scale, titles, ends=Ends(low, high), decimals=decimals, square=tuple(axes) in MATRICES
    )
    dots = on_cells(np.where(p < 1 - about.get("level", 0.95), "•", "").tolist(), shown, scale)
    [cells] = fig.data
    numbers = cells.text if cells.text is not None else np.full(shown.shape, "")
    text = [["<br>".join(filter(None, pair)) for pair in zip(*own, strict=True)] for own in zip(numbers, dots, strict=True)]
    cells.update(text=text, texttemplate="%{text}", hoverongaps=False)
    note = f"{of_runs}; dot: p below {1 - about.get('level', 0.95):.2g} after correction for the number of cells"
    if not bool(np.isfinite(shown).all()):
        fig.update_layout(plot_bgcolor=UNDEFINED)
        note += "; grey: no block of the data changes it"
    return with_subtitle(fig, html.escape(note, quote=False))


def _side(axis: str, labels: tuple[Any, ...], place: str) -> HeatMapAxis:
    """Rows or columns: sites by name, relative depths, or other labels."""
    if all(isinstance(label, str) for label in labels):
        return HeatMapAxis(labels, "After block")
    return HeatMapAxis(labels, place or axis_title(axis), [f"{label:.2f}" if place else str(label) for label in labels])
