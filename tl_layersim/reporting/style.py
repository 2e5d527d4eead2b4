"""Fonts, colours, templates and axes that all figures share."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Callable
from typing import Any

import plotly.graph_objects as go
import plotly.io
from plotly.colors import sample_colorscale

from ..core.provenance import JOINT, Provenance
from ..core.wording import amount
from .interval_bands import intervals_in_words
from .site_labels import heads_in_block, short_names, site_axis_title

FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"
# Okabe and Ito's colours that have a contrast of 3 or more on white, with a darker purple and a lighter black.
# tests/reporting/test_style.py measures contrasts, and differences for readers who do not see all colours.
BLUE, ORANGE, GREEN, PURPLE, DARK = "#0072b2", "#d55e00", "#009e73", "#a8518a", "#222222"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, DARK)
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x")
FAINT = "rgba(0, 114, 178, {})"
GREY = "#666666"
# Most series that are drawn as lines; more are a heat map.
MOST_LINES = 5
# Colours of lines in an order, such as by depth: the part of this scale that is dark enough on white.
ORDERED, BRIGHTEST = "Plasma", 0.62
SOLID = {"color": BLUE, "width": 2}
# Sequential colours of values: uniform to the eye, and readable without colours.
SEQUENTIAL = "Viridis"
# Colours about 0.
DIVERGING = "RdBu_r"
# Size of a figure of curves: all of it is readable in a column of 600 pixels.
WIDTH, HEIGHT = 600, 400
# Most tick labels on an axis of layers.
MOST_TICKS = 24
MOST_HEAD_TICKS = 40
# Pixels above the title, where plotly shows its buttons.
BUTTONS = 24
# Number of letters from which a tick label is turned.
LONG_LABEL = 6
# Pixels of a line of the title, of the subtitle, above the subtitle, and below both; pixels of a letter of the title.
TITLE_LINE, SUBTITLE_LINE, ABOVE_SUBTITLE, BELOW_TITLE, TITLE_LETTER = 21, 18, 8, 14, 8.3
MINUS = "\u2212"
# Numbers on axes and colour bars: powers of 10 beyond 99,999 and below 0.0001, and no letters such as µ.
TICK_NUMBERS = {"exponentformat": "power", "minexponent": 4, "separatethousands": True}
# Pixels of a letter of an axis title.
AXIS_LETTER = 7.8
# Pixels of an entry of a legend without its name, of a letter of its name, and of a row of entries.
LEGEND_ENTRY, LEGEND_LETTER, LEGEND_ROW = 50, 7, 20
# Names of the templates, as `fig.update_layout(template=...)` takes them.
SCREEN, PRINT = "tl_layersim", "tl_layersim_print"


def _template(font: dict[str, Any], axis: dict[str, Any], line: float, marker: float) -> go.layout.Template:
    """A template: white background, these fonts and axes, and lines and markers of this size where a figure sets none."""
    scatter = {"line": {"width": line}, "marker": {"size": marker}}
    bar = {"outlinewidth": 0, "ticks": "outside", "ticklen": 4, "thickness": 16, **TICK_NUMBERS}
    return go.layout.Template(
        layout={
            "font": font,
            "colorway": list(PALETTE),
            "paper_bgcolor": "white",
            "plot_bgcolor": "white",
            "xaxis": axis | TICK_NUMBERS,
            "yaxis": axis | TICK_NUMBERS,
            "hoverlabel": {"align": "left", "font": {"family": FONT, "size": 12}},
            "modebar": {"remove": ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"]},
            "colorscale": {"sequential": SEQUENTIAL, "diverging": DIVERGING},
        },
        data={"scatter": [scatter], "heatmap": [{"colorbar": bar}]},
    )


plotly.io.templates[SCREEN] = _template(
    {"family": FONT, "size": 13, "color": "#333333"},
    {
        "automargin": True,
        "gridcolor": "#e6e6e6",
        "linecolor": "#999999",
        "showline": True,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": "#999999",
        "zeroline": False,
        "title": {"standoff": 10},
    },
    line=2,
    marker=6,
)
plotly.io.templates[PRINT] = _template(
    {"family": "Helvetica, Arial, sans-serif", "size": 15, "color": "black"},
    {
        "automargin": True,
        "gridcolor": "#dddddd",
        "linecolor": "black",
        "linewidth": 1.5,
        "showline": True,
        "mirror": True,
        "ticks": "outside",
        "ticklen": 5,
        "tickwidth": 1.5,
        "tickcolor": "black",
        "zeroline": False,
        "title": {"standoff": 10},
    },
    line=3,
    marker=9,
)


def styled(fig: go.Figure, title: str, height: int = HEIGHT, width: int = WIDTH) -> go.Figure:
    """The figure with its title, size, font and margins; the legend stands below the axes, and never over the curves.

    Args:
        fig: to style.
        title: what the figure shows; a long one is broken into lines.
        height: of the figure in pixels, without plotly's buttons.
        width: of the figure in pixels.
    """
    lines = _broken(title, int((width - 40) / TITLE_LETTER))
    for axis in fig.select_yaxes():
        # The title of a vertical axis is no longer than the axis.
        if axis.title.text:
            axis.title.text = "<br>".join(_broken(axis.title.text, int((height - 110) / AXIS_LETTER)))
    return fig.update_layout(
        title={
            "text": "<br>".join(lines),
            "font": {"size": 17},
            "x": 0,
            "xref": "container",
            "xanchor": "left",
            "y": 1,
            "yanchor": "top",
            "pad": {"t": BUTTONS, "l": 16},
            "automargin": False,
        },
        template=SCREEN,
        height=height + BUTTONS,
        width=width,
        margin={"l": 64, "r": 24, "t": BUTTONS + TITLE_LINE * len(lines) + BELOW_TITLE, "b": 56},
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


def described(fig: go.Figure, provenance: Provenance, samples: str = "") -> go.Figure:
    """The figure with the model and the number of tokens below its title, where they are known, and what shows intervals.

    Args:
        fig: with a title, as `styled` leaves it.
        provenance: of the result that it shows.
        samples: their number and kind in words, for a figure of others than the tokens or rows of the run.
    """
    return with_subtitle(fig, html.escape(" · ".join(filter(None, (on_what(provenance, samples), intervals_in_words(fig))))))


def with_subtitle(fig: go.Figure, text: str) -> go.Figure:
    """The figure with a smaller line or lines below its title, and room for them.

    Args:
        fig: with a title, as `styled` leaves it.
        text: the line, as markup. An empty one changes nothing.
    """
    if not text:
        return fig
    letters = int((fig.layout.width - 40) / (0.8 * TITLE_LETTER))
    lines = _broken(text, letters)
    before = fig.layout.title.subtitle.text
    size = SUBTITLE_LINE * len(lines) + (0 if before else ABOVE_SUBTITLE)
    fig.update_layout(
        title_subtitle={"text": "<br>".join([before, *lines] if before else lines), "font": {"size": 13, "color": GREY}},
        height=fig.layout.height + size,
        margin_t=fig.layout.margin.t + size,
    )
    return fig


def with_room_for_legend(fig: go.Figure, title: str = "") -> go.Figure:
    """The figure with a height at which several rows of a legend leave the axes as high as one row does.

    Args:
        fig: as `styled` leaves it.
        title: of the legend, above its entries; "" for none.
    """
    widths = [LEGEND_ENTRY + LEGEND_LETTER * len(trace.name or "") for trace in fig.data if trace.showlegend is not False]
    room = fig.layout.width - 40
    # One row, or columns of equal width.
    rows = 1 if sum(widths) <= room else -(-len(widths) // max(1, int(room / max(widths))))
    extra = LEGEND_ROW * (rows - 1 + bool(title))
    words = {"text": title, "side": "top center", "font": {"size": 13}}
    return fig.update_layout(height=fig.layout.height + extra, legend_title=words)


def on_what(provenance: Provenance, samples: str = "") -> str:
    """The model and the number of positions of a run in words.

    Args:
        provenance: of the run.
        samples: in place of the number of positions; "" for these.

    Examples:
        >>> from dataclasses import fields
        >>> empty = {field.name: "" for field in fields(Provenance)} | {"options": {}, "versions": {}}
        >>> numbers = {"seed": None, "warnings": (), "tokens": 12345, "sequences": 9, "batches": 9, "seconds": 1.0}
        >>> on_what(Provenance(**(empty | numbers | {"model": "EleutherAI/pythia-14m"})))
        'EleutherAI/pythia-14m · 12,345 tokens'
    """
    models = list(dict.fromkeys(part for part in provenance.model.split(JOINT) if part))
    names = " and ".join(model_name(model) for model in models[:2]) + (f" and {len(models) - 2} more" if models[2:] else "")
    # One position of each row: images, sentences.
    row = "image" if provenance.options.get("main_input") == "pixel_values" else "row"
    count = (
        amount(provenance.tokens, row if provenance.tokens == provenance.sequences else "token") if provenance.tokens else ""
    )
    return " · ".join(part for part in (names, samples or count) if part)


def model_name(model: str) -> str:
    """A model's name as its hub writes it; of a folder, the last part of its path.

    Args:
        model: as its provenance has it.
    """
    is_path = model.startswith(("/", ".", "~")) or "\\" in model or model.count("/") > 1
    return model.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1] if is_path else model


def _broken(text: str, letters: int) -> list[str]:
    """A text in lines of at most so many letters, broken between words; a line with tags is left as it is."""
    parts: list[str] = []
    for line in text.split("<br>"):
        parts += (
            [line] if "<" in line else textwrap.wrap(line, max(letters, 20), break_long_words=False, break_on_hyphens=False)
        )
    return parts or [""]


def ordered_colours(count: int) -> list[str]:
    """Colours of lines in an order, the darkest first.

    Args:
        count: of the lines.

    Examples:
        >>> len(ordered_colours(3)), ordered_colours(1)
        (3, ['#0d0887'])
    """
    return [ordered_colour(number / max(1, count - 1)) for number in range(count)]


def ordered_colour(position: float) -> str:
    """The colour of a line at a position of an order.

    Args:
        position: 0 (darkest) to 1.
    """
    [colour] = sample_colorscale(ORDERED, [BRIGHTEST * min(max(position, 0.0), 1.0)], colortype="tuple")
    return "#" + "".join(f"{round(255 * part):02x}" for part in colour)


def series_look(count: int, ordered: bool) -> list[dict[str, Any]]:
    """Colour, dash and symbol of each of a few lines, as `Series` takes them.

    Args:
        count: of the lines.
        ordered: whether the lines have an order, which the colours follow.
    """
    colours = ordered_colours(count) if ordered else [PALETTE[n % len(PALETTE)] for n in range(count)]
    dashes = ["solid" if ordered else DASHES[n // len(PALETTE) % len(DASHES)] for n in range(count)]
    return [{"colour": colours[n], "dash": dashes[n], "symbol": SYMBOLS[n % len(SYMBOLS)]} for n in range(count)]


def log_axis(low: float, high: float) -> dict[str, Any]:
    """A logarithmic axis with a label at each power of 10, and at 2 and 5 where the axis spans few of them.

    All labels are plain decimals, or all are powers where one of them has to be.

    Args:
        low: smallest value on the axis, above 0.
        high: largest value.

    Examples:
        >>> log_axis(0.5, 20)["ticktext"]
        ['0.5', '1', '2', '5', '10', '20']
        >>> log_axis(1e-6, 1)["ticktext"][-2:]
        ['10<sup>−1</sup>', '10<sup>0</sup>']
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = max(1, (last - first) // 8)
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    ticks = [factor * 10.0**decade for decade in range(first, last + 1, step) for factor in factors]
    ticks = [tick for tick in ticks if low / 1.5 <= tick <= high * 1.5] if len(factors) > 1 else ticks
    texts = [tick_number(tick) for tick in ticks]
    if len(factors) == 1 and any("<sup>" in text for text in texts):
        texts = [f"10<sup>{round(math.log10(tick))}</sup>".replace("-", MINUS) for tick in ticks]
    return {"type": "log", "tickmode": "array", "tickvals": ticks, "ticktext": texts}


def tick_number(value: float) -> str:
    """A number of a logarithmic axis: a plain decimal, or with a power of 10 where that is shorter.

    Args:
        value: above 0, of one digit.

    Examples:
        >>> [tick_number(value) for value in (0.0005, 20.0, 10000.0, 1e-05, 2e-07)]
        ['0.0005', '20', '10,000', '10<sup>−5</sup>', '2·10<sup>−7</sup>']
    """
    if 1e-4 <= value < 1e6:
        return f"{value:,.4f}".rstrip("0").rstrip(".")
    digit, _, power = f"{value:.0e}".partition("e")
    raised = f"10<sup>{str(int(power)).replace('-', MINUS)}</sup>"
    return raised if digit == "1" else f"{digit}·{raised}"


def colour_bar(title: str, above: bool = False) -> dict[str, Any]:
    """A colour bar with its title along its side, and a space between its numbers and the title.

    Args:
        title: of the bar.
        above: whether the title stands above the bar, where a short one is not taken for one of the numbers.
    """
    return {"title": {"text": title, "side": "top" if above else "right"}, "ticksuffix": "\u00a0\u00a0", "minexponent": 5}


def layer_axis(update: Callable[..., go.Figure], names: tuple[str, ...], title: str) -> None:
    """Label the sites along an axis, and skip some of them where labels would overlap.

    Args:
        update: `update_xaxes` or `update_yaxes` of a figure, whose positions are 0, 1, 2, ...
        names: of the sites.
        title: of the axis where the sites are residual layers, see `site_axis_title`.
    """
    heads = heads_in_block(names)
    step = max(1, -(-len(names) // (MOST_HEAD_TICKS if heads else MOST_TICKS)))
    if heads and step > 1:
        # The first head of a block, of every second block, ...
        step = heads * max(1, -(-len(names) // (heads * MOST_TICKS)))
    labels = short_names(names)
    at = list(range(0, len(names), step))
    size = {"tickfont": {"size": 9}} if heads else {}
    update(title=site_axis_title(names, title), tickmode="array", tickvals=at, ticktext=[labels[i] for i in at], **size)


def turn_labels(fig: go.Figure, names: tuple[str, ...]) -> None:
    """Turn the labels of sites along the horizontal axis where they are long, so that each ends at its tick and none is cut.

    Args:
        fig: whose horizontal axis `layer_axis` labelled.
        names: of the sites.
    """
    if heads_in_block(names):
        fig.update_xaxes(tickangle=-90)
    elif len(names) > 1 and max(map(len, short_names(names))) > LONG_LABEL:
        fig.update_xaxes(tickangle=-45)


def token_text(token: str, bold: bool = False) -> str:
    """A token as text that plotly does not read as markup.

    Examples:
        >>> token_text("<b>"), token_text("")
        ('&lt;b&gt;', '(empty)')
    """
    plain = html.escape(token).replace("\n", "\\n") or "(empty)"
    return f"<b>{plain}</b>" if bold else plain
