"""`plot`: figure of a labelled table; `plot_adjacency`: graph of coupled blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from ..analyzers.block_coupling import BlockCouplingResult
from ..core.arguments import PositiveFloat, typed
from ..core.errors import LayersimError
from ..core.report_tables import LAYER_AXES
from ..core.wording import with_article

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
else:
    # plotly is imported when a figure is made; a type check of each call would import it first.
    Figure = Any


@typed
def plot(
    table: Any,
    field: str | None = None,
    *,
    over: str | Sequence[str] | None = None,
    width: Literal["column", "text"] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw a labelled table: lines with bands, a heat map, or matrices side by side.

    A field over one dimension is a line; over two, a line for each label of one over the other; over two dimensions of layers,
    a matrix; over runs and two dimensions of layers, a matrix for each run, with one colour scale. Select a label of each
    further dimension first, such as `table.sel(quantile=0.5)`.

    Numbers that span two decades or more get a logarithmic axis, with 0 at its left end. Runs with different sites are drawn
    over relative depth. Up to three lines have bands: 95 % intervals, from `x_low` and `x_high` of the table. With more lines,
    the intervals are in the hover texts.

    Args:
        table: table of one analyzer, from `stack` or `to_xarray`; or a variable of it, which has no intervals. The tables of
            `difference` and `exponential_fit` have figures of their own.
        field: name of a variable of the table; None for the first one, `values` of a result.
        over: the horizontal dimension of lines; or the horizontal and the vertical dimension of a heat map. None takes, for
            lines, numbers such as training steps if there are any, else layers.
        width: "column" (3.25 in) or "text" (6.75 in) for the size and the letters of a paper; None for the screen.
        title: title of the figure; by default the quantity in words, "" for none.

    Returns:
        A plotly figure.

    Raises:
        LayersimError: the table has no such field or dimension, or the field has too many dimensions.

    Source:
        Aubry et al. 2025 (arXiv 2407.07810), figure 1 b, coupling over training, and figure 25, line-shape score over training.

    Examples:
        >>> import tl_layersim as lsim
        >>> models = {"standard": lsim.demo_model(), "aligned": lsim.demo_model(aligned=True)}
        >>> found = lsim.stack(lsim.sweep(models, lsim.demo_text()[:4], [lsim.LogitLens(), lsim.CKA()]))
        >>> figure = lsim.plot(found["logit_lens"], "accuracy")
        >>> [line.name for line in figure.data], figure.layout.yaxis.title.text
        (['standard', 'aligned'], 'Accuracy (fraction)')
        >>> [matrix.type for matrix in lsim.plot(found["cka"]).data]
        ['heatmap', 'heatmap']
    """
    import xarray

    from ..reporting.difference_and_fit_figures import difference_figure, fit_figure
    from ..reporting.figures import panels
    from ..reporting.many_model_figures import group_figure, line_plot, map_of_two, matrices
    from ..reporting.style import with_size

    if isinstance(table, xarray.DataTree):
        if table.children:
            raise LayersimError(
                f"`table` holds all results of a report; pass the table of one result: {', '.join(map(repr, table.children))}."
            )
        table = table.to_dataset()
    if isinstance(table, xarray.DataArray):
        field = str(table.name or "value")
        table = table.to_dataset(name=field)
    elif not isinstance(table, xarray.Dataset):
        raise LayersimError(
            f"`table` is {with_article(type(table).__name__)}; it must be a table of `to_xarray` or `stack`, or a variable of "
            "such a table."
        )
    elif field is None and {"amplitude", "rate"} <= set(table.data_vars):
        return with_size(fit_figure(table), width, title)
    elif field is None and "first_group" in table.coords:
        return with_size(group_figure(table), width, title)
    field = next(iter(map(str, table.data_vars)), "") if field is None else field
    if field not in table.data_vars:
        raise LayersimError(f"`field` is {field!r}; the table has {', '.join(map(str, table.data_vars))}.")
    if "statistic" in table[field].dims:
        return with_size(difference_figure(table[field]), width, title)
    parts = {"value": field, "low": f"{field}_low", "high": f"{field}_high"}
    drawn = xarray.Dataset({part: table[name] for part, name in parts.items() if name in table}, attrs=table.attrs)
    dims = [str(dim) for dim in table[field].dims]
    drawn = drawn.sortby([dim for dim in dims if drawn[dim].dtype.kind in "iuf"])
    sites = [dim for dim in dims if dim in LAYER_AXES or f"{dim}_depth" in drawn.coords]
    further = [dim for dim in dims if dim not in sites]
    if over is None:
        if len(sites) == 2 and len(further) == 1:
            figures, quantity = matrices(drawn, (sites[0], sites[1]), further[0])
            if title is None:
                title = "" if width else quantity
            return panels(figures, width, title)
        if len(sites) == 2:
            over = (sites[1], sites[0])
        else:
            numeric = [dim for dim in further if drawn[dim].dtype.kind in "iuf"]
            over = next(iter([*numeric, *sites, *further]), "")
    chosen = [over] if isinstance(over, str) else list(over)
    if len(dims) not in (1, 2):
        raise LayersimError(
            f"`field` is {field!r} over {', '.join(dims) or 'no dimension'}; a figure has one or two dimensions, or a matrix "
            "for each run. Select a label of each further dimension, as in table.sel(quantile=0.5)."
        )
    if not chosen or len(set(chosen) & set(dims)) < len(chosen):
        raise LayersimError(f"`over` is {over!r}; it must be one or two of the dimensions of {field!r}: {', '.join(dims)}.")
    if len(chosen) == 2:
        return with_size(map_of_two(drawn, (chosen[0], chosen[1]), sites), width, title)
    return with_size(line_plot(drawn, chosen[0], sites), width, title)


@typed
def plot_adjacency(
    result: BlockCouplingResult,
    *,
    beyond_chance: bool = True,
    strongest: PositiveFloat | None = None,
    width: Literal["column", "text"] | None = None,
    title: str = "Coupling of blocks",
) -> Figure:
    """Draw blocks on a circle, with darker edges between more strongly coupled blocks.

    The strength of an edge is the mean of both directions.

    Args:
        result: result of `BlockCoupling` with `normalize=True`.
        beyond_chance: whether the strength goes from 0 at the null to 1 at full coupling. If False, the strength is the
            coupling itself, as in the paper.
        strongest: coupling at which an edge is darkest, for figures that are compared. Default: the strongest edge of this
            figure.
        width: as in `Result.plot`.
        title: title of the figure; "" for none.

    Returns:
        A plotly figure.

    Source:
        Aubry et al. 2025 (arXiv 2407.07810), figure 1 c to e.
    """
    from ..reporting.lines_and_bars import interval_ends
    from ..reporting.network import block_network
    from ..reporting.style import with_provenance, with_size

    if not result.normalize:
        raise LayersimError("`result` has normalize=False; `plot_adjacency` needs a result of BlockCoupling(normalize=True).")

    def strength_of(measured: Any) -> Tensor:
        """Mean coupling of both directions (`layer layer`) from 0 to 1."""
        coupling = measured.coupling
        if beyond_chance:
            coupling = (measured.null - measured.values) / measured.null.clamp(min=1e-9)
        # A block has no edge to itself.
        mean: Tensor = (coupling + coupling.T) / 2
        return mean.nan_to_num(0.0).clamp(0.0, 1.0).fill_diagonal_(0.0)

    strength = strength_of(result)
    full = float(strength.max()) if strongest is None else strongest
    ends = interval_ends(result, strength_of)
    fig = block_network(strength.numpy(), full, result.layers[1:], title, ends)
    return with_size(with_provenance(fig, result.provenance), width, title)
