"""Matrices of models by models: clustering, groups of models, and their figures."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float64
from torch import Tensor

from ..core.argument_checks import typed
from ..core.bounds import PositiveInt
from ..core.errors import LayersimError
from ..core.intervals import headline_lines
from ..core.results import Result, axes
from ..core.wording import headed
from .model_groups import GroupComparison, chosen_groups, compare_groups

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ModelMatrix(Result):
    """A distance for each pair of some models.

    Attributes:
        values: `row_model column_model`, float64; larger for models that differ more. It may depend on the order of the two.
        models: names of the models.
        groups: the group of each model; empty where no groups were given.
        quantity: the distance in words, with its unit.
    """

    file_kind: ClassVar[str] = "model_matrix"
    values_name = "distance"
    values: Float64[Tensor, "row_model column_model"] = axes("row_model", "column_model", label="Distance")
    models: tuple[str, ...]
    groups: tuple[str, ...]
    quantity: str

    @property
    def row_models(self) -> tuple[str, ...]:
        """Names of the models."""
        return self.models

    @property
    def column_models(self) -> tuple[str, ...]:
        """Names of the models."""
        return self.models

    def clusters(self) -> Any:
        """The hierarchical clustering of the models, `merge 4`, as `scipy.cluster.hierarchy.linkage` returns it.

        Average linkage on the mean of both directions. A direction below 0, such as a penalty of a stitch that gains, is taken
        as 0 before the mean: else penalties of +0.01 and -0.01 would make two models equal. The order of leaves puts similar
        models side by side.

        Raises:
            LayersimError: a distance is not a finite number.
        """
        from scipy.cluster.hierarchy import linkage

        self._check_distances()
        return linkage(self._both_directions().numpy(), method="average", optimal_ordering=True)

    @property
    def order(self) -> tuple[int, ...]:
        """Numbers of the models in the order of the dendrogram; as given where a distance is not finite."""
        from scipy.cluster.hierarchy import leaves_list

        if self._undefined():
            return tuple(range(len(self.models)))
        return tuple(leaves_list(self.clusters()).tolist())

    @typed
    def compare_groups(self, groups: Any = None, *, relabelings: PositiveInt = 100_000, seed: int = 0) -> GroupComparison:
        """Distances within and between groups of models, and a permutation test of their difference.

        Args:
            groups: a mapping from names of models to groups, or a list in the order of the models. Default: the groups that the
                models were compared with.
            relabelings: the largest number of relabelings. All are evaluated where there are at most so many: two groups of ten
                models have 92,378. Else so many random ones are drawn.
            seed: of random relabelings.

        Returns:
            A `GroupComparison`: means, standard deviations and numbers of pairs, the p-value with the number of relabelings and
            the smallest p-value that is possible, a figure.

        Raises:
            LayersimError: groups do not fit the models, or a distance is not defined.

        Source:
            Brown et al. 2023 (arXiv 2310.14993), section 4, appendix B, figure 8.
        """
        labels = chosen_groups(groups, self.groups, self.models)
        self._check_distances()
        return compare_groups(self, labels, (self.models, self.quantity), relabelings, seed)

    @typed
    def to_frame(self, field: str = "values") -> pandas.DataFrame:
        """A tidy table with one line for each pair, with their groups; or of `"groups"` or the merges of `"dendrogram"`."""
        import pandas

        if field == "groups":
            return self.compare_groups().to_frame() if self.groups and not self._undefined() else pandas.DataFrame()
        if field == "dendrogram":
            merges = [] if self._undefined() else self.clusters()
            return pandas.DataFrame(merges, columns=["first", "second", "distance", "models"])
        table = super().to_frame(field)
        for side in ("column", "row") if self.groups else ():
            group_of = dict(zip(self.models, self.groups, strict=True))
            table.insert(2, f"{side}_group", table[f"{side}_model"].map(group_of))
        return table

    @typed
    def plot(self, field: str = "values") -> plotly.graph_objects.Figure:
        """A heat map of the models in the order of the dendrogram, the `"dendrogram"`, or `"groups"`, their comparison."""
        from ..reporting import models
        from ..reporting.interval_bands import interval_ends
        from ..reporting.style import described, with_subtitle

        if field == "groups":
            return with_subtitle(self.compare_groups().plot(), html.escape(self.about()))
        field = self.values_name if field == "values" else field
        title = {picture.field: picture.title for picture in self.pictures}.get(field, self.quantity)
        if field == "dendrogram":
            tree = models.dendrogram(self.clusters(), self.models, self.groups, title, self.quantity)
            below = "directions below 0 count as 0" if bool((self.values < -models.OWN_DISTANCE).any()) else ""
            about = "; ".join(filter(None, (self.about(), below)))
            return described(with_subtitle(tree, html.escape(about)), self.provenance)
        if field != self.values_name:
            return super().plot(field)
        order = list(self.order)
        names, groups = ([names[n] for n in order] if names else [] for names in (self.models, self.groups))
        ends = interval_ends(self, lambda one: one.values[order][:, order])
        values = self.values[order][:, order].numpy()
        heat = models.model_heatmap(values, names, groups, title, self.quantity, self.sides(), ends)
        return described(with_subtitle(heat, html.escape(self.about())), self.provenance)

    def about(self) -> str:
        """How the distances were measured, for the line below the title of a figure; empty where the title says all."""
        return ""

    def sides(self) -> tuple[str, str]:
        """Titles of the rows and of the columns in a figure."""
        return "Model", "Model"

    def headline(self) -> dict[str, float]:
        different = ~torch.eye(len(self.models), dtype=torch.bool)
        values = self.values[different]
        return {"smallest distance of two models": float(values.min()), "largest": float(values.max())}

    def __repr__(self) -> str:
        title = f"{type(self).__name__}({', '.join(self.models)}; {self.provenance.tokens} tokens)"
        return headed(title, [f"  {line}" for line in headline_lines(self)])

    def _undefined(self) -> list[tuple[str, str]]:
        """The pairs of different models whose distance is not a finite number."""
        return [(self.models[a], self.models[b]) for a, b in (~self.values.isfinite()).nonzero().tolist() if a != b]

    def _check_distances(self) -> None:
        """Raises if the distance of different models is not a finite number."""
        if undefined := self._undefined():
            pairs = ", ".join(f"{a} and {b}" for a, b in undefined[:3])
            raise LayersimError(
                f"The distance is not a finite number for {pairs}. Leave these models out, or sites at which the measure is "
                "not defined, such as the embedding."
            )

    def _both_directions(self) -> Tensor:
        """Mean over both directions of each pair, each at least 0, `pair`, in the order of scipy's condensed matrices."""
        rows, columns = torch.triu_indices(len(self.models), len(self.models), 1)
        above = self.values.clamp(min=0)
        return ((above + above.T) / 2)[rows, columns]
