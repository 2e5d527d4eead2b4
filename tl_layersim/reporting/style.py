"""Fonts, colours, templates and axes that all figures share."""

from __future__ import annotations

import html
import math
import re
import textwrap
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
import plotly.io
from plotly.colors import sample_colorscale

from ..core.result_declarations import JOINT, Provenance
from ..core.wording import amount
from .site_labels import heads_in_block, short_names, site_axis_title

# Mark of the trace of a band of intervals.
INTERVALS = "95 % intervals"
FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"
# Okabe and Ito's colours with a contrast of 3 or more on white; purple is darker, and black is lighter.
# tests/reporting/test_style.py measures contrasts, and differences for readers who do not see all colours.
BLUE = "#0072b2"
ORANGE = "#d55e00"
GREEN = "#009e73"
PURPLE = "#a8518a"
DARK = "#222222"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, DARK)
# Blue with an opacity.
FAINT = "rgba(0, 114, 178, {})"
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x")
GREY = "#666666"
# Maximum number of lines; more series are drawn as a heat map.
MOST_LINES = 5
# Colours of ordered lines, and the part of the scale that is dark enough on white.
ORDERED = "Plasma"
BRIGHTEST = 0.62
# Sequential colours of values: uniform to the eye, and readable without colours.
SEQUENTIAL = "Viridis"
# Colours about 0.
DIVERGING = "RdBu_r"
# Pixels of a figure on the screen, readable in a column of 600 pixels.
WIDTH = 600
HEIGHT = 400
# Maximum number of tick labels on an axis of sites.
MOST_TICKS = 24
# Labels without room are skipped, not turned, if there are more than FEW_LABELS with at most SHORT_LABEL letters.
FEW_LABELS = 10
SHORT_LABEL = 5
# Maximum number of heads with a label each; else each first head of a block has a label.
MOST_HEADS = 16
# Pixels above the title, for plotly's buttons.
BUTTONS = 24
# Pixels of a colour bar, and of a colour bar in a paper.
BAR = 88
PAPER_BAR = 72
# Largest height of a plot of square cells: over its width, and in pixels in a paper.
HIGHEST = 1.6
PAPER_HIGHEST = 430
# Axes of cells, which need no lines; invisible ticks keep labels away from the cells.
CELL_AXIS = {"showgrid": False, "showline": False, "tickcolor": "rgba(0, 0, 0, 0)"}
# Width of a letter, over the size of its font.
LETTER = 0.55
# Numbers on axes and colour bars: powers of 10 beyond 99,999 and below 0.0001, and no letters such as µ.
TICK_NUMBERS = {"exponentformat": "power", "minexponent": 4, "separatethousands": True}
# Names of the templates, as `fig.update_layout(template=...)` takes them.
SCREEN = "tl_layersim"
PAPER = "tl_layersim_paper"


class Size(NamedTuple):
    """Size of a figure and of its letters, in pixels of 1/96 inch.

    Attributes:
        template: name of plotly's template.
        width: width of the figure.
        font: size of letters.
        title: size of the letters of the title.
        shape: ratio of the height of a line plot to the width of the figure; 0 to keep the height.
    """

    template: str
    width: int
    font: int
    title: int
    shape: float = 0.0


# Sizes of `plot(width=...)`: 3.25 and 6.75 inches, with letters of 8 and titles of 9 points.
PAPER_SIZES = {
    None: Size(SCREEN, WIDTH, 13, 17),
    "column": Size(PAPER, 312, 11, 12, 0.52),
    "text": Size(PAPER, 648, 11, 12, 0.4),
}


def _template(size: Size, ink: str, line: float, marker: float) -> go.layout.Template:
    axis = {
        "automargin": True,
        "gridcolor": "#e6e6e6",
        "linecolor": ink,
        "showline": True,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": ink,
        "zeroline": False,
        "title": {"standoff": size.font - 3},
        **TICK_NUMBERS,
    }
    bar = {"outlinewidth": 0, "ticks": "outside", "ticklen": 4, "thickness": size.font + 3, **TICK_NUMBERS}
    text = {"family": FONT, "size": size.font, "color": "#333333" if size.template == SCREEN else "black"}
    return go.layout.Template(
        layout={
            "font": text,
            "colorway": list(PALETTE),
            "paper_bgcolor": "white",
            "plot_bgcolor": "white",
            "xaxis": axis,
            "yaxis": axis,
            "hoverlabel": {"align": "left", "font": {"family": FONT, "size": 12}},
            "modebar": {"remove": ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"]},
            "colorscale": {"sequential": SEQUENTIAL, "diverging": DIVERGING},
        },
        data={"scatter": [{"line": {"width": line}, "marker": {"size": marker}}], "heatmap": [{"colorbar": bar}]},
    )


plotly.io.templates[SCREEN] = _template(PAPER_SIZES[None], "#999999", line=2, marker=6)
plotly.io.templates[PAPER] = _template(PAPER_SIZES["text"], "black", line=1.5, marker=4.5)


def styled(fig: go.Figure, title: str, height: int = HEIGHT) -> go.Figure:
    """Set title, size, font and margins of a figure, and put the legend below the axes.

    Args:
        fig: the figure. A single heat map with square cells gets the height that it needs.
        title: title of the figure; a long title is broken into lines.
        height: height of the figure in pixels, without plotly's buttons.
    """
    fig.update_layout(title={"text": title, "subtitle": {"text": ""}})
    return _with_layout(fig, PAPER_SIZES[None], height - 94)


def with_provenance(fig: go.Figure, provenance: Provenance, samples: str = "") -> go.Figure:
    """Add model, number of tokens and kind of intervals below the title.

    Args:
        fig: a figure with a title that `styled` returned.
        provenance: provenance of the result in the figure.
        samples: number and kind of the samples in words, if they are not the tokens or rows of the run.
    """
    parts = [on_what(provenance, samples), intervals_in_words(fig)]
    return with_subtitle(fig, html.escape(" · ".join(filter(None, parts))))


def intervals_in_words(fig: go.Figure) -> str:
    """Describe the bands and whiskers of a figure; empty without intervals.

    Args:
        fig: a figure with bands from `add_band` and error bars from `whiskers`.

    Examples:
        >>> intervals_in_words(go.Figure(go.Scatter(x=[0], y=[0.3], error_y={"array": [0.2]})))
        'whiskers: 95 % intervals'
    """
    has_bands = False
    has_whiskers = False
    for trace in fig.data:
        has_bands = has_bands or trace.meta == INTERVALS
        for side in ("error_x", "error_y"):
            lengths = trace[side].array if side in trace else None
            # Whiskers of unknown intervals are NaN, and are not drawn.
            if lengths is not None and np.nansum(np.array(lengths, dtype=float)) > 0:
                has_whiskers = True
    marks = []
    if has_bands:
        marks.append("bands")
    if has_whiskers:
        marks.append("whiskers")
    return f"{' and '.join(marks)}: {INTERVALS}" if marks else ""


def with_subtitle(fig: go.Figure, text: str) -> go.Figure:
    """Add a subtitle in smaller letters below the title.

    Args:
        fig: a figure with a title that `styled` returned.
        text: the subtitle, as markup. An empty text changes nothing.
    """
    if not text:
        return fig
    fig.layout.title.subtitle.text = "<br>".join(filter(None, (fig.layout.title.subtitle.text, text)))
    return with_size(fig, None, None)


def with_size(fig: go.Figure, width: str | None, title: str | None, pixels: int = 0) -> go.Figure:
    """Set the title of a figure, and its size for the screen or a paper.

    A figure for a paper has no subtitle.

    Args:
        fig: a figure that `styled` returned.
        width: "column", "text", or None for the screen.
        title: the new title; None to keep the title, "" for none.
        pixels: width of a panel; 0 for the width of the whole figure.
    """
    if title is not None:
        fig.layout.title.text = html.escape(title, quote=False)
    if width or title == "":
        fig.layout.title.subtitle.text = ""
    size = PAPER_SIZES[width]
    plot_height = fig.layout.height - fig.layout.margin.t - fig.layout.margin.b
    figure_width = size.width if width else fig.layout.width
    return _with_layout(fig, size._replace(width=pixels or figure_width), plot_height)


def with_room_for_legend(fig: go.Figure, title: str = "") -> go.Figure:
    """Set the title of the legend, and make room for all its rows.

    Args:
        fig: a figure that `styled` returned.
        title: title of the legend; "" for none.
    """
    fig.update_layout(legend_title={"text": title, "side": "top center"})
    return with_size(fig, None, None)


def _with_layout(fig: go.Figure, size: Size, plot_height: float) -> go.Figure:
    """Set height, margins, ticks and line breaks of a figure; `plot_height` is the height of the plot area."""
    layout = fig.layout
    paper = size.template == PAPER
    letter = LETTER * size.font
    colour_bars = [trace.colorbar for trace in fig.data if trace.type == "heatmap" and trace.coloraxis is None]
    colour_bars += [trace.marker.colorbar for trace in fig.data if trace.type == "scatter" and trace.marker.showscale]
    if layout.coloraxis.colorscale:
        colour_bars.append(layout.coloraxis.colorbar)
    letters_of_x = max(map(_letters, _tick_texts(fig, "x")), default=0)
    letters_of_y = max(map(_letters, _tick_texts(fig, "y")), default=0)
    left = min(2.2 * size.font + 14 + max(letters_of_y, 4.5) * letter, 0.45 * size.width)
    right: float = 10 if paper else 24
    if colour_bars:
        right = PAPER_BAR if paper else BAR
    plot_width = size.width - left - right
    maps = [trace for trace in fig.data if trace.type == "heatmap"]
    square = layout.yaxis.scaleanchor is not None and len(maps) < 2
    rows, columns = np.shape(maps[0].z) if maps else (1, 1)
    if square:
        plot_height = min(plot_width * min(rows / max(columns, 1), HIGHEST), PAPER_HIGHEST if paper else math.inf)
    elif paper and len(maps) < 2:
        # Every tick label beside the vertical axis gets a line.
        plot_height = max(size.shape * size.width, (size.font + 2) * max(len(_tick_texts(fig, "y")), 1))
    for axes, room in ((fig.select_xaxes(), plot_width), (fig.select_yaxes(), plot_height)):
        for axis in axes:
            share = (axis.domain[1] - axis.domain[0]) if axis.domain else 1.0
            _fit_ticks(axis, room * share, size)
            if axis.title.text:
                axis.title.text = _broken(axis.title.text, room * share / letter)
    for bar in colour_bars:
        bar.title.text = _broken(bar.title.text or "", plot_height / letter)
    top, title, subtitle = _title_area(fig, size)
    bottom = _height_below_axes(fig, size, letters_of_x)
    if paper:
        _for_paper(fig, size, plot_width / max(columns, 1))
    return fig.update_layout(
        title={
            "text": title,
            "font": {"size": size.title},
            "subtitle": {"text": subtitle, "font": {"size": size.font, "color": GREY}},
            "x": 0,
            "xref": "container",
            "xanchor": "left",
            "y": 1,
            "yanchor": "top",
            "pad": {"t": (6 if paper else BUTTONS) + 0.6 * size.title * title.count("<br>"), "l": 4 if paper else 16},
            "automargin": False,
        },
        template=size.template,
        width=size.width,
        height=round(top + plot_height + bottom) + _legend_height(fig, size),
        margin={"l": round(left), "r": round(right), "t": round(top), "b": round(bottom) + _legend_height(fig, size)},
        legend={
            "orientation": "h",
            "xref": "container",
            "x": 0.5,
            "xanchor": "center",
            "yref": "container",
            "y": 0.01,
            "yanchor": "bottom",
        },
    )


def _title_area(fig: go.Figure, size: Size) -> tuple[float, str, str]:
    """Height above the plot area, and title and subtitle broken into lines."""
    layout = fig.layout
    paper = size.template == PAPER
    # Letters of the title and of the subtitle are 0.49 and 0.5 of their font's size wide.
    title = _broken((layout.title.text or "").replace("<br>", " "), (size.width - 40) / (0.49 * size.title))
    subtitle_lines = []
    for line in (layout.title.subtitle.text or "").split("<br>"):
        if line:
            subtitle_lines.append(_broken(line.replace("\n", " "), (size.width - 40) / (0.5 * size.font)))
    subtitle = "<br>".join(subtitle_lines)
    height = 8.0 if paper else BUTTONS + 10
    if title:
        height += 1.25 * size.title * (title.count("<br>") + 1)
    if subtitle:
        height += (8 if paper else 12) + 1.35 * size.font * (subtitle.count("<br>") + 1)
    # Titles of panels stand above the first row.
    if any((note.y, note.yref, note.yanchor) == (1, "paper", "bottom") for note in layout.annotations):
        height += 1.6 * size.font
    return height, title, subtitle


def _height_below_axes(fig: go.Figure, size: Size, letters: int) -> float:
    """Height of the tick labels and the title below the horizontal axes.

    Args:
        fig: the figure, with turned labels and broken titles.
        size: size of the figure.
        letters: number of letters of the longest tick label.
    """
    sine = 0.0
    line_breaks = 0
    for axis in fig.select_xaxes():
        sine = max(sine, abs(math.sin(math.radians(axis.tickangle or 0))))
        line_breaks = max(line_breaks, (axis.title.text or "").count("<br>"))
    height_of_labels = max(sine * letters * (LETTER * size.font), size.font)
    return (2.4 + 1.3 * line_breaks) * size.font + 12 + height_of_labels


def _fit_ticks(axis: Any, room: float, size: Size) -> None:
    """Turn or skip the labels of an axis that would overlap."""
    # Below an axis, long or few labels are turned, and others are skipped. In a paper, turned labels and labels beside an axis
    # are skipped too.
    texts = list(axis.ticktext or ())
    horizontal = axis.plotly_name.startswith("x")
    letters = [_letters(text) for text in texts]

    def crowded(step: int) -> bool:
        """Whether every `step`-th label needs more room than there is."""
        letters_shown = letters[::step]
        # Labels beside an axis, and turned labels, need the height of a line.
        distances: list[float] = [size.font + 3]
        if horizontal and not axis.tickangle:
            distances = [LETTER * size.font * (a + b) / 2 + 3 for a, b in pairwise(letters_shown)]
        return max(distances, default=0) * len(letters_shown) > room

    may_turn = len(texts) <= FEW_LABELS or max(letters) > SHORT_LABEL
    if horizontal and axis.tickangle is None and may_turn and crowded(1):
        axis.tickangle = -90
    step = next((step for step in range(1, len(texts)) if not crowded(step)), 1)
    if step > 1 and (size.template == PAPER or (horizontal and not axis.tickangle)):
        axis.update(ticktext=texts[::step], tickvals=list(axis.tickvals)[::step])


def _for_paper(fig: go.Figure, size: Size, cell_width: float) -> None:
    """Adapt a figure to a paper: one font size, and numbers only in cells with room."""
    fig.update_xaxes(tickfont_size=None).update_yaxes(tickfont_size=None)
    fig.update_annotations(font_size=size.font)
    for trace in fig.data:
        if trace.type == "heatmap" and trace.texttemplate:
            longest = max((_letters(text) for row in trace.text for text in row), default=0)
            trace.textfont.size = size.font
            if longest * LETTER * size.font > cell_width:
                # Dots mark findings, and always have room.
                trace.text = [["•" if "•" in text else "" for text in row] for row in trace.text]


def _legend_height(fig: go.Figure, size: Size) -> int:
    entries = [trace for trace in fig.data if trace.showlegend is not False and trace.type != "heatmap"]
    # plotly's own default: a legend if there are several entries.
    has_legend = fig.layout.showlegend or (fig.layout.showlegend is None and len(entries) > 1)
    if not has_legend or not entries:
        return 0
    widths = [4 * size.font + LETTER * size.font * _letters(trace.name or "") for trace in entries]
    room = size.width - 40
    rows = 1
    if sum(widths) > room:
        # More than one row has columns of equal width.
        columns = max(1, int(room / max(widths)))
        rows = -(-len(entries) // columns)
    if fig.layout.legend.title.text:
        rows += 1
    return round(1.5 * size.font * rows)


def _tick_texts(fig: go.Figure, name: str) -> list[str]:
    """Tick labels of all x axes or all y axes of a figure."""
    axes = fig.select_xaxes() if name == "x" else fig.select_yaxes()
    texts = []
    for axis in axes:
        texts += [str(text) for text in axis.ticktext or ()]
    if texts:
        return texts
    # Without tick texts, plotly labels cells and bars by their own names.
    for trace in fig.data:
        if trace.type in ("heatmap", "bar") and trace[name] is not None:
            texts += [label for label in trace[name] if isinstance(label, str)]
    return texts


def _letters(text: str) -> int:
    """Number of letters in the longest line of markup."""
    plain_text = re.sub(r"<(?!br)[^>]*>|&[^;]*;", "", html.unescape(str(text)))
    return max(map(len, plain_text.split("<br>")))


def on_what(provenance: Provenance, samples: str = "") -> str:
    """Model and number of positions of a run, in words.

    Args:
        provenance: provenance of the run.
        samples: samples in words; "" for the number of positions.

    Examples:
        >>> from dataclasses import fields
        >>> empty = {field.name: "" for field in fields(Provenance)} | {"options": {}, "versions": {}}
        >>> numbers = {"seed": None, "warnings": (), "tokens": 12345, "sequences": 9, "texts": 9, "batches": 9, "seconds": 1.0}
        >>> on_what(Provenance(**(empty | numbers | {"model": "EleutherAI/pythia-14m"})))
        'EleutherAI/pythia-14m · 12,345 tokens'
    """
    models = names_of_models(provenance.model)
    names = " and ".join(models[:2])
    if len(models) > 2:
        names += f" and {len(models) - 2} more"
    if not samples and provenance.tokens:
        noun = "token"
        if provenance.tokens == provenance.sequences:
            # One position of each row: images, sentences.
            noun = "image" if provenance.options.get("main_input") == "pixel_values" else "row"
        samples = amount(provenance.tokens, noun)
    return " · ".join(part for part in (names, samples) if part)


def names_of_models(model: str) -> tuple[str, ...]:
    """Distinct names of the models of a run.

    Args:
        model: name in the provenance, of one model or of several.
    """
    return tuple(dict.fromkeys(map(model_name, model.split(JOINT))))


def model_name(model: str) -> str:
    """Name of a model on the hub, or the last part of a folder's path.

    Args:
        model: name in the provenance.
    """
    is_path = model.startswith(("/", ".", "~")) or "\\" in model or model.count("/") > 1
    if not is_path:
        return model
    return model.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]


def _broken(text: str, letters: float) -> str:
    """Wrap HTML text at spaces into lines of about `letters` letters; lines with tags stay whole."""
    lines: list[str] = []
    for line in text.split("<br>"):
        if "<" in line:
            lines.append(line)
        else:
            lines += textwrap.wrap(line, max(int(letters), 12), break_long_words=False, break_on_hyphens=False)
    return "<br>".join(lines)


def ordered_colours(count: int) -> list[str]:
    """Colours for ordered lines, from dark to light.

    Examples:
        >>> len(ordered_colours(3)), ordered_colours(1)
        (3, ['#0d0887'])
    """
    return [ordered_colour(number / max(1, count - 1)) for number in range(count)]


def ordered_colour(position: float) -> str:
    """Colour on a scale from dark to light, as a hex string.

    Args:
        position: relative position in the order, from 0 (darkest) to 1.
    """
    [colour] = sample_colorscale(ORDERED, [BRIGHTEST * min(max(position, 0.0), 1.0)], colortype="tuple")
    return "#" + "".join(f"{round(255 * part):02x}" for part in colour)


def series_look(count: int, ordered: bool) -> list[dict[str, Any]]:
    """Colour, dash and symbol of each line, as arguments of `Series`.

    Args:
        count: number of lines.
        ordered: whether the lines are ordered; the colours then follow the order.
    """
    scale = ordered_colours(count) if ordered else []
    looks = []
    for n in range(count):
        colour = scale[n] if ordered else PALETTE[n % len(PALETTE)]
        # A dash for each round of the palette.
        dash = "solid" if ordered else DASHES[n // len(PALETTE) % len(DASHES)]
        looks.append({"colour": colour, "dash": dash, "symbol": SYMBOLS[n % len(SYMBOLS)]})
    return looks


def colour_bar(title: str) -> dict[str, Any]:
    """Colour bar with its title along its side, as plotly settings."""
    return {"title": {"text": title, "side": "right"}, "ticksuffix": "\u00a0\u00a0", "minexponent": 5}


def layer_axis(update: Callable[..., go.Figure], names: tuple[Any, ...], title: str, labels: list[str] | None = None) -> None:
    """Label the sites along an axis; skip labels that would overlap.

    Args:
        update: `update_xaxes` or `update_yaxes` of a figure with positions 0, 1, 2, ...
        names: names of the sites.
        title: title of the axis. If the sites are not residual layers, see `site_axis_title`.
        labels: labels of names that are not sites; None for the short names of sites.
    """
    step = max(1, -(-len(names) // MOST_TICKS))
    if labels is None:
        heads = heads_in_block(names)
        if heads and len(names) > MOST_HEADS:
            # The first head of a block, of every second block, ...
            step = heads * max(1, -(-len(names) // (heads * MOST_TICKS)))
        labels = short_names(names)
        title = site_axis_title(names, title)
    positions = list(range(0, len(names), step))
    texts = [html.escape(labels[position], quote=False) for position in positions]
    update(title=title, tickmode="array", tickvals=positions, ticktext=texts)
