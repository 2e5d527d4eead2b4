"""Plotly figures of results: a heatmap over two layer axes, lines over one; knows results only."""

from __future__ import annotations

import html
import re
from typing import Any

import numpy as np
import plotly.graph_objects as go

from .results import Result

FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"
SHADES = (1.0, 0.75, 0.5, 0.35, 0.25)
BLUE, FAINT = "#2a5c9a", "rgba(42, 92, 154, {})"


def figure(result: Result, field: str, axes: tuple[str, ...]) -> go.Figure:
    """The figure of one field, by its axes.

    Args:
        result: whose field.
        field: its name.
        axes: its axes: any one, two of layers, or another one and one of layers.
    """
    values = (result.values if field == result.values_name else getattr(result, field)).numpy()
    picture = next((p for p in result.pictures if p.field == field), None)
    title = picture.title if picture else field
    if axes == ("row", "column"):
        return _heatmap(result, values, title)
    if len(axes) == 1:
        return _lines(result.coordinates(axes[0]), [(field, values, 1.0)], title, field, axes[0])
    if len(axes) == 2 and axes[0] == "quantile":
        levels = result.coordinates("quantile")
        # The median stands out; the further from it, the fainter.
        series = [
            (f"{level:.0%} of tokens below", row, 1.0 - 1.6 * abs(level - 0.5))
            for level, row in zip(levels, values, strict=True)
        ]
        return _lines(result.coordinates(axes[1]), series, title, "value", axes[1])
    if len(axes) == 2 and len(result.coordinates(axes[0])) <= len(SHADES):
        labels = result.coordinates(axes[0])
        series = [(f"{axes[0]} = {label}", row, shade) for label, row, shade in zip(labels, values, SHADES, strict=False)]
        return _lines(result.coordinates(axes[1]), series, title, field, axes[1])
    if len(axes) == 2:
        return _table(result, values, axes, title)
    raise ValueError(f"no plot of {field!r} over {axes}: use to_frame({field!r})")


def short_names(names: tuple[str, ...]) -> list[str]:
    """Tick labels: the block's number, and `embed` for what enters block 0.

    >>> short_names(("blocks.0.hook_resid_pre", "blocks.0.hook_resid_post"))
    ['embed', '0']
    """
    return ["embed" if name.endswith("resid_pre") else (re.findall(r"\d+", name) or [name])[-1] for name in names]


def _heatmap(result: Result, values: Any, title: str) -> go.Figure:
    rows, columns = result.coordinates("row"), result.coordinates("column")
    low = min(0.0, float(values.min()))
    heat = go.Heatmap(
        z=values,
        x=list(range(len(columns))),
        y=list(range(len(rows))),
        zmin=low,
        zmax=1.0,
        colorscale="Viridis",
        customdata=[[(row, column) for column in columns] for row in rows],
        hovertemplate="%{customdata[0]}<br>%{customdata[1]}<br>%{z:.4f}<extra></extra>",
    )
    fig = go.Figure(heat)
    models = result.provenance.model.split(" | ")
    _axis(fig.update_xaxes, columns, f"block of {models[-1]}" if len(models) > 1 else "after block")
    _axis(fig.update_yaxes, rows, f"block of {models[0]}" if len(models) > 1 else "after block")
    fig.update_yaxes(autorange="reversed", scaleanchor="x", constrain="domain")
    fig.update_xaxes(constrain="domain")
    return _style(fig, title, height=520, width=620)


def _table(result: Result, values: Any, axes: tuple[str, ...], title: str) -> go.Figure:
    """Many series over layers: a heatmap with as many lines, each label written out."""
    rows, columns = (result.coordinates(axis) for axis in axes)
    heat = go.Heatmap(
        z=values,
        x=list(range(len(columns))),
        y=[str(row) for row in rows],
        colorscale="Viridis",
        customdata=[list(columns) for _ in rows],
        hovertemplate=axes[0] + " %{y}<br>%{customdata}<br>%{z:.5g}<extra></extra>",
    )
    fig = go.Figure(heat)
    _axis(fig.update_xaxes, columns, "block")
    fig.update_yaxes(title=axes[0], type="category")
    return _style(fig, title, height=520, width=620)


def _lines(names: tuple[Any, ...], series: list[tuple[str, Any, float]], title: str, value: str, axis: str) -> go.Figure:
    fig = go.Figure()
    of_layers = axis in ("row", "column", "residual", "layer", "centre")
    numbers = not of_layers and all(isinstance(name, int | float) for name in names)
    for label, values, strength in series:
        fig.add_scatter(
            x=list(names) if numbers else list(range(len(names))),
            y=values,
            name=label,
            mode="lines+markers",
            line={
                "color": BLUE if strength == 1.0 else FAINT.format(round(strength, 2)),
                "width": 2.5 if strength == 1.0 else 1.5,
            },
            marker={"size": 5},
            customdata=list(names),
            hovertemplate="%{customdata}<br>%{y:.4f}<extra>" + label + "</extra>",
        )
    if of_layers:
        _axis(fig.update_xaxes, names, "block" if names and not names[0].endswith("resid_pre") else "after block")
    elif numbers:
        fig.update_xaxes(title=axis)
    else:
        fig.update_xaxes(title=axis, tickmode="array", tickvals=list(range(len(names))), ticktext=[str(n) for n in names])
    # A single curve without negative values starts at 0: a cut axis makes a ripple look like a fall.
    whole = bool((np.nan_to_num(np.stack([values for _, values, _ in series])) >= 0).all()) and len(series) < 4
    fig.update_yaxes(title=value, rangemode="tozero" if whole else "normal")
    fig.update_layout(showlegend=len(series) > 1)
    return _style(fig, title, height=420, width=620)


def word_grid(
    words: tuple[tuple[str, ...], ...],
    probability: Any,
    saturation: list[int],
    tokens: tuple[str, ...],
    layers: tuple[str, ...],
) -> go.Figure:
    """Token by layer: the word that each layer would say, coloured by its probability; bold from where it is final."""
    text = [
        [_shown(row[layer], bold=layer >= saturation[token]) for token, row in enumerate(words)] for layer in range(len(layers))
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
        colorbar={"title": "p"},
    )
    fig = go.Figure(heat)
    for token, layer in enumerate(saturation):
        box = {"x0": token - 0.48, "x1": token + 0.48, "y0": layer - 0.46, "y1": layer + 0.46}
        fig.add_shape(type="rect", line={"color": "#c1440e", "width": 1.5}, **box)
    _axis(fig.update_yaxes, layers, "block")
    shown = [_shown(token) for token in tokens]
    fig.update_xaxes(title="after token", tickmode="array", tickvals=list(range(len(tokens))), ticktext=shown, tickangle=-45)
    width = max(620, 130 + 62 * len(tokens))
    return _style(fig, "What each layer would say", height=max(320, 120 + 24 * len(layers)), width=width)


def _shown(word: str, bold: bool = False) -> str:
    """A token as text that plotly does not read as markup."""
    plain = html.escape(word).replace("\n", "\\n") or "(empty)"
    return f"<b>{plain}</b>" if bold else plain


def paths(coordinates: Any, explained: list[float], tokens: tuple[str, ...], layers: tuple[str, ...]) -> go.Figure:
    """`token layer 2` as lines, the last token in black."""
    fig = go.Figure()
    last = len(tokens) - 1
    for i, token in enumerate(tokens):
        fig.add_scatter(
            x=coordinates[i, :, 0],
            y=coordinates[i, :, 1],
            mode="lines+markers",
            name=_shown(token),
            line={"color": "black" if i == last else FAINT.format(0.55), "width": 2.5 if i == last else 1.2},
            marker={"size": 4},
            customdata=list(layers),
            hovertemplate="%{customdata}<extra>" + _shown(token) + "</extra>",
        )
    fig.update_layout(showlegend=False)
    fig.update_xaxes(title=f"PC 1 ({explained[0]:.0%} of the last layer)")
    fig.update_yaxes(title=f"PC 2 ({explained[1]:.0%})")
    return _style(fig, "Paths of tokens through the layers", height=520, width=620)


def _axis(update: Any, names: tuple[str, ...], title: str) -> None:
    """Layer ticks, thinned so that their labels do not run into each other."""
    step = max(1, -(-len(names) // 24))
    labels = short_names(names)
    at = list(range(0, len(names), step))
    update(title=title, tickmode="array", tickvals=at, ticktext=[labels[i] for i in at])


def _style(fig: go.Figure, title: str, height: int, width: int) -> go.Figure:
    return fig.update_layout(
        title={"text": title, "font": {"size": 16}},
        template="plotly_white",
        font={"family": FONT, "size": 12},
        height=height,
        width=width,
        margin={"l": 60, "r": 20, "t": 50, "b": 50},
        legend={"orientation": "h", "yanchor": "top", "y": -0.18},
    )
