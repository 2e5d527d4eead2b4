"""Figure of one prompt's predictions: the first choice of each layer after each token."""

from __future__ import annotations

import html
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .colour_scales import ColourScale, on_cells
from .site_labels import short_names, site_axis_title
from .style import BUTTONS, ORANGE, WIDTH, colour_bar, styled, with_subtitle

# Most tokens in a line, and most letters of a word in a cell and below a column: all are readable at 600 pixels.
PER_LINE, LETTERS = 8, 8
# Pixels of a row of cells, of a row where there are many layers, below a line, and below the last line.
ROW, LOW_ROW, BELOW_LINE, BELOW_ALL = 24, 18, 46, 92
# Most layers with rows of full height.
MOST_LAYERS = 16
PROBABILITY = ColourScale("Blues", 0.0, 1.0)
SPACE = "·"


class Predictions(NamedTuple):
    """What each layer predicts after each token.

    Attributes:
        words: `token layer`, the first choices.
        probability: `token layer`, of the first choices.
        saturation: `token`, index of the saturation layer.
        entropy: `token layer`, in nats; NaN where it is not known.
        top: for each token and layer, the likeliest words and their probabilities.
    """

    words: tuple[tuple[str, ...], ...]
    probability: Any
    saturation: list[int]
    entropy: Any
    top: tuple[Any, ...]


def visible_token(token: str, letters: int | None = None) -> str:
    """A token as one line of plain text in which outer spaces are visible.

    Args:
        token: as text.
        letters: most letters; a longer token ends with an ellipsis.

    Examples:
        >>> visible_token(" girl"), visible_token("a\\n"), visible_token(""), visible_token(" extraordinary", 8)
        ('·girl', 'a\\\\n', '(empty)', '·extrao…')
    """
    inner = token.strip(" ")
    before = len(token) - len(token.lstrip(" "))
    shown = SPACE * before + inner + SPACE * (len(token) - before - len(inner) if inner else 0)
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown) or "(empty)"
    return shown if letters is None or len(shown) <= letters else f"{shown[: letters - 1]}…"


def prediction_heatmap(predictions: Predictions, tokens: tuple[str, ...], layers: tuple[str, ...], note: str) -> go.Figure:
    """Heatmap of each layer's first choice after each token, coloured by probability, bold from the saturation layer on.

    Args:
        predictions: of the layers.
        tokens: of the prompt.
        layers: names of the blocks.
        note: below the title.
    """
    lines = _lines(len(tokens))
    row = ROW if len(layers) <= MOST_LAYERS else LOW_ROW
    cells = row * len(layers)
    room = cells * len(lines) + BELOW_LINE * (len(lines) - 1)
    fig = make_subplots(rows=len(lines), cols=1, vertical_spacing=BELOW_LINE / room if len(lines) > 1 else 0)
    widest = max(len(line) for line in lines)
    for number, line in enumerate(lines, start=1):
        fig.add_trace(_line_of_cells(predictions, line, tokens, layers), row=number, col=1)
        for token in line:
            layer = predictions.saturation[token]
            box = {"x0": token - 0.48, "x1": token + 0.48, "y0": layer - 0.46, "y1": layer + 0.46}
            fig.add_shape(type="rect", line={"color": ORANGE, "width": 2}, row=number, col=1, **box)
        ticks = [html.escape(visible_token(tokens[token], LETTERS), quote=False) for token in line]
        plain = {"showgrid": False, "showline": False, "tickcolor": "rgba(0, 0, 0, 0)", "tickmode": "array"}
        fig.update_xaxes(tickvals=list(line), ticktext=ticks, tickangle=0, tickfont={"size": 11}, row=number, col=1, **plain)
        # Lines with fewer tokens have cells of the same width.
        fig.update_xaxes(range=[line[0] - 0.5, line[0] + widest - 0.5], row=number, col=1)
        step = max(1, -(-len(layers) // MOST_LAYERS))
        names = {"tickvals": list(range(0, len(layers), step)), "ticktext": short_names(layers)[::step]}
        fig.update_yaxes(title=site_axis_title(layers, "Block"), row=number, col=1, **names, **plain)
    fig.update_xaxes(title="After token", row=len(lines), col=1)
    styled(fig, "Prediction of each layer after each token", height=0)
    top = fig.layout.margin.t - BUTTONS
    height = room + top + BELOW_ALL
    fig.update_layout(
        coloraxis={
            "colorscale": PROBABILITY.name,
            "cmin": 0.0,
            "cmax": 1.0,
            "colorbar": colour_bar("Probability of the first choice") | {"thickness": 16, "outlinewidth": 0},
        },
        height=height + BUTTONS,
        margin_b=BELOW_ALL,
        width=WIDTH,
    )
    _legend(fig)
    spaces = any(token[:1] == " " or token[-1:] == " " for token in tokens)
    return with_subtitle(
        fig, html.escape(note[:1].upper() + note[1:] + (f"; {SPACE} is a space" if spaces else ""), quote=False)
    )


def _lines(tokens: int) -> list[range]:
    """The numbers of the tokens in each line; lines are of nearly equal length."""
    count = max(1, -(-tokens // PER_LINE))
    length = -(-tokens // count)
    return [range(start, min(start + length, tokens)) for start in range(0, tokens, length)]


def _line_of_cells(predictions: Predictions, line: range, tokens: tuple[str, ...], layers: tuple[str, ...]) -> go.Heatmap:
    """The cells of one line of tokens."""
    probability = np.asarray(predictions.probability)[line.start : line.stop].T
    words = [
        [_cell(predictions.words[token][layer], layer >= predictions.saturation[token]) for token in line]
        for layer in range(len(layers))
    ]
    return go.Heatmap(
        z=probability,
        x=list(line),
        y=list(range(len(layers))),
        text=on_cells(words, probability, PROBABILITY),
        texttemplate="%{text}",
        textfont={"size": 10},
        coloraxis="coloraxis",
        xgap=1,
        ygap=1,
        customdata=[
            [_at_pointer(predictions, tokens, token, layer, name) for token in line] for layer, name in enumerate(layers)
        ],
        hovertemplate="%{customdata}<extra></extra>",
    )


def _cell(word: str, final: bool) -> str:
    text = html.escape(visible_token(word, LETTERS), quote=False)
    return f"<b>{text}</b>" if final else text


def _at_pointer(predictions: Predictions, tokens: tuple[str, ...], token: int, layer: int, name: str) -> str:
    """The text of a cell at the pointer: where it is, what follows in the prompt, the likeliest tokens, and the entropy."""

    def shown(text: str) -> str:
        return html.escape(visible_token(text), quote=False)

    lines = [f"after token {token} <b>{shown(tokens[token])}</b>, {html.escape(name, quote=False)}"]
    if token + 1 < len(tokens):
        lines.append(f"next in the prompt: <b>{shown(tokens[token + 1])}</b>")
    if predictions.top:
        ranked = zip(*predictions.top[token][layer], strict=True)
        lines += [f"{rank}. {shown(word)}  {value:.3f}" for rank, (word, value) in enumerate(ranked, start=1)]
    else:
        lines.append(f"1. {shown(predictions.words[token][layer])}  {float(predictions.probability[token][layer]):.3f}")
    entropy = float(predictions.entropy[token][layer])
    if not np.isnan(entropy):
        lines.append(f"entropy: {entropy:.2f} nats")
    if layer >= predictions.saturation[token]:
        lines.append("saturation layer" if layer == predictions.saturation[token] else "final prediction")
    return "<br>".join(lines)


def _legend(fig: go.Figure) -> None:
    """Entries that explain bold words and frames."""
    frame = {"symbol": "square-open", "size": 12, "color": ORANGE, "line": {"width": 2}}
    fig.add_scatter(x=[None], y=[None], mode="text", name="<b>bold</b>: the final prediction", showlegend=True)
    name = "framed: saturation layer"
    fig.add_scatter(x=[None], y=[None], mode="markers", marker=frame, name=name, showlegend=True)
    fig.update_layout(showlegend=True)
