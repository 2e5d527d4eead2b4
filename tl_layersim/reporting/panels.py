"""Figures that put several fields of a result together: trade-off of early exits, saturation, shape of trajectories."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .colour_scales import MOST_NUMBERS, ColourScale, on_cells
from .curves import LOG_FACTOR, add_fan, label_axis
from .interval_bands import Ends, hover_texts, interval_ends, whiskers
from .labels import axis_title
from .style import (
    BLUE,
    DARK,
    FAINT,
    GREY,
    HEIGHT,
    ORANGE,
    SEQUENTIAL,
    colour_bar,
    described,
    layer_axis,
    log_axis,
    styled,
    turn_labels,
    with_subtitle,
)

# Agreement whose lowest threshold is marked in the figure of early exits.
AGREEMENT = 0.95
# Thresholds that are written at their points.
WRITTEN = (0.3, 0.5, 0.7, 0.9)
# Fractions at the ticks of a colour bar by the square root; pixels of a row of a heatmap of thresholds, and most such rows.
FRACTIONS = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
ROW, MOST_ROWS = 17, 40
# Opacities of whiskers at many points of a curve.
QUIET = 0.5


def exit_tradeoff(result: Any, title: str) -> go.Figure:
    """Speed-up of early exits against agreement, and against perplexity where there are targets: a point for each threshold.

    Args:
        result: an `ExitCurveResult`.
        title: of the figure.
    """
    fields = ["agreement"] + ["perplexity"] * bool(np.isfinite(result.perplexity.numpy()).any())
    fig = make_subplots(rows=1, cols=len(fields), shared_yaxes=True, horizontal_spacing=0.06)
    y, y_ends = result.speedup.numpy(), interval_ends(result, "speedup")
    texts = exit_texts(result)
    reached = np.flatnonzero(result.agreement.numpy() >= AGREEMENT)
    chosen = result.lowest_threshold(AGREEMENT)
    mark = None if chosen is None else result.thresholds.index(chosen)
    for col, field in enumerate(fields, start=1):
        x, x_ends = getattr(result, field).numpy(), interval_ends(result, field)
        bars = [
            {} if ends is None else {name: whiskers(values, ends) | {"color": FAINT.format(QUIET)}}
            for name, values, ends in (("error_x", x, x_ends), ("error_y", y, y_ends))
        ]
        written = [f"{t:g}" if col == 1 and any(abs(t - w) < 1e-9 for w in WRITTEN) else "" for t in result.thresholds]
        fig.add_scatter(
            x=x,
            y=y,
            mode="lines+markers+text",
            name="threshold",
            showlegend=False,
            line={"color": BLUE},
            marker={"color": BLUE},
            text=written,
            textposition="bottom left",
            textfont={"size": 11, "color": GREY},
            customdata=texts,
            hovertemplate="%{customdata}<extra></extra>",
            **bars[0],
            **bars[1],
            row=1,
            col=col,
        )
        if mark is not None and len(reached):
            name = f"threshold {result.thresholds[mark]:g}: agreement {AGREEMENT:.0%} or more"
            marker = {"color": ORANGE, "symbol": "diamond", "size": 12}
            hover = {"customdata": [texts[mark]], "hovertemplate": "%{customdata}<extra></extra>"}
            point = {"x": [x[mark]], "y": [y[mark]], "mode": "markers", "marker": marker}
            fig.add_scatter(**point, **hover, name=name, showlegend=col == 1, row=1, col=col)
    fig.update_xaxes(title="Agreement<br>(fraction of positions)", row=1, col=1)
    if len(fields) > 1:
        known = result.perplexity.numpy()[np.isfinite(result.perplexity.numpy())]
        scale = log_axis(float(known.min()), float(known.max())) if known.max() > LOG_FACTOR * known.min() else {}
        fig.update_xaxes(title="Perplexity<br>(lower is better)", **scale, row=1, col=2)
    fig.update_yaxes(title="Speed-up<br>(all blocks / blocks run)", row=1, col=1)
    fig.update_yaxes(rangemode="tozero")
    return described(styled(fig, title), result.provenance)


def exit_texts(result: Any) -> list[str]:
    """The text at each threshold: its agreement, accuracy, perplexity and speed-up, with their intervals.

    Args:
        result: an `ExitCurveResult`.
    """
    texts = [f"threshold {threshold:g}" for threshold in result.thresholds]
    for field in ("agreement", "accuracy", "perplexity", "speedup"):
        values, ends = getattr(result, field).numpy(), interval_ends(result, field)
        margins = [""] * len(values) if ends is None else hover_texts(ends)
        name = "speed-up" if field == "speedup" else field
        texts = [
            f"{text}<br>{name} {value:.4g}{margin}" if np.isfinite(value) else text
            for text, value, margin in zip(texts, values, margins, strict=True)
        ]
    return texts


def exit_heatmap(result: Any, title: str) -> go.Figure:
    """Fraction of positions that exit at each block for each threshold, on colours by the square root; none is white.

    Args:
        result: an `ExitCurveResult`.
        title: of the figure.
    """
    names, rows = result.layers[1:], [f"{threshold:g}" for threshold in result.thresholds]

    def fractions(one: Any) -> Any:
        return one.values / one.values.sum(-1, keepdim=True)

    values, ends = fractions(result).numpy(), interval_ends(result, fractions)
    margins = np.full(values.shape, "") if ends is None else hover_texts(ends)
    # Colours by the square root: one position of a thousand is seen beside the last block's.
    z = np.where(values > 0, np.sqrt(values), np.nan)
    numbers: dict[str, Any] = {}
    if len(names) <= MOST_NUMBERS:
        texts = [[_per_cent(value) for value in row] for row in values.tolist()]
        numbers = {"text": on_cells(texts, z, ColourScale(SEQUENTIAL, 0.0, 1.0)), "texttemplate": "%{text}"}
        numbers |= {"textfont": {"size": 9}}
    hover = [
        [
            f"threshold {row}<br>{name}<br>{value:.4f} of positions{margin}"
            for name, value, margin in zip(names, *pair, strict=True)
        ]
        for row, *pair in zip(rows, values, margins, strict=True)
    ]
    heat = go.Heatmap(
        z=z,
        x=list(range(len(names))),
        y=rows,
        zmin=0.0,
        zmax=1.0,
        colorscale=SEQUENTIAL,
        xgap=1,
        ygap=1,
        colorbar=colour_bar("Positions (fraction; colours by the square root)")
        | {"tickmode": "array", "tickvals": [tick**0.5 for tick in FRACTIONS], "ticktext": [f"{tick:g}" for tick in FRACTIONS]},
        customdata=hover,
        hovertemplate="%{customdata}<extra></extra>",
        **numbers,
    )
    fig = go.Figure(heat)
    layer_axis(fig.update_xaxes, names, axis_title("layer"))
    turn_labels(fig, names)
    fig.update_xaxes(showgrid=False)
    every = {"tickmode": "array", "tickvals": rows, "ticktext": rows} if len(rows) <= MOST_ROWS else {}
    fig.update_yaxes(title=axis_title("threshold"), type="category", showgrid=False, tickfont={"size": 11}, **every)
    note = "numbers: per cent of positions; " if numbers else ""
    height = 130 + ROW * len(rows) if len(rows) <= MOST_ROWS else 130 + ROW * MOST_ROWS
    fig = with_subtitle(styled(fig, title, height=height), f"{note}white: none".capitalize())
    return described(fig, result.provenance)


def _per_cent(value: float) -> str:
    """A fraction in per cent with one decimal; empty for 0 and for an unknown one."""
    if not value > 0:
        return ""
    return "&lt;0.1" if value < 0.0005 else "100" if value == 1 else f"{min(100 * value, 99.9):.1f}"


def saturation_bars(result: Any, title: str) -> go.Figure:
    """Tokens that saturate at each block as bars, and the fraction of tokens that have saturated as a line on a second axis.

    Args:
        result: a `SaturationResult`.
        title: of the figure.
    """
    names = result.layers[1:]
    fig = make_subplots(specs=[[{"secondary_y": True}]])
    x = list(range(len(names)))
    for field, colour, name, digits in (
        ("counts", BLUE, "at this block", ",.0f"),
        ("cumulative", ORANGE, "at this block or before (right axis)", ".4f"),
    ):
        values, ends = getattr(result, field).numpy(), interval_ends(result, field)
        margins = [""] * len(x) if ends is None else hover_texts(ends, digits)
        hover: dict[str, Any] = {"customdata": list(zip(names, margins, strict=True))}
        hover |= {"hovertemplate": f"%{{customdata[0]}}<br>%{{y:{digits}}}%{{customdata[1]}}<extra>{name}</extra>"}
        # Whiskers on bars are dark, so that they are seen inside the bar too.
        bars = {} if ends is None else {"error_y": whiskers(values, ends) | {"color": DARK if field == "counts" else colour}}
        common: dict[str, Any] = {"x": x, "y": values, "name": name, "marker": {"color": colour}, **hover, **bars}
        if field == "counts":
            fig.add_trace(go.Bar(common), secondary_y=False)
        else:
            fig.add_trace(go.Scatter(common | {"mode": "lines+markers", "line": {"color": colour}}), secondary_y=True)
    label_axis(fig, names, "layer")
    fig.update_yaxes(title=result.declared().words, secondary_y=False, rangemode="tozero")
    right = {"range": [0, 1.04], "showgrid": False, "title": "Tokens that have saturated (fraction)", "tickcolor": ORANGE}
    right |= {"tickmode": "array", "tickvals": [0, 0.25, 0.5, 0.75, 1]}
    fig.update_yaxes(secondary_y=True, tickfont={"color": ORANGE}, title_font_color=ORANGE, linecolor=ORANGE, **right)
    return described(styled(fig, title), result.provenance)


def shape_and_norms(result: Any, title: str) -> go.Figure:
    """Distribution of the line-shape score over tokens, beside the norms of the residual stream and of the updates by layer.

    Args:
        result: a `TrajectoryResult`.
        title: of the figure.
    """
    fig = make_subplots(rows=1, cols=2, column_widths=[0.22, 0.78], horizontal_spacing=0.16)
    _add_score(fig, result)
    names = result.layers
    series = (
        (list(range(len(names))), names, "norm_quantiles", "residual stream", BLUE),
        (list(range(1, len(names))), names[1:], "update_norm_quantiles", "update of the block", ORANGE),
    )
    for x, own, field, name, colour in series:
        values = getattr(result, field).numpy()
        add_fan(fig, x, (result.quantiles, own), values, interval_ends(result, field), colour, name, row=1, col=2)
    both = np.concatenate([result.norm_quantiles.numpy().ravel(), result.update_norm_quantiles.numpy().ravel()])
    known = both[np.isfinite(both)]
    wide = bool(len(known)) and bool(known.min() > 0) and bool(known.max() > LOG_FACTOR * known.min())
    scale = log_axis(float(known.min()), float(known.max())) if wide else {"rangemode": "tozero"}
    label_axis(fig, names, "residual")
    fig.update_xaxes(title=None, tickmode="array", tickvals=[0], ticktext=["all layers"], row=1, col=1, tickangle=0)
    fig.update_yaxes(title="Norm", **scale, row=1, col=2)
    fig = with_subtitle(styled(fig, title, height=HEIGHT), _quantile_key(result.quantiles, bool(len(result.prompt_lss))))
    return described(fig, result.provenance)


def _quantile_key(levels: tuple[float, ...], rows: bool) -> str:
    """What the bars, bands, lines and points of `shape_and_norms` stand for."""
    pairs = [f"{100 * levels[n]:g} to {100 * levels[-1 - n]:g} %" for n in range(len(levels) // 2)]
    if len(pairs) == 2:
        pairs = [f"{pairs[0]} (thin, light)", f"{pairs[1]} (thick, dark)"]
    middle = min(levels, key=lambda level: abs(level - 0.5))
    median = "median" if middle == 0.5 else f"{middle:.0%} of tokens below"
    parts = [f"Bars and bands: {' and '.join(pairs)} of tokens"] * bool(pairs) + [f"diamond and lines: {median}"]
    text = "; ".join(parts + ["points: means of rows of the data"] * rows)
    return text[0].upper() + text[1:]


def _add_score(fig: go.Figure, result: Any) -> None:
    """The quantiles of the line-shape score as nested bars around the median, the mean of each row as faint points."""
    levels, values = result.quantiles, result.lss_quantiles.numpy()
    middle = min(range(len(levels)), key=lambda n: abs(levels[n] - 0.5))
    text = "<br>".join(f"{level:.0%} of tokens below {value:.3f}" for level, value in zip(levels, values, strict=True))
    text = f"mean {float(result.lss_mean):.3f}<br>{text}"
    place = {"showlegend": False, "row": 1, "col": 1}
    for n in range(len(levels) // 2):
        line = {"color": BLUE, "width": 3 + 9 * n}
        ends = [values[n], values[len(levels) - 1 - n]]
        fig.add_scatter(x=[0, 0], y=ends, mode="lines", line=line, hoverinfo="skip", opacity=0.4 + 0.3 * min(n, 2), **place)
    rows = result.prompt_lss.numpy()
    if len(rows):
        # Spread along the axis by the golden ratio, which leaves no gaps and needs no random numbers.
        beside = 0.25 + 0.35 * ((np.arange(len(rows)) * 0.6180339887) % 1)
        hover = {
            "customdata": list(result.prompt_rows),
            "hovertemplate": "mean of row %{customdata}<br>%{y:.3f}<extra></extra>",
        }
        marker = {"color": FAINT.format(0.35), "size": 5}
        fig.add_scatter(x=beside, y=rows, mode="markers", marker=marker, **hover, **place)
    marker = {"color": "white", "size": 9, "symbol": "diamond", "line": {"color": DARK, "width": 1.5}}
    own = interval_ends(result, "lss_quantiles")
    bar = {} if own is None else {"error_y": whiskers(values[[middle]], Ends(own.low[[middle]], own.high[[middle]]))}
    hover = {"customdata": [text], "hovertemplate": "%{customdata}<extra></extra>"}
    fig.add_scatter(x=[0], y=values[[middle]], mode="markers", marker=marker, **bar, **hover, **place)
    fig.update_xaxes(range=[-0.5, 0.8], showgrid=False, row=1, col=1)
    fig.update_yaxes(title=f"{result.declared('lss_quantiles').words} (1: straight)", row=1, col=1)
