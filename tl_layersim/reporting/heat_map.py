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
        note = f"highest colour: {HIGHEST_P:g} or more" if high > HIGHEST_P else ""
        return ColourScale(f"{SEQUENTIAL}_r", 0.0, HIGHEST_P, note)
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
        end = bounds[1] if bounded else end_above(max(-low, high))
        note = f"lowest colour: {-end:g} or less" if low < -end else ""
        return ColourScale(DIVERGING, -end, end, note)
    end = bounds[1] if bounded else end_above(high)
    return ColourScale(SEQUENTIAL, min(0.0, low), end)


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
    end = end_above(max(high, -low))
    return ColourScale(DIVERGING, -end, end)


def end_above(value: float) -> float:
    """Smallest round number at or above a value, as the end of a scale.

    Examples:
        >>> end_above(0.113), end_above(17.0), end_above(0.0)
        (0.12, 20.0, 1.0)
    """
    if not value > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    # A value that is a round number up to rounding errors is its own end.
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
    decimals = fewest
    if high > low:
        decimals = min(max(fewest, 1 - math.floor(math.log10(span))), MOST_CELL_DECIMALS)
    texts = []
    for row in np.asarray(values).tolist():
        texts.append([_cell_text(value, decimals) for value in row])
    # Smaller letters for long numbers.
    size = 9 if decimals > 3 else 11
    return {"text": texts, "texttemplate": "%{text}", "textfont": {"size": size, "shadow": "auto"}}


def _cell_text(value: float, decimals: int) -> str:
    """A number with a fixed number of decimals, never "-0.00"; empty for NaN."""
    if math.isnan(value):
        return ""
    if round(value, decimals) == 0:
        value = 0.0
    return f"{value:.{decimals}f}"


def _limits(values: Any) -> tuple[float, float]:
    """Smallest and largest finite value; 0 and 1 if no value is finite."""
    numbers = np.asarray(values, dtype=float)
    finite = numbers[np.isfinite(numbers)]
    if not finite.size:
        return 0.0, 1.0
    return float(finite.min()), float(finite.max())


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
    axis_settings = CELL_AXIS | {"constrain": "domain"} if square else {"showgrid": False}
    fig.update_xaxes(**axis_settings).update_yaxes(**axis_settings)
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
    row_names = list(map(markup, rows))
    column_names = list(map(markup, columns))
    template = "row: %{customdata[0]}<br>column: %{customdata[1]}<br>" + quantity + ": %{z:.4f}"
    data: list[list[tuple[Any, ...]]] = []
    if ends is None:
        for row in row_names:
            data.append([(row, column) for column in column_names])
    else:
        template += "%{customdata[2]}"
        for row, intervals in zip(row_names, hover_texts(ends), strict=True):
            data.append([(row, column, text) for column, text in zip(column_names, intervals, strict=True)])
    return {"hoverongaps": False, "customdata": data, "hovertemplate": f"{template}<extra></extra>"}


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
    axis_titles = _axis_titles(result, axes)
    rows = HeatMapAxis(result.coordinates(axes[0]), axis_titles[0])
    columns = HeatMapAxis(result.coordinates(axes[1]), axis_titles[1])
    if axes[0] == "connection":
        tokens = getattr(result, "tokens", ())
        rows = rows._replace(labels=_connection_labels(rows.names, tokens))
        columns = columns._replace(labels=_connection_labels(columns.names, tokens))
    row_range = column_range = slice(None)
    if axes[0] not in (*OF_JACOBIANS, "skipped"):
        row_range = known_columns(values.T)
        column_range = known_columns(values)
    labels_left_out = [*_labels_outside(rows, row_range), *_labels_outside(columns, column_range)]
    notes = [_field_note(result, field, axes), scale.note, _left_out_note(labels_left_out)]
    rows = rows._replace(names=rows.names[row_range])
    columns = columns._replace(names=columns.names[column_range])
    values = values[row_range, column_range]
    if ends is not None:
        ends = ends.at((row_range, column_range))
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

    def fractions(counted: Any) -> Any:
        counts = getattr(counted, field)
        return counts / counts.sum(-1, keepdim=True)

    values = fractions(result).numpy()
    ends = interval_ends(result, fractions)
    scale = ColourScale(SEQUENTIAL, 0.0, 1.0)
    values_above_zero = np.where(values > 0, values, np.nan)
    titles = (titles[0], f"{titles[1]} (fraction)")
    sides = _series_sides(result, axes)
    fig = heat_map(values_above_zero, sides, scale, titles, ends=ends, decimals=2, square=False)
    return with_subtitle(fig, "White: none")


def _matrix_scale(result: Result, field: str, axes: tuple[str, ...], values: Any) -> ColourScale:
    scale = scale_of(result, field, values)
    if axes[0] in OF_JACOBIANS:
        return narrow_scale(values, SPREAD if scale.name == SPREAD else SEQUENTIAL)
    if axes[0] == "skipped":
        # A relative change of 1 or more leaves nothing in common; few outliers would hide the rest.
        note = "highest colour: 1 or more" if bool((np.nan_to_num(values) > 1).any()) else ""
        return ColourScale(scale.name, 0.0, min(1.0, scale.high), note)
    return scale


def _axis_titles(result: Result, axes: tuple[str, ...]) -> tuple[str, str]:
    if axes[0] == "connection":
        return "Jacobian of connection", "Singular vectors of connection"
    if axes[0] in ("row_block", "skipped", "vision_layer", "text_layer"):
        return axis_title(axes[0]), axis_title(axes[1])
    models = result.provenance.model.split(JOINT)
    if len(models) == 1:
        return "After block", "After block"
    first, last = (html.escape(model_name(model), quote=False) for model in (models[0], models[-1]))
    return f"After block of {first}", f"After block of {last}"


def _series_sides(result: Result, axes: tuple[str, ...]) -> tuple[HeatMapAxis, HeatMapAxis]:
    """`HeatMapAxis` of the rows and of the columns, from the first and the second axis of a field."""
    row_names, column_names = (result.coordinates(axis) for axis in axes)
    row_texts = [f"{name:g}" if isinstance(name, float) else str(name) for name in row_names]
    rows = HeatMapAxis(tuple(row_texts), axis_title(axes[0]), row_texts)
    if all(isinstance(name, str) for name in column_names):
        columns = HeatMapAxis(column_names, axis_title("layer"))
    else:
        columns = HeatMapAxis(column_names, axis_title(axes[1]), list(map(str, column_names)))
    return rows, columns


def _field_note(result: Result, field: str, axes: tuple[str, ...]) -> str:
    """Note for a figure of coupling or of p-values; empty for other fields."""
    if axes[0] in OF_JACOBIANS and len(result.coordinates(axes[0])) > 1:
        note = f"Without a {'block' if axes[0] == 'row_block' else 'connection'} with itself"
        null = getattr(result, NULLS.get(field, ""), None)
        if null is not None:
            off_diagonal = null[~np.eye(len(null), dtype=bool)]
            note += f"; random vectors give {float(off_diagonal.nanmean()):.2f}"
        return note
    count = int(getattr(result, "permutations", 0)) if field == "p_values" else 0
    if count:
        note = f"{count:,} permutations; smallest possible {1 / (count + 1):.2g}"
        if _of_own_layers(result, field) and len(result.layers) > 1:
            note += "; without a layer with itself"
        return note
    return ""


def _of_own_layers(result: Result, field: str) -> bool:
    """Whether a field holds p-values between layers of one model."""
    return field == "p_values" and JOINT not in result.provenance.model


def _labels_outside(side: HeatMapAxis, names_range: slice) -> list[str]:
    """Labels of the rows or columns that are left out."""
    labels = side.shown
    labels_inside = labels[names_range]
    return [label for label in labels if label not in labels_inside]


def _left_out_note(labels: list[str]) -> str:
    """Note on rows and columns without values; empty if all are shown."""
    distinct = list(dict.fromkeys(labels))
    return f"without {', '.join(distinct)}, where no value is defined" if distinct else ""


def _connection_labels(connections: tuple[str, ...], tokens: tuple[str, ...]) -> list[str]:
    """Shorten labels "block: t_in > t_out" to the parts that differ."""
    numbers = []
    for connection in connections:
        numbers.append([int(number) for number in re.split(": | > ", connection)])
    blocks_differ, starts_differ, ends_differ = (len(set(column)) > 1 for column in zip(*numbers, strict=True))
    labels = []
    for block, start, end in numbers:
        # One token if a connection stays at its position.
        positions = dict.fromkeys((start, end))
        words = [visible_token(f"{position} {tokens[position].strip()}", LETTERS) for position in positions]
        tokens_in_words = ""
        if starts_differ and ends_differ:
            tokens_in_words = " > ".join(words)
        elif ends_differ:
            tokens_in_words = words[-1]
        elif starts_differ:
            tokens_in_words = words[0]
        if not tokens_in_words:
            labels.append(str(block))
        elif blocks_differ:
            labels.append(f"{block}: {tokens_in_words}")
        else:
            labels.append(tokens_in_words)
    return labels


# Width of a cell in pixels, and letters of a token in a cell.
CELL = 60
WORD = 8
# Pixels below a line of cells, and around all lines.
BELOW_LINE = 46
AROUND = 150
# Height of a row in pixels, and of a low row.
ROW = 24
LOW_ROW = 18
# Number of layers above which rows are low.
MOST_LAYERS = 16
PROBABILITY = {"colorscale": "Blues", "cmin": 0.0, "cmax": 1.0}


def token_grid(grid: Any, titles: tuple[str, str], width: str | None = None) -> go.Figure:
    """Heat map of the top prediction of each layer after each token.

    Colours are probabilities. Predictions are bold from the saturation layer on.

    Args:
        grid: a `PredictionGrid`.
        titles: titles of the figure and of the colour bar.
        width: "column", "text" or None; sets the number of tokens in a line.
    """
    layers = grid.layers[1:]
    tokens = grid.tokens
    most_in_line = (PAPER_SIZES[width].width - 110) // CELL
    count = max(1, -(-len(tokens) // most_in_line))
    # Lines of nearly equal length.
    length = -(-len(tokens) // count)
    lines = [range(start, min(start + length, len(tokens))) for start in range(0, len(tokens), length)]
    line_height = (ROW if len(layers) <= MOST_LAYERS else LOW_ROW) * len(layers)
    room = line_height * len(lines) + BELOW_LINE * (len(lines) - 1)
    fig = make_subplots(rows=len(lines), cols=1, vertical_spacing=BELOW_LINE / room if len(lines) > 1 else 0)
    widest = max(map(len, lines))
    for number, line in enumerate(lines, start=1):
        fig.add_trace(_line_of_cells(grid, line), row=number, col=1)
        for token in line:
            layer = int(grid.saturation_layer[token])
            box = {"x0": token - 0.48, "x1": token + 0.48, "y0": layer - 0.46, "y1": layer + 0.46}
            fig.add_shape(type="rect", line={"color": ORANGE, "width": 2}, row=number, col=1, **box)
        axis_settings = CELL_AXIS | {"tickmode": "array"}
        fig.update_xaxes(
            ticktext=[_token_markup(tokens[token], WORD) for token in line],
            tickangle=0,
            tickfont={"size": 11},
            row=number,
            col=1,
            tickvals=list(line),
            # Lines with fewer tokens have cells of the same width.
            range=[line[0] - 0.5, line[0] + widest - 0.5],
            **axis_settings,
        )
        step = max(1, -(-len(layers) // MOST_LAYERS))
        fig.update_yaxes(
            title=site_axis_title(layers, "Block"),
            row=number,
            col=1,
            tickvals=list(range(0, len(layers), step)),
            ticktext=list(map(markup, short_names(layers)[::step])),
            **axis_settings,
        )
    fig.update_xaxes(title="After token", row=len(lines), col=1)
    fig.update_layout(
        showlegend=True,
        coloraxis={**PROBABILITY, "colorbar": colour_bar(titles[1]) | {"thickness": 16, "outlinewidth": 0}},
    )
    # Traces without points explain the marks in the legend.
    frame = {"symbol": "square-open", "size": 12, "color": ORANGE, "line": {"width": 2}}
    fig.add_scatter(x=[None], y=[None], mode="text", name="<b>bold</b>: the final prediction")
    fig.add_scatter(x=[None], y=[None], mode="markers", marker=frame, name="framed: saturation layer")
    normed = grid.provenance.options.get("norm") != "none"
    note = f"Logit lens {'with' if normed else 'without'} the final norm below the last block"
    if any(token[:1] == " " or token[-1:] == " " for token in tokens):
        note += "; · is a space"
    return with_subtitle(styled(fig, titles[0], height=room + AROUND), note)


def _token_markup(token: str, letters: int | None = None) -> str:
    return html.escape(visible_token(token, letters), quote=False)


def _line_of_cells(grid: Any, line: range) -> go.Heatmap:
    """Heat map of one line of tokens."""
    layers = range(grid.values.shape[1])
    probability = grid.values.numpy()[line.start : line.stop].T
    words = []
    hover_texts_of_cells = []
    for layer in layers:
        words_of_layer = []
        for token in line:
            word = _token_markup(grid.words[token][layer], WORD)
            is_final = layer >= grid.saturation_layer[token]
            words_of_layer.append(f"<b>{word}</b>" if is_final else word)
        words.append(words_of_layer)
        hover_texts_of_cells.append([_hover_text_of_cell(grid, token, layer) for token in line])
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
        customdata=hover_texts_of_cells,
        hovertemplate="%{customdata}<extra></extra>",
    )


def _hover_text_of_cell(grid: Any, token: int, layer: int) -> str:
    """Hover text of a cell: position, next token, likeliest tokens and entropy."""
    site = html.escape(grid.layers[layer + 1], quote=False)
    lines = [f"after token {token} <b>{_token_markup(grid.tokens[token])}</b>, {site}"]
    if token + 1 < len(grid.tokens):
        lines.append(f"next in the prompt: <b>{_token_markup(grid.tokens[token + 1])}</b>")
    ranked = zip(grid.top_words[token][layer], grid.top_probability[token][layer].tolist(), strict=True)
    lines += [f"{rank}. {_token_markup(word)}  {value:.3f}" for rank, (word, value) in enumerate(ranked, start=1)]
    entropy = float(grid.entropy[token][layer])
    if not np.isnan(entropy):
        lines.append(f"entropy: {entropy:.2f} nats")
    if layer >= grid.saturation_layer[token]:
        lines.append("saturation layer" if layer == grid.saturation_layer[token] else "final prediction")
    return "<br>".join(lines)
