"""Figures of coupled Jacobians on one prompt: their matrices as tiles, and their coupling as a heatmap."""

from __future__ import annotations

import html
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from .colour_scales import ColourScale, cell_numbers, end_above, narrow_scale
from .interval_bands import cell_hover
from .matrix import square_cells
from .site_labels import parse_site, short_names
from .style import SEQUENTIAL, colour_bar, styled, with_subtitle
from .tokens import visible_token

# Most ticks along an axis of tiles, and most letters of a token in them.
MOST_TILES, LETTERS = 16, 9


class ConnectionLabels(NamedTuple):
    """Labels of the connections of one prompt.

    Attributes:
        ticks: of each connection, what differs among them: its block, its token or tokens.
        full: block and tokens of each connection in words, as markup.
        common: what is the same in all connections, in words.
        kind: what the ticks are: "block", "token", "tokens", or "block and token".
    """

    ticks: list[str]
    full: list[str]
    common: str
    kind: str


def jacobian_labels(blocks: tuple[str, ...], pairs: tuple[str, ...]) -> list[str]:
    """Names of Jacobians in a legend, pair by pair of each block.

    Args:
        blocks: names of the layers.
        pairs: "t_in > t_out" of each pair.

    Examples:
        >>> jacobian_labels(("blocks.3.hook_resid_post",), ("2 > 5", "7 > 7"))
        ['block 3, token 2 on 5', 'block 3, token 7 on itself']
    """
    words = []
    for pair in pairs:
        start, end = pair.split(" > ")
        words.append(f"token {start} on {'itself' if start == end else end}")
    kind = "module" if any(parse_site(block) is None for block in blocks) else "block"
    return [html.escape(f"{kind} {block}, {pair}") for block in short_names(blocks) for pair in words]


def connection_labels(connections: tuple[str, ...], tokens: tuple[str, ...]) -> ConnectionLabels:
    """Labels of connections.

    Args:
        connections: "block: t_in > t_out" of each.
        tokens: of the prompt, as text.

    Examples:
        >>> labels = connection_labels(("0: 1 > 1", "1: 1 > 1"), ("Once", " upon"))
        >>> labels.ticks, labels.common
        (['0', '1'], 'token 1 "·upon" on itself')
    """
    parts = [_parts(connection) for connection in connections]
    blocks, t_in, t_out = (len(set(column)) > 1 for column in zip(*parts, strict=True))
    words = [f"{n} {visible_token(token, LETTERS)}" for n, token in enumerate(tokens)]
    quoted = [f'token {n} "{visible_token(token)}"' for n, token in enumerate(tokens)]
    itself = all(start == end for _, start, end in parts)
    ticks, full = [], []
    for block, start, end in parts:
        of_tokens = words[start] if itself else f"{start} > {end}" if t_in and t_out else words[end if t_out else start]
        varied = [str(block)] if blocks else []
        ticks.append(": ".join(varied + ([of_tokens] if t_in or t_out or not blocks else [])))
        text = f"block {block}, {quoted[start]}" + (" on itself" if start == end else f" on {quoted[end]}")
        full.append(html.escape(text, quote=False))
    block, start, end = parts[0]
    common = [] if blocks else [f"block {block}"]
    if itself:
        common.append("each token on itself" if t_in else f"{quoted[start]} on itself")
    elif not (t_in and t_out):
        common.append(f"effect of {quoted[start]} on later tokens" if t_out else f"effect of earlier tokens on {quoted[end]}")
    of_tokens = ("tokens" if t_in and t_out and not itself else "token") if t_in or t_out or not blocks else ""
    return ConnectionLabels(ticks, full, ", ".join(common), " and ".join(filter(None, ["block" * blocks, of_tokens])))


def matrix_tiles(matrices: Any, labels: ConnectionLabels, title: str, note: str) -> go.Figure:
    """Small matrices side by side, with gaps between, on one colour scale.

    Row l and column l' is the Jacobian of connection l between the singular vectors of connection l', divided by the largest
    singular value of l. The colours end near the largest entry of l' other than l: a Jacobian in its own basis is diagonal.

    Args:
        matrices: `row column left right`, absolute values.
        labels: of rows and columns.
        title: of the figure.
        note: below it.
    """
    count, _, k, _ = matrices.shape
    own = np.arange(count)
    gain = matrices[own, own].max(axis=(1, 2))[:, None, None, None]
    shares = matrices / np.maximum(gain, 1e-300)
    others = shares[~np.eye(count, dtype=bool)]
    scale = ColourScale(SEQUENTIAL, 0.0, min(1.0, end_above(float(np.nanmax(others)))) if np.isfinite(others).any() else 1.0)
    if scale.high < 1:
        note += f"; highest colour: {scale.high:g} or more"
    padded = np.full((count, count, k + 1, k + 1), np.nan)
    padded[:, :, :k, :k] = shares
    size = count * (k + 1) - 1
    # A category for each entry, whose name is the text at the pointer: a text for each cell would be far larger.
    rows = [f"{name}: U {n + 1}" if n < k else " " * (m + 1) for m, name in enumerate(labels.full) for n in range(k + 1)]
    columns = [f"{name}: V {n + 1}" if n < k else " " * (m + 1) for m, name in enumerate(labels.full) for n in range(k + 1)]
    fig = go.Figure(
        go.Heatmap(
            z=padded.transpose(0, 2, 1, 3).reshape(size + 1, size + 1)[:size, :size],
            x=columns[:size],
            y=rows[:size],
            colorbar=colour_bar("|entry| / largest singular value of the row"),
            hoverongaps=False,
            hovertemplate="Jacobian of %{y}<br>singular vectors of %{x}<br>"
            "|entry| / largest singular value: %{z:.3f}<extra></extra>",
            **scale.trace(),
        )
    )
    step = max(1, -(-count // MOST_TILES))
    middle = [m * (k + 1) + (k - 1) // 2 for m in range(count)][::step]
    ticks = [html.escape(tick, quote=False) for tick in labels.ticks[::step]]
    turned = {"tickangle": -90} if max(map(len, ticks)) > 3 and len(ticks) > 5 else {"tickangle": 0}
    titles = _titles(labels.kind)
    fig.update_yaxes(title=titles[0], tickmode="array", tickvals=[rows[at] for at in middle], ticktext=ticks)
    fig.update_xaxes(title=titles[1], tickmode="array", tickvals=[columns[at] for at in middle], ticktext=ticks, **turned)
    height = square_cells(fig, ticks, ticks)
    return with_subtitle(
        with_subtitle(styled(fig, title, height=height), html.escape(labels.common, quote=False)),
        html.escape(note, quote=False),
    )


def connection_heatmap(values: Any, labels: ConnectionLabels, title: str, quantity: str) -> go.Figure:
    """Heatmap of one number of each two connections; a connection with itself is left out.

    Args:
        values: `connection other`.
        labels: of rows and columns.
        title: of the figure.
        quantity: title of the colour bar.
    """
    shown = np.where(np.eye(len(values), dtype=bool), np.nan, values) if len(values) > 1 else values
    scale = narrow_scale(shown)
    places = list(range(len(values)))
    hover = cell_hover(
        labels.full, labels.full, None, html.escape(quantity, quote=False), ("Jacobian of", "singular vectors of")
    )
    fig = go.Figure(
        go.Heatmap(
            z=shown, x=places, y=places, colorbar=colour_bar(quantity), **scale.trace(), **cell_numbers(shown, scale), **hover
        )
    )
    step = max(1, -(-len(places) // MOST_TILES))
    ticks = {
        "tickmode": "array",
        "tickvals": places[::step],
        "ticktext": [html.escape(tick, quote=False) for tick in labels.ticks[::step]],
    }
    titles = _titles(labels.kind)
    fig.update_yaxes(title=titles[0], **ticks)
    fig.update_xaxes(title=titles[1], tickangle=-90 if max(map(len, labels.ticks)) > 3 else 0, **ticks)
    height = square_cells(fig, labels.ticks, labels.ticks)
    left_out = " A connection with itself is left out." if len(values) > 1 else ""
    return with_subtitle(
        styled(fig, title, height=height), html.escape(f"{labels.common}.{left_out}".lstrip(".").strip(), quote=False)
    )


def _titles(kind: str) -> tuple[str, str]:
    """Titles of rows and columns."""
    if kind == "block":
        return "Jacobian of block l", "Singular vectors of block l'"
    return f"Jacobian at {kind}", f"Singular vectors at {kind}"


def _parts(connection: str) -> tuple[int, int, int]:
    """Block, varied token and read token of "block: t_in > t_out"."""
    block, _, ends = connection.partition(": ")
    start, _, end = ends.partition(" > ")
    return int(block), int(start), int(end)
