"""Figures of the tokens of one prompt: each layer's predictions, and the path of each token through the layers."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from .style import FAINT, colour_bar, layer_axis, styled, token_text


def prediction_heatmap(
    words: tuple[tuple[str, ...], ...],
    probability: Any,
    saturation: list[int],
    tokens: tuple[str, ...],
    layers: tuple[str, ...],
) -> go.Figure:
    """Heatmap of each layer's top-1 prediction after each token, coloured by probability, bold from the saturation layer on.

    Args:
        words: `token layer`, the first choices.
        probability: `token layer`.
        saturation: `token`, the index of the saturation layer, which is framed.
        tokens: of the prompt.
        layers: names of the blocks.
    """
    text = [
        [token_text(row[layer], bold=layer >= saturation[token]) for token, row in enumerate(words)]
        for layer in range(len(layers))
    ]
    heat = go.Heatmap(
        z=probability.T,
        x=list(range(len(tokens))),
        y=list(range(len(layers))),
        text=text,
        texttemplate="%{text}",
        textfont={"size": 10},
        zmin=0.0,
        zmax=1.0,
        colorscale="Blues",
        customdata=[list(tokens) for _ in layers],
        hovertemplate="after %{customdata}<br>block %{y}<br>%{text}: %{z:.3f}<extra></extra>",
        colorbar=colour_bar("Probability"),
    )
    fig = go.Figure(heat)
    for token, layer in enumerate(saturation):
        box = {"x0": token - 0.48, "x1": token + 0.48, "y0": layer - 0.46, "y1": layer + 0.46}
        fig.add_shape(type="rect", line={"color": "#c1440e", "width": 1.5}, **box)
    layer_axis(fig.update_yaxes, layers, "Block")
    shown = [token_text(token) for token in tokens]
    fig.update_xaxes(title="After token", tickmode="array", tickvals=list(range(len(tokens))), ticktext=shown, tickangle=-45)
    width = max(620, 130 + 62 * len(tokens))
    return styled(fig, "Prediction of each layer after each token", height=max(320, 120 + 24 * len(layers)), width=width)


def token_paths(coordinates: Any, explained: list[float], tokens: tuple[str, ...], layers: tuple[str, ...]) -> go.Figure:
    """Paths of tokens in the plane of two principal components, the last token's in black.

    Args:
        coordinates: `token layer 2`.
        explained: fraction of the last layer's variance along each component.
        tokens: of the prompt.
        layers: names of the residual layers.
    """
    fig = go.Figure()
    last = len(tokens) - 1
    for i, token in enumerate(tokens):
        fig.add_scatter(
            x=coordinates[i, :, 0],
            y=coordinates[i, :, 1],
            mode="lines+markers",
            name=token_text(token),
            line={"color": "black" if i == last else FAINT.format(0.55), "width": 2.5 if i == last else 1.2},
            marker={"size": 4},
            customdata=list(layers),
            hovertemplate="%{customdata}<extra>" + token_text(token) + "</extra>",
        )
    fig.update_layout(showlegend=False)
    fig.update_xaxes(title=f"Principal component 1 ({explained[0]:.0%} of the last layer's variance)")
    fig.update_yaxes(title=f"Principal component 2 ({explained[1]:.0%})")
    return styled(fig, "Paths of tokens through the layers", height=520, width=620)
