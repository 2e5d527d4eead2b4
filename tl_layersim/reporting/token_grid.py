"""Token grid: each layer's top-1 prediction after each token of a prompt."""

from __future__ import annotations

import html
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .heat_map import ColourScale
from .site_labels import short_names, site_axis_title, visible_token
from .style import CELL_AXIS, ORANGE, PAPER_SIZES, colour_bar, styled, with_subtitle

# Pixels of a cell, which has room for so many letters of a word; below a line of cells, and around all of them.
CELL, LETTERS, BELOW_LINE, AROUND = 60, 8, 46, 150
# Pixels of a row of cells, and of a row where there are more than so many layers.
ROW, LOW_ROW, MOST_LAYERS = 24, 18, 16
PROBABILITY = ColourScale("Blues", 0.0, 1.0)


def token_grid(grid: Any, titles: tuple[str, str], width: str | None = None) -> go.Figure:
    """Heat map of each layer's top-1 prediction after each token, coloured by probability; bold from the saturation layer on.

    Args:
        grid: a `PredictionGrid`.
        titles: titles of the figure and of the colour bar.
        width: "column", "text" or None; sets the number of tokens in a line.
    """
    layers, tokens = grid.layers[1:], grid.tokens
    lines = _lines(len(tokens), (PAPER_SIZES[width].width - 110) // CELL)
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
        ticks = [_shown(tokens[token], LETTERS) for token in line]
        plain = CELL_AXIS | {"tickmode": "array"}
        # Lines with fewer tokens have cells of the same width.
        places = {"tickvals": list(line), "range": [line[0] - 0.5, line[0] + widest - 0.5]}
        fig.update_xaxes(ticktext=ticks, tickangle=0, tickfont={"size": 11}, row=number, col=1, **places, **plain)
        step = max(1, -(-len(layers) // MOST_LAYERS))
        names = {"tickvals": list(range(0, len(layers), step)), "ticktext": short_names(layers)[::step]}
        fig.update_yaxes(title=site_axis_title(layers, "Block"), row=number, col=1, **names, **plain)
    fig.update_xaxes(title="After token", row=len(lines), col=1)
    fig.update_layout(
        showlegend=True,
        coloraxis={**PROBABILITY.axis(), "colorbar": colour_bar(titles[1]) | {"thickness": 16, "outlinewidth": 0}},
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


def _lines(tokens: int, longest: int) -> list[range]:
    """Token indices of each line; lines have nearly equal length."""
    count = max(1, -(-tokens // longest))
    length = -(-tokens // count)
    return [range(start, min(start + length, tokens)) for start in range(0, tokens, length)]


def _line_of_cells(grid: Any, line: range) -> go.Heatmap:
    """Draw the cells of one line of tokens."""
    layers = range(grid.values.shape[1])
    probability = grid.values.numpy()[line.start : line.stop].T
    words = [
        [
            f"<b>{word}</b>" if layer >= grid.saturation_layer[token] else word
            for token in line
            for word in [_shown(grid.words[token][layer], LETTERS)]
        ]
        for layer in layers
    ]
    return go.Heatmap(
        z=probability,
        x=list(line),
        y=list(layers),
        text=words,
        texttemplate="%{text}",
        textfont={"size": 10},
        coloraxis="coloraxis",
        xgap=1,
        ygap=1,
        customdata=[[_at_pointer(grid, token, layer) for token in line] for layer in layers],
        hovertemplate="%{customdata}<extra></extra>",
    )


def _at_pointer(grid: Any, token: int, layer: int) -> str:
    """The hover text of a cell: its position, the next token of the prompt, the likeliest tokens, and the entropy."""
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
