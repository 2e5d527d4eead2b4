"""Plotly figures of results: a heatmap over two layer axes, lines over one; knows results only."""

from __future__ import annotations

import html
import re
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import qualitative, sample_colorscale

from ..core.results import Result

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
    if axes in (("row", "column"), ("row_block", "column_block")):
        return _heatmap(result, values, axes, title)
    if len(axes) == 1:
        return _lines(result.coordinates(axes[0]), [(field, values, 1.0)], title, field, axes[0])
    if axes == ("layer", "direction"):
        # By depth, a line for each of a few directions: the first, the last, and some between.
        labels = result.coordinates("direction")
        shown = sorted({round(n) for n in np.geomspace(1, len(labels), min(len(labels), len(SHADES)))})
        series = [(f"number {n}", values[:, n - 1], shade) for n, shade in zip(shown, SHADES, strict=False)]
        return _lines(result.coordinates("layer"), series, title, field, "layer").update_yaxes(type="log", rangemode="normal")
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
        # Of looks at a training, and of models before and after one, the last stands out.
        shades = SHADES[: len(labels)][::-1] if axes[0] in ("look", "model", "stage") else SHADES
        said = [str(label) if axes[0] in ("model", "stage") else f"{axes[0]} = {label}" for label in labels]
        series = [(label, row, shade) for label, row, shade in zip(said, values, shades, strict=False)]
        return _lines(result.coordinates(axes[1]), series, title, field, axes[1])
    if len(axes) == 2:
        return _table(result, values, axes, title)
    raise ValueError(f"no plot of {field!r} over {axes}: use to_frame({field!r})")


def short_names(names: tuple[str, ...]) -> list[str]:
    """Tick labels: the block's number, `embed` for what enters block 0, and `into 3` for what enters a later one.

    Sites that are no blocks keep their path, without what all of them start with.

    >>> short_names(("blocks.0.hook_resid_pre", "blocks.0.hook_resid_post"))
    ['embed', '0']
    >>> short_names(("model.layers.0.mlp.input", "model.layers.0.mlp", "model.layers.1.mlp"))
    ['into 0.mlp', '0.mlp', '1.mlp']
    """
    if not all(name.startswith("blocks.") for name in names):
        parts = [name.removesuffix(".input").split(".") for name in names]
        # Never the last part, which tells which one it is.
        common = 0
        while all(len(part) > common + 1 and part[common] == parts[0][common] for part in parts):
            common += 1
        return [
            f"into {'.'.join(part[common:])}" if name.endswith(".input") else ".".join(part[common:])
            for name, part in zip(names, parts, strict=True)
        ]
    numbers = [(re.findall(r"\d+", name) or [name])[-1] for name in names]
    return [
        ("embed" if number == "0" else f"into {number}") if name.endswith("resid_pre") else number
        for name, number in zip(names, numbers, strict=True)
    ]


def _heatmap(result: Result, values: Any, axes: tuple[str, ...], title: str) -> go.Figure:
    rows, columns = (result.coordinates(axis) for axis in axes)
    low, high = min(0.0, float(np.nan_to_num(values).min())), 1.0
    if axes[0] == "row_block" and len(rows) > 1:
        # A block in its own basis is diagonal by definition, and would hide what there is between blocks.
        values = np.where(np.eye(len(rows), dtype=bool), np.nan, values)
        low, high = (float(f(values)) for f in (np.nanmin, np.nanmax)) if not np.isnan(values).all() else (0.0, 1.0)
    heat = go.Heatmap(
        z=values,
        x=list(range(len(columns))),
        y=list(range(len(rows))),
        zmin=low,
        zmax=high,
        colorscale="Viridis",
        customdata=[[(row, column) for column in columns] for row in rows],
        hovertemplate="%{customdata[0]}<br>%{customdata[1]}<br>%{z:.4f}<extra></extra>",
    )
    fig = go.Figure(heat)
    models = result.provenance.model.split(" | ")
    names = [f"block of {model}" for model in (models[-1], models[0])] if len(models) > 1 else ["after block"] * 2
    names = ["in the singular vectors of block", "Jacobian of block"] if axes[0] == "row_block" else names
    _axis(fig.update_xaxes, columns, names[0])
    _axis(fig.update_yaxes, rows, names[1])
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


def tiles(matrices: Any, labels: tuple[str, ...], title: str) -> go.Figure:
    """`row column k k` as one picture, each tile divided by its largest entry, with gaps between."""
    rows, columns, k, _ = matrices.shape
    top = np.maximum(matrices.max(axis=(2, 3), keepdims=True), 1e-300)
    padded = np.full((rows, columns, k + 1, k + 1), np.nan)
    padded[:, :, :k, :k] = matrices / top
    heat = go.Heatmap(
        z=padded.transpose(0, 2, 1, 3).reshape(rows * (k + 1), columns * (k + 1)),
        zmin=0.0,
        zmax=1.0,
        colorscale="Viridis",
        colorbar={"title": "share of the<br>tile's largest"},
        hovertemplate="%{z:.3f}<extra></extra>",
    )
    fig = go.Figure(heat)
    at = [(k + 1) * n + (k - 1) / 2 for n in range(max(rows, columns))]
    step = max(1, -(-len(labels) // 16))
    for update, name in ((fig.update_xaxes, "in the singular vectors of"), (fig.update_yaxes, "Jacobian of")):
        shown = {"tickvals": at[: len(labels) : step], "ticktext": list(labels[::step])}
        update(title=name, tickmode="array", showgrid=False, zeroline=False, constrain="domain", **shown)
    fig.update_yaxes(autorange="reversed", scaleanchor="x")
    return _style(fig, title, height=700, width=780)


def spectra(values: Any, labels: list[str]) -> go.Figure:
    """Singular values, `series direction`, by number on a logarithmic axis."""
    fig = go.Figure()
    numbers = list(range(1, values.shape[1] + 1))
    for n, (label, row) in enumerate(zip(labels, values, strict=True)):
        [colour] = sample_colorscale("Viridis", [0.9 * n / max(1, len(labels) - 1)])
        fig.add_scatter(x=numbers, y=np.where(row > 0, row, np.nan), name=label, line={"color": colour, "width": 1.5})
    fig.update_xaxes(title="number of the singular value")
    fig.update_yaxes(title="singular value", type="log")
    return _style(fig, "Singular values of the Jacobians", height=420, width=720)


def adjacency(strength: Any, strongest: float, names: tuple[str, ...], title: str) -> go.Figure:
    """Blocks on a circle, an edge between each two, the stronger the more opaque.

    Args:
        strength: `layer layer`, symmetric, 0 for no edge.
        strongest: of an edge that is fully opaque.
        names: of the blocks.
        title: of the figure.
    """
    blocks = len(names)
    angle = np.pi / 2 - 2 * np.pi * np.arange(blocks) / blocks
    x, y = np.cos(angle), np.sin(angle)
    fig = go.Figure()
    share = np.clip(strength / max(strongest, 1e-12), 0, 1)
    # Edges of a similar strength are one trace: plotly slows down with thousands.
    for level in range(1, 21):
        ends = [(a, b) for a in range(blocks) for b in range(a) if int(np.ceil(20 * share[a, b])) == level]
        if ends:
            xs = [v for a, b in ends for v in (x[a], x[b], None)]
            ys = [v for a, b in ends for v in (y[a], y[b], None)]
            line = {"color": FAINT.format(level / 20), "width": 0.5 + 3.5 * level / 20}
            fig.add_scatter(x=xs, y=ys, mode="lines", line=line, hoverinfo="skip")
    middle = [
        ((x[a] + x[b]) / 2, (y[a] + y[b]) / 2, names[a], names[b], strength[a, b]) for a in range(blocks) for b in range(a)
    ]
    fig.add_scatter(
        x=[one[0] for one in middle],
        y=[one[1] for one in middle],
        mode="markers",
        marker={"size": 9, "opacity": 0},
        customdata=[one[2:] for one in middle],
        hovertemplate="%{customdata[0]}<br>%{customdata[1]}<br>%{customdata[2]:.3f} beyond chance<extra></extra>",
    )
    fig.add_scatter(
        x=1.08 * x,
        y=1.08 * y,
        mode="text",
        text=short_names(names),
        customdata=list(names),
        hovertemplate="%{customdata}<extra></extra>",
    )
    fig.update_layout(showlegend=False)
    fig.update_xaxes(visible=False)
    fig.update_yaxes(visible=False, scaleanchor="x")
    below = f"darkest: {strongest:.2f} of the way from chance to full coupling"
    fig.add_annotation(text=below, x=0.5, y=-0.06, xref="paper", yref="paper", showarrow=False)
    return _style(fig, title, height=500, width=480)


def curves(x: list[Any], series: dict[str, list[float]], titles: tuple[str, str, str]) -> go.Figure:
    """Lines over numbers, on a logarithmic axis where these span it; or over names."""
    fig = go.Figure()
    for shade, (label, values) in zip(SHADES, series.items(), strict=False):
        chance = {"color": "grey", "width": 1.5, "dash": "dash"}
        line = chance if label == "random vectors" else {"color": FAINT.format(shade), "width": 2}
        fig.add_scatter(x=x, y=values, name=label, mode="lines+markers", line=line)
    numbers = all(isinstance(one, int | float) for one in x)
    above = [one for one in x if one > 0] if numbers else []
    wide = bool(above) and max(above) > 20 * min(above)
    even = not numbers or (wide and len(above) < len(x))
    fig.update_xaxes(title=titles[1], type="category" if even else "log" if wide else "linear")
    fig.update_yaxes(title=titles[2])
    return _style(fig, titles[0], height=420, width=620)


def regression(x: Any, y: Any, names: list[str], line: dict[str, Any], titles: tuple[str, str, str]) -> go.Figure:
    """Points with their names, the line through them, and its confidence band."""
    fig = go.Figure()
    band = {"mode": "lines", "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
    fig.add_scatter(x=line["x"], y=line["high"], **band)
    fig.add_scatter(x=line["x"], y=line["low"], fill="tonexty", fillcolor=FAINT.format(0.15), **band)
    fig.add_scatter(x=line["x"], y=line["fit"], mode="lines", line={"color": BLUE, "width": 2}, hoverinfo="skip")
    fig.add_scatter(x=x, y=y, mode="markers+text", text=names, textposition="top center", marker={"size": 8, "color": BLUE})
    fig.update_layout(showlegend=False)
    fig.update_xaxes(title=titles[1])
    fig.update_yaxes(title=titles[2])
    return _style(fig, titles[0], height=460, width=620)


def _axis(update: Any, names: tuple[str, ...], title: str) -> None:
    """Layer ticks, thinned so that their labels do not run into each other."""
    step = max(1, -(-len(names) // 24))
    labels = short_names(names)
    if not all(name.startswith("blocks.") for name in names):
        title = re.sub(r"\bblock\b", "module", title, count=1)
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


def learning_curve(losses: Any, loss: float, alone: float, unit: str) -> go.Figure:
    """Loss by training step, smoothed over it, with what the stitched model and the back alone lose on the data that judges."""
    fig = go.Figure()
    steps = np.arange(1, len(losses) + 1)
    fig.add_scatter(x=steps, y=losses, name="each step", mode="lines", line={"color": FAINT.format(0.4), "width": 1})
    width = min(25, len(losses) // 4)
    if width > 1:
        smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
        centre = steps[: len(smooth)] + (width - 1) / 2
        fig.add_scatter(x=centre, y=smooth, name=f"mean of {width} steps", mode="lines", line={"color": BLUE, "width": 2})
    for value, name, dash in ((loss, "stitched, judged", "dot"), (alone, "back alone, judged", "dash")):
        fig.add_scatter(
            x=[1, max(len(losses), 2)],
            y=[value, value],
            name=f"{name}: {value:.3f}",
            mode="lines",
            line={"dash": dash, "color": "#444", "width": 1.5},
        )
    fig.update_xaxes(title="training step")
    fig.update_yaxes(title=unit)
    return _style(fig, "Learning curve of the adapter", height=420, width=720)


def over_groups(values: Any, interval: tuple[float, float, float], title: str, unit: str) -> go.Figure:
    """A number of each batch, with the mean and its interval behind them."""
    fig = go.Figure()
    middle, low, high = interval
    numbers = np.arange(len(values))
    if np.isfinite(low):
        fig.add_hrect(y0=low, y1=high, fillcolor=FAINT.format(0.15), line_width=0)
    fig.add_hline(y=middle, line={"color": BLUE, "width": 1.5}, annotation_text=f"{middle:.4g}")
    fig.add_scatter(x=numbers, y=values, mode="markers", name="each batch", marker={"color": BLUE, "size": 6})
    fig.update_xaxes(title="batch")
    fig.update_yaxes(title=unit)
    return _style(fig, title, height=420, width=720)


def directions(
    values: Any, low: Any, high: Any, names: tuple[str, ...], seams: tuple[str, ...], title: str, unit: str
) -> go.Figure:
    """Values `front back seam` by seam: a colour for each pair, solid one way and dotted the other; itself dashed and grey."""
    fig = go.Figure()
    places = np.arange(len(seams))
    count = len(names)
    together = [(a, b) for a in range(count) for b in range(a + 1, count)]
    colours = {pair: qualitative.D3[number % len(qualitative.D3)] for number, pair in enumerate(together)}
    greys = ["#333", "#777", "#999", "#bbb"]
    pairs = [pair for a, b in together for pair in ((a, b), (b, a))] + [(a, a) for a in range(count)]
    # A little side by side, so that intervals at one seam do not hide each other.
    shifts = np.linspace(-0.05, 0.05, len(pairs)) if len(pairs) > 1 else np.zeros(1)
    for (a, b), shift in zip(pairs, shifts, strict=True):
        colour = greys[a % len(greys)] if a == b else colours[min(a, b), max(a, b)]
        dash = "dash" if a == b else "solid" if a < b else "dot"
        fig.add_scatter(
            x=places + shift,
            y=values[a, b],
            name=f"{names[a]} into {names[b]}",
            mode="lines+markers",
            line={"color": colour, "dash": dash, "width": 1.5 if a == b else 2},
            marker={"symbol": "x" if a == b else "circle" if a < b else "circle-open", "size": 7},
            error_y={
                "type": "data",
                "symmetric": False,
                "array": np.nan_to_num(high[a, b] - values[a, b]),
                "arrayminus": np.nan_to_num(values[a, b] - low[a, b]),
                "thickness": 1,
                "width": 3,
            },
            customdata=[[seam] for seam in seams],
            hovertemplate="%{customdata[0]}<br>%{y:.4f}<extra>" + html.escape(f"{names[a]} into {names[b]}") + "</extra>",
        )
    one_name = all("," not in seam for seam in seams)
    fig.update_xaxes(tickvals=places, ticktext=short_names(seams) if one_name else list(seams), title="after block")
    fig.update_yaxes(title=unit, rangemode="tozero")
    return _style(fig, title, height=480, width=760)
