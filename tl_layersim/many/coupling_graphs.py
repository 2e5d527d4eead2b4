"""`plot_adjacency`: the graph of the coupled blocks of one model, for figures that are compared between models."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from ..analyzers.block_coupling import BlockCouplingResult
from ..core.arguments import PositiveFloat, typed
from ..core.errors import LayersimError

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
else:
    # plotly is imported when a figure is made: a check of the type at every call would import it first.
    Figure = Any


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
    from ..reporting.network import coupling_network
    from ..reporting.style import with_provenance, with_size

    if not result.normalize:
        raise LayersimError(
            "`result` has normalize=False; its couplings must be normalised, those of BlockCoupling(normalize=True)."
        )
    strength_of = partial(_strength, beyond_chance=beyond_chance)
    strength = strength_of(result)
    full = float(strength.max()) if strongest is None else strongest
    ends = interval_ends(result, strength_of)
    fig = coupling_network(strength.numpy(), full, result.layers[1:], title, ends)
    return with_size(with_provenance(fig, result.provenance), width, title)


def _strength(result: BlockCouplingResult, beyond_chance: bool) -> Tensor:
    """Coupling of every two blocks, `layer layer`: mean of both directions, 0 to 1."""
    strength = (result.null - result.values) / result.null.clamp(min=1e-9) if beyond_chance else result.coupling
    # A block has no edge to itself.
    return ((strength + strength.T) / 2).nan_to_num(0.0).clamp(0.0, 1.0).fill_diagonal_(0.0)
