"""Similarities or penalties within and between groups of models, layer by layer: where do the groups part?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float64
from torch import Tensor

from ..core.argument_checks import typed
from ..core.intervals import headline_lines, with_replicates
from ..core.results import Result, axes
from ..core.wording import headed
from .model_groups import have_directions, pairs_by_groups

if TYPE_CHECKING:
    import plotly.graph_objects


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GroupCurves(Result):
    """A value of each pair of models, layer by layer, as means within each group and between each two groups.

    Tensors are float64.

    Attributes:
        values: `comparison site`, mean over pairs of different models.
        sd: `comparison site`, standard deviation over pairs, divided by their number less 1; NaN for one pair.
        comparisons: labels: of each group of two or more models, then of each two groups, in both directions where the values
            depend on the direction.
        sites: the layers, by the names of the first model, or the stitch points.
        groups: the group of each model.
        quantity: the value in words, with its unit.
    """

    file_kind: ClassVar[str] = "group_curves"
    values_name = "mean"
    values: Float64[Tensor, "comparison site"] = axes(
        "comparison",
        "site",
        label="Mean over pairs of models",
        title="Groups of models by layer",
        caption="Means over pairs of models of one group and of two groups, with standard deviations as bands. Where they "
        "part, the groups differ (Brown et al. 2023, figure 2). Whiskers, where data was measured in blocks, are intervals "
        "of the means.",
    )
    sd: Float64[Tensor, "comparison site"] = axes(
        "comparison",
        "site",
        label="Standard deviation over pairs of models",
        title="Spread over pairs of models at each layer",
        within=(0, math.inf),
    )
    comparisons: tuple[str, ...]
    sites: tuple[str, ...]
    groups: tuple[str, ...]
    quantity: str

    @typed
    def plot(self, field: str = "mean") -> plotly.graph_objects.Figure:
        """Lines by layer with bands of one standard deviation, and intervals as whiskers; or another field as of any result."""
        from ..reporting.interval_bands import interval_ends
        from ..reporting.models import group_lines
        from ..reporting.style import described

        if field not in ("mean", "values"):
            return super().plot(field)
        ends = interval_ends(self, "mean")
        fig = group_lines(self.values.numpy(), self.sd.numpy(), self.comparisons, self.sites, self.quantity, ends)
        return described(fig, self.provenance)

    def headline(self) -> dict[str, float]:
        inside = torch.tensor([name.startswith("within ") for name in self.comparisons])
        apart = (self.values[inside].mean(0) - self.values[~inside].mean(0)).abs()
        # Of sites where the value is defined.
        most = int(apart.nan_to_num(-1.0).argmax())
        return {f"largest difference of means within and between groups, at {self.sites[most]}": float(apart[most])}

    def __repr__(self) -> str:
        title = f"GroupCurves({', '.join(dict.fromkeys(self.groups))}; {self.quantity}, {len(self.sites)} layers)"
        return headed(title, [f"  {line}" for line in headline_lines(self)])


def group_curves(
    matrix: Result, values_of: Callable[[Any], Tensor], labels: tuple[str, ...], sites: Sequence[str], quantity: str
) -> GroupCurves:
    """Means and standard deviations by layer within and between groups, with intervals where the matrix has them.

    Args:
        matrix: the result that holds the values.
        values_of: takes such a result and returns its values, `model model site`.
        labels: the group of each model.
        sites: names of the layers.
        quantity: the value in words, with its unit.
    """
    pairs = pairs_by_groups(labels, have_directions(values_of(matrix)))

    def curves(one: Any) -> GroupCurves:
        values = values_of(one)
        each = [values[tuple(index)] for index in pairs.values()]
        return GroupCurves(
            values=torch.stack([own.mean(0) for own in each]),
            sd=torch.stack([own.std(0) if len(own) > 1 else torch.full_like(own[0], math.nan) for own in each]),
            comparisons=tuple(pairs),
            sites=tuple(sites),
            groups=labels,
            quantity=quantity,
            layers=(),
            provenance=one.provenance,
        )

    found: GroupCurves = with_replicates(curves(matrix), tuple(map(curves, matrix.replicates)), matrix.block_tokens)
    return found
