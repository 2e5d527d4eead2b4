"""Heat maps, their colour scales, and the numbers in their cells."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ..core.intervals import bounds_of
from ..core.result_declarations import JOINT
from ..core.results import Result
from .lines_and_bars import Ends, hover_texts, interval_ends, known_columns
from .site_labels import axis_title, markup, short_names, site_axis_title, visible_token
from .style import (
    CELL_AXIS,
    DIVERGING,
    HEIGHT,
    ORANGE,
    PAPER_SIZES,
    SEQUENTIAL,
    colour_bar,
    layer_axis,
    model_name,
    styled,
    with_subtitle,
)

# Colours of standard deviations, unlike those of values.
SPREAD = "Magma"
# End of the scale of p-values; 0.05 is in the middle.
HIGHEST_P = 0.1
# Maximum number of decimals in a cell.
MOST_CELL_DECIMALS = 4
# Similarities below this value are more than noise, and need a scale about 0.
NEGATIVE = -0.1
# Round ends of scales, times a power of ten.
ENDS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
# Maximum number of rows or columns with numbers in the cells.
MOST_NUMBERS = 12


class ColourScale(NamedTuple):
    """Colour scale of a heat map.

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


def scale_of(result: Result, field: str, values: Any) -> ColourScale:
    """Choose the colour scale of a field, by its bounds and its values.

    Args:
        result: the result.
        field: name of the field; "values" for the field of `values_name`.
        values: the values in the figure.
    """
    _, high = _limits(values)
    if field.endswith("std") or field == "sd":
        return ColourScale(SPREAD, 0.0, end_above(high))
    if field == "p_values":
        beyond = f"highest colour: {HIGHEST_P:g} or more" if high > HIGHEST_P else ""
        return ColourScale(f"{SEQUENTIAL}_r", 0.0, HIGHEST_P, beyond)
    bounds = bounds_of(result).get(field) or (-math.inf, math.inf)
    return scale_within(values, bounds)


def scale_within(values: Any, bounds: tuple[float, float]) -> ColourScale:
    """Choose the colour scale of values with known bounds.

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
    """Colour scale from the smallest to the largest of the values.

    Args:
        values: the values in the figure.
        name: name of plotly's scale.
    """
    low, high = _limits(values)
    return ColourScale(name, low, high if high > low else low + 1e-9)


def about_zero(values: Any) -> ColourScale:
    """Colour scale of differences, centred at 0."""
    low, high = _limits(values)
    far = end_above(max(high, -low))
    return ColourScale(DIVERGING, -far, far)


def end_above(value: float) -> float:
    """Smallest round number at or above a value, as the end of a scale.

    Examples:
        >>> end_above(0.113), end_above(17.0), end_above(0.0)
        (0.12, 20.0, 1.0)
    """
    if not value > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(round(end * power, 12) for end in ENDS if end * power >= value * (1 - 1e-9))


def cell_numbers(values: Any, scale: ColourScale, fewest: int = 2) -> dict[str, Any]:
    """Numbers in the cells of a small heat map, as plotly settings.

    Narrow scales get more decimals, so that the numbers in different cells differ.

    Args:
        values: the matrix, `row column`.
        scale: colour scale of the heatmap.
        fewest: smallest number of decimals.
    """
    if max(np.shape(values)) > MOST_NUMBERS:
        return {}
    span = scale.high - max(scale.low, 0.0)
    low, high = _limits(values)
    decimals = min(max(fewest, 1 - math.floor(math.log10(span))), MOST_CELL_DECIMALS) if high > low else fewest
    texts = [
        ["" if math.isnan(value) else f"{0.0 if round(value, decimals) == 0 else value:.{decimals}f}" for value in row]
        for row in np.asarray(values).tolist()
    ]
    # Smaller letters for long numbers.
    size = 9 if decimals > 3 else 11
    return {"text": texts, "texttemplate": "%{text}", "textfont": {"size": size, "shadow": "auto"}}


def _limits(values: Any) -> tuple[float, float]:
    """Smallest and largest finite value; 0 and 1 if no value is finite."""
    known = np.asarray(values, dtype=float)
    known = known[np.isfinite(known)]
    return (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)


# Axes of matrices with two sides of one kind.
MATRICES = (
    ("row", "column"),
    ("row_block", "column_block"),
    ("connection", "other"),
    ("skipped", "affected"),
    ("vision_layer", "text_layer"),
    ("vision_layer", "other_vision_layer"),
    ("text_layer", "other_text_layer"),
)
# Axes of Jacobians, without their diagonal: a Jacobian is diagonal in its own basis by definition.
OF_JACOBIANS = ("row_block", "connection")
# Attribute with the value for random vectors, by field.
NULLS = {"coupling": "null_coupling", "miscoupling": "null"}
# Maximum number of rows or columns with lines between the cells.
MOST_GAPS = 24
# Maximum number of letters of a token in a label.
LETTERS = 9


class HeatMapAxis(NamedTuple):
    """Names, title and tick labels of a heat map's rows or columns.

    Attributes:
        names: name of each row or column, for hover texts.
        title: title of the axis. `site_axis_title` adapts it if the names are site names.
        labels: tick labels; None for the short names of sites.
    """

    names: tuple[Any, ...]
    title: str
    labels: list[str] | None = None

    @property
    def shown(self) -> list[str]:
        """Labels of all rows or columns."""
        return short_names(self.names) if self.labels is None else self.labels


def heat_map(
    values: Any,
    sides: tuple[HeatMapAxis, HeatMapAxis],
    scale: ColourScale,
    titles: tuple[str, str],
    *,
    ends: Ends | None = None,
    decimals: int | None = None,
    square: bool = True,
) -> go.Figure:
    """Draw a heat map of a matrix.

    Args:
        values: the matrix, `row column`.
        sides: the rows and the columns.
        scale: the colour scale.
        titles: titles of the figure and of the colour bar.
        ends: ends of the confidence intervals; None without intervals.
        decimals: smallest number of decimals in the cells of a small map; None for no numbers.
        square: whether cells are square, and the first row is at the top.
    """
    rows, columns = sides
    fig = go.Figure(
        go.Heatmap(
            z=values,
            x=list(range(len(columns.names))),
            y=list(range(len(rows.names))),
            colorbar=colour_bar(titles[1]),
            xgap=1 if len(columns.names) <= MOST_GAPS else 0,
            ygap=1 if len(rows.names) <= MOST_GAPS else 0,
            colorscale=scale.name,
            zmin=scale.low,
            zmax=scale.high,
            **({} if decimals is None else cell_numbers(values, scale, decimals)),
            **cell_hover(rows.names, columns.names, ends, html.escape(titles[1], quote=False)),
        )
    )
    layer_axis(fig.update_yaxes, *rows)
    layer_axis(fig.update_xaxes, *columns)
    plain = CELL_AXIS | {"constrain": "domain"} if square else {"showgrid": False}
    fig.update_xaxes(**plain).update_yaxes(**plain)
    if square:
        fig.update_yaxes(autorange="reversed", scaleanchor="x")
    return styled(fig, titles[0], height=HEIGHT if square else 500)


def cell_hover(rows: Sequence[Any], columns: Sequence[Any], ends: Ends | None, quantity: str) -> dict[str, Any]:
    """Hover texts of cells, as plotly settings: row, column, value and interval.

    Args:
        rows: names of the rows.
        columns: names of the columns.
        ends: ends of the confidence intervals, `row column`; None without intervals.
        quantity: name of the quantity, as markup.
    """
    texts = None if ends is None else hover_texts(ends)
    data = [
        [(row, column) if texts is None else (row, column, texts[i, j]) for j, column in enumerate(map(markup, columns))]
        for i, row in enumerate(map(markup, rows))
    ]
    words = "row: %{customdata[0]}<br>column: %{customdata[1]}<br>" + quantity + ": %{z:.4f}"
    own = "" if ends is None else "%{customdata[2]}"
    return {"hoverongaps": False, "customdata": data, "hovertemplate": f"{words}{own}<extra></extra>"}


def matrix_heat_map(result: Result, field: str, axes: tuple[str, ...], titles: tuple[str, str], ends: Ends | None) -> go.Figure:
    """Heat map of a matrix field, such as CKA of layers by layers of one or two models.

    Outer rows and columns without values are left out.

    Args:
        result: the result.
        field: name of the field.
        axes: names of the field's axes.
        titles: titles of the figure and of the colour bar.
        ends: ends of the confidence intervals; None without intervals.
    """
    values = getattr(result, field).numpy()
    if len(values) > 1 and (axes[0] in OF_JACOBIANS or _of_own_layers(result, field)):
        # An entry of a block with itself, or the p-value of a layer with itself, is no finding.
        values = np.where(np.eye(len(values), dtype=bool), np.nan, values)
    scale = _matrix_scale(result, field, axes, values)
    words = _axis_titles(result, axes)
    sides = [HeatMapAxis(result.coordinates(axis), title) for axis, title in zip(axes, words, strict=True)]
    if axes[0] == "connection":
        sides = [side._replace(labels=_connection_labels(side.names, getattr(result, "tokens", ()))) for side in sides]
    whole = axes[0] in (*OF_JACOBIANS, "skipped")
    shown = [slice(None)] * 2 if whole else [known_columns(values.T), known_columns(values)]
    notes = [_own_note(result, field, axes), scale.note, _left_out(sides, shown)]
    rows, columns = (side._replace(names=side.names[own]) for side, own in zip(sides, shown, strict=True))
    values, ends = values[tuple(shown)], ends and ends.at(tuple(shown))
    fig = heat_map(values, (rows, columns), scale, titles, ends=ends, decimals=3 if field == "p_values" else 2)
    return with_subtitle(fig, html.escape("; ".join(filter(None, notes)), quote=False))


def series_heat_map(result: Result, field: str, axes: tuple[str, ...], titles: tuple[str, str], ends: Ends | None) -> go.Figure:
    """Heat map with a row for each series, and a column for each layer or dimension.

    Args:
        result: the result.
        field: name of the field.
        axes: names of the field's axes.
        titles: titles of the figure and of the colour bar.
        ends: ends of the confidence intervals; None without intervals.
    """
    values = getattr(result, field).numpy()
    scale = scale_of(result, field, values)
    fig = heat_map(values, _series_sides(result, axes), scale, titles, ends=ends, square=False)
    return with_subtitle(fig, html.escape(scale.note, quote=False))


def fraction_heat_map(result: Result, field: str, axes: tuple[str, ...], titles: tuple[str, str]) -> go.Figure:
    """Heat map of counts as fractions of their row's sum; cells with count 0 are white.

    Args:
        result: the result.
        field: name of the field.
        axes: names of the field's axes.
        titles: title of the figure, and what is counted.
    """

    def fractions(one: Any) -> Any:
        counts = getattr(one, field)
        return counts / counts.sum(-1, keepdim=True)

    values, ends = fractions(result).numpy(), interval_ends(result, fractions)
    scale, shown = ColourScale(SEQUENTIAL, 0.0, 1.0), np.where(values > 0, values, np.nan)
    words = (titles[0], f"{titles[1]} (fraction)")
    fig = heat_map(shown, _series_sides(result, axes), scale, words, ends=ends, decimals=2, square=False)
    return with_subtitle(fig, "White: none")


def _matrix_scale(result: Result, field: str, axes: tuple[str, ...], values: Any) -> ColourScale:
    scale = scale_of(result, field, values)
    if axes[0] in OF_JACOBIANS:
        return narrow_scale(values, SPREAD if scale.name == SPREAD else SEQUENTIAL)
    if axes[0] == "skipped":
        # A relative change of 1 or more leaves nothing in common; few outliers would hide the rest.
        beyond = bool((np.nan_to_num(values) > 1).any())
        return ColourScale(scale.name, 0.0, min(1.0, scale.high), "highest colour: 1 or more" if beyond else "")
    return scale


def _axis_titles(result: Result, axes: tuple[str, ...]) -> tuple[str, str]:
    if axes[0] == "connection":
        return "Jacobian of connection", "Singular vectors of connection"
    if axes[0] in ("row_block", "skipped", "vision_layer", "text_layer"):
        return axis_title(axes[0]), axis_title(axes[1])
    models = result.provenance.model.split(JOINT)
    first, last = (f"After block of {html.escape(model_name(model), quote=False)}" for model in (models[0], models[-1]))
    return (first, last) if len(models) > 1 else ("After block", "After block")


def _series_sides(result: Result, axes: tuple[str, ...]) -> tuple[HeatMapAxis, HeatMapAxis]:
    """`HeatMapAxis` of the rows and of the columns, from the first and the second axis of a field."""
    names = [result.coordinates(axis) for axis in axes]
    words = [f"{name:g}" if isinstance(name, float) else str(name) for name in names[0]]
    layers = all(isinstance(name, str) for name in names[1])
    columns = HeatMapAxis(names[1], axis_title("layer" if layers else axes[1]), None if layers else list(map(str, names[1])))
    return HeatMapAxis(tuple(words), axis_title(axes[0]), words), columns


def _own_note(result: Result, field: str, axes: tuple[str, ...]) -> str:
    """Note for a figure of coupling or of p-values; empty for other fields."""
    if axes[0] in OF_JACOBIANS and len(result.coordinates(axes[0])) > 1:
        null = getattr(result, NULLS.get(field, ""), None)
        found = "" if null is None else f"; random vectors give {float(null[~np.eye(len(null), dtype=bool)].nanmean()):.2f}"
        return f"Without a {'block' if axes[0] == 'row_block' else 'connection'} with itself{found}"
    if field == "p_values" and (count := int(getattr(result, "permutations", 0))):
        own = "; without a layer with itself" if _of_own_layers(result, field) and len(result.layers) > 1 else ""
        return f"{count:,} permutations; smallest possible {1 / (count + 1):.2g}{own}"
    return ""


def _of_own_layers(result: Result, field: str) -> bool:
    """Whether a field holds p-values between layers of one model."""
    return field == "p_values" and JOINT not in result.provenance.model


def _left_out(sides: list[HeatMapAxis], shown: list[slice]) -> str:
    """Note on rows and columns without values; empty if all are shown."""
    outside = [[label for label in side.shown if label not in side.shown[own]] for side, own in zip(sides, shown, strict=True)]
    words = list(dict.fromkeys(label for labels in outside for label in labels))
    return f"without {', '.join(words)}, where no value is defined" if words else ""


def _connection_labels(connections: tuple[str, ...], tokens: tuple[str, ...]) -> list[str]:
    """Shorten labels "block: t_in > t_out" to the parts that differ."""
    parts = [[int(part) for part in re.split(": | > ", one)] for one in connections]
    blocks, starts, ends = (len(set(column)) > 1 for column in zip(*parts, strict=True))
    labels = []
    for block, start, end in parts:
        words = [visible_token(f"{n} {tokens[n].strip()}", LETTERS) for n in dict.fromkeys((start, end))]
        own = " > ".join(words) if starts and ends else words[-1] if ends else words[0] if starts else ""
        labels.append(": ".join([str(block)] * (blocks or not own) + [own] * bool(own)))
    return labels


# Pixels of a cell, letters in a cell, pixels below a line of cells, and pixels around all lines.
CELL, WORD, BELOW_LINE, AROUND = 60, 8, 46, 150
# Pixels of a row and of a low row, and the number of layers above which rows are low.
ROW, LOW_ROW, MOST_LAYERS = 24, 18, 16
PROBABILITY = {"colorscale": "Blues", "cmin": 0.0, "cmax": 1.0}


def token_grid(grid: Any, titles: tuple[str, str], width: str | None = None) -> go.Figure:
    """Heat map of the top prediction of each layer after each token.

    Colours are probabilities. Predictions are bold from the saturation layer on.

    Args:
        grid: a `PredictionGrid`.
        titles: titles of the figure and of the colour bar.
        width: "column", "text" or None; sets the number of tokens in a line.
    """
    layers, tokens = grid.layers[1:], grid.tokens
    count = max(1, -(-len(tokens) // ((PAPER_SIZES[width].width - 110) // CELL)))
    # Lines of nearly equal length.
    length = -(-len(tokens) // count)
    lines = [range(start, min(start + length, len(tokens))) for start in range(0, len(tokens), length)]
    cells = (ROW if len(layers) <= MOST_LAYERS else LOW_ROW) * len(layers)
    room = cells * len(lines) + BELOW_LINE * (len(lines) - 1)
    fig = make_subplots(rows=len(lines), cols=1, vertical_spacing=BELOW_LINE / room if len(lines) > 1 else 0)
    widest = max(map(len, lines))
    for number, line in enumerate(lines, start=1):
        fig.add_trace(_line_of_cells(grid, line), row=number, col=1)
        for token in line:
            layer = int(grid.saturation_layer[token])
            box = {"x0": token - 0.48, "x1": token + 0.48, "y0": layer - 0.46, "y1": layer + 0.46}
            fig.add_shape(type="rect", line={"color": ORANGE, "width": 2}, row=number, col=1, **box)
        ticks = [_shown(tokens[token], WORD) for token in line]
        plain = CELL_AXIS | {"tickmode": "array"}
        # Lines with fewer tokens have cells of the same width.
        places = {"tickvals": list(line), "range": [line[0] - 0.5, line[0] + widest - 0.5]}
        fig.update_xaxes(ticktext=ticks, tickangle=0, tickfont={"size": 11}, row=number, col=1, **places, **plain)
        step = max(1, -(-len(layers) // MOST_LAYERS))
        names = {"tickvals": list(range(0, len(layers), step)), "ticktext": list(map(markup, short_names(layers)[::step]))}
        fig.update_yaxes(title=site_axis_title(layers, "Block"), row=number, col=1, **names, **plain)
    fig.update_xaxes(title="After token", row=len(lines), col=1)
    fig.update_layout(
        showlegend=True,
        coloraxis={**PROBABILITY, "colorbar": colour_bar(titles[1]) | {"thickness": 16, "outlinewidth": 0}},
    )
    frame = {"symbol": "square-open", "size": 12, "color": ORANGE, "line": {"width": 2}}
    fig.add_scatter(x=[None], y=[None], mode="text", name="<b>bold</b>: the final prediction")
    fig.add_scatter(x=[None], y=[None], mode="markers", marker=frame, name="framed: saturation layer")
    normed = grid.provenance.options.get("norm") != "none"
    spaces = "; · is a space" if any(token[:1] == " " or token[-1:] == " " for token in tokens) else ""
    note = f"Logit lens {'with' if normed else 'without'} the final norm below the last block{spaces}"
    return with_subtitle(styled(fig, titles[0], height=room + AROUND), note)


def _shown(token: str, letters: int | None = None) -> str:
    return html.escape(visible_token(token, letters), quote=False)


def _line_of_cells(grid: Any, line: range) -> go.Heatmap:
    """Heat map of one line of tokens."""
    layers = range(grid.values.shape[1])
    probability = grid.values.numpy()[line.start : line.stop].T
    words = [
        [
            f"<b>{word}</b>" if layer >= grid.saturation_layer[token] else word
            for token in line
            for word in [_shown(grid.words[token][layer], WORD)]
        ]
        for layer in layers
    ]
    return go.Heatmap(
        z=probability,
        x=list(line),
        y=list(layers),
        text=words,
        texttemplate="%{text}",
        textfont={"size": 10, "shadow": "auto"},
        coloraxis="coloraxis",
        xgap=1,
        ygap=1,
        customdata=[[_at_pointer(grid, token, layer) for token in line] for layer in layers],
        hovertemplate="%{customdata}<extra></extra>",
    )


def _at_pointer(grid: Any, token: int, layer: int) -> str:
    """Hover text of a cell: position, next token, likeliest tokens and entropy."""
    lines = [f"after token {token} <b>{_shown(grid.tokens[token])}</b>, {html.escape(grid.layers[layer + 1], quote=False)}"]
    if token + 1 < len(grid.tokens):
        lines.append(f"next in the prompt: <b>{_shown(grid.tokens[token + 1])}</b>")
    ranked = zip(grid.top_words[token][layer], grid.top_probability[token][layer].tolist(), strict=True)
    lines += [f"{rank}. {_shown(word)}  {value:.3f}" for rank, (word, value) in enumerate(ranked, start=1)]
    if not np.isnan(entropy := float(grid.entropy[token][layer])):
        lines.append(f"entropy: {entropy:.2f} nats")
    if layer >= grid.saturation_layer[token]:
        lines.append("saturation layer" if layer == grid.saturation_layer[token] else "final prediction")
    return "<br>".join(lines)
