"""`plot_adjacency`: the graph of the coupled blocks of one model, for figures that are compared between models."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from ..analyzers.block_coupling import BlockCouplingResult
from ..core.arguments import PositiveFloat, typed
from ..core.errors import LayersimError

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from ..reporting.interval_bands import Ends
else:
    # plotly is imported when a figure is made: a check of the type at every call would import it first.
    Figure = Any

# Edges of a similar strength are drawn as one trace: plotly is slow with thousands of traces.
LEVELS = 20
NAME_ONLY = "%{customdata}<extra></extra>"


@typed
def plot_adjacency(
    result: BlockCouplingResult,
    *,
    beyond_chance: bool = True,
    strongest: PositiveFloat | None = None,
    width: Literal["column", "text"] | None = None,
    title: str = "Coupling of blocks",
) -> Figure:
    """Draw blocks on a circle; the edge between two blocks is darker the more they are coupled.

    The strength of an edge is the mean of both directions.

    Args:
        result: result of `BlockCoupling` with `normalize=True`.
        beyond_chance: whether the strength goes from 0 at the null to 1 at full coupling. If not, it is the coupling itself, as
            in the paper.
        strongest: coupling at which an edge is darkest, for figures that are compared. Default: the strongest edge of this
            figure.
        width: as in `Result.plot`.
        title: title of the figure; "" for none.

    Returns:
        A plotly figure.

    Source:
        Aubry et al. 2025 (arXiv 2407.07810), figure 1 c to e.
    """
    from ..reporting.interval_bands import interval_ends
    from ..reporting.style import with_provenance, with_size

    if not result.normalize:
        raise LayersimError(
            "`result` has normalize=False; its couplings must be normalised, those of BlockCoupling(normalize=True)."
        )
    strength_of = partial(_strength, beyond_chance=beyond_chance)
    strength = strength_of(result)
    full = float(strength.max()) if strongest is None else strongest
    ends = interval_ends(result, strength_of)
    fig = _network(strength.numpy(), full, result.layers[1:], title, ends)
    return with_size(with_provenance(fig, result.provenance), width, title)


def _strength(result: BlockCouplingResult, beyond_chance: bool) -> Tensor:
    """Coupling of every two blocks, `layer layer`: mean of both directions, 0 to 1."""
    strength = (result.null - result.values) / result.null.clamp(min=1e-9) if beyond_chance else result.coupling
    # A block has no edge to itself.
    return ((strength + strength.T) / 2).nan_to_num(0.0).clamp(0.0, 1.0).fill_diagonal_(0.0)


def _network(strength: Any, strongest: float, names: tuple[str, ...], title: str, ends: Ends | None = None) -> Figure:
    """Network of blocks on a circle; an edge is darker if the coupling of its blocks is stronger.

    Args:
        strength: couplings `layer layer`, symmetric; 0 for no edge.
        strongest: strength of the darkest colour.
        names: names of the blocks.
        title: title of the figure.
        ends: ends of the confidence intervals of the strengths; None without intervals.
    """
    import plotly.graph_objects as go
    from plotly.colors import sample_colorscale

    from ..reporting.interval_bands import hover_texts
    from ..reporting.site_labels import short_names
    from ..reporting.style import DARK, colour_bar, styled, with_subtitle

    def edge_colour(level: float) -> str:
        """The colour of an edge on white, from nearly white to dark blue."""
        return str(sample_colorscale("Blues", [0.08 + 0.92 * level])[0])

    texts = np.full(strength.shape, "", dtype=object) if ends is None else hover_texts(ends, ".3f")
    blocks = len(names)
    angle = np.pi / 2 - 2 * np.pi * np.arange(blocks) / blocks
    x, y = np.cos(angle), np.sin(angle)
    fig = go.Figure()
    opacity = np.clip(strength / max(strongest, 1e-12), 0, 1)
    # Weak edges first, below the strong ones.
    for level in range(1, LEVELS + 1):
        pairs = [(a, b) for a in range(blocks) for b in range(a) if int(np.ceil(LEVELS * opacity[a, b])) == level]
        if pairs:
            xs = [v for a, b in pairs for v in (x[a], x[b], None)]
            ys = [v for a, b in pairs for v in (y[a], y[b], None)]
            line = {"color": edge_colour(level / LEVELS), "width": 0.5 + 4.5 * level / LEVELS}
            fig.add_scatter(x=xs, y=ys, mode="lines", line=line, hoverinfo="skip")
    middle = [
        ((x[a] + x[b]) / 2, (y[a] + y[b]) / 2, names[a], names[b], strength[a, b], texts[a, b])
        for a in range(blocks)
        for b in range(a)
    ]
    scale = [[n / 10, edge_colour(n / 10)] for n in range(11)]
    bar = colour_bar("Coupling beyond chance (1: full)") | {"thickness": 16, "outlinewidth": 0}
    colours = {"colorscale": scale, "cmin": 0.0, "cmax": strongest if strongest > 0 else 1.0, "colorbar": bar}
    fig.add_scatter(
        x=[edge[0] for edge in middle],
        y=[edge[1] for edge in middle],
        mode="markers",
        # Invisible points that show the text of their edge, and bring the colour bar.
        marker={"size": 9, "opacity": 0, "color": [edge[4] for edge in middle], "showscale": True, **colours},
        customdata=[edge[2:] for edge in middle],
        hovertemplate="%{customdata[0]}<br>%{customdata[1]}<br>"
        "%{customdata[2]:.3f}%{customdata[3]} beyond chance<extra></extra>",
    )
    fig.add_scatter(
        x=x, y=y, mode="markers", marker={"size": 8, "color": DARK}, customdata=list(names), hovertemplate=NAME_ONLY
    )
    fig.add_scatter(
        x=1.1 * x,
        y=1.1 * y,
        mode="text",
        text=short_names(names),
        textfont={"size": 13},
        customdata=list(names),
        hovertemplate=NAME_ONLY,
    )
    fig.update_layout(showlegend=False)
    fig.update_xaxes(visible=False, range=[-1.2, 1.2], constrain="domain")
    fig.update_yaxes(visible=False, range=[-1.2, 1.2], scaleanchor="x", constrain="domain")
    note = "Blocks clockwise from the top; an edge is the coupling of two blocks beyond that of random vectors"
    return with_subtitle(styled(fig, title, height=520).update_layout(margin_l=16, margin_b=16), note)
