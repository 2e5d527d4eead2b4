"""The result of comparing many models: a distance for each pair, and the results of all pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.argument_checks import typed
from ..core.errors import LayersimError
from ..core.results import Picture, Report
from .group_curves import GroupCurves, group_curves
from .model_groups import chosen_groups
from .model_matrix import ModelMatrix


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ModelGrid(ModelMatrix):
    """Distances between models, and for each pair the result that `compare` gives: `grid["a", "b"]`.

    Attributes:
        values: `row_model column_model`, float64; of CKA the distance of `CKAResult.distance`. NaN where it is not defined.
        models: names of the models.
        groups: the group of each model; empty where no groups were given.
        quantity: the distance in words, with its unit.
        similarity: the values of the pairs in words, with their unit.
        results: of the pairs, by the numbers of the two models: "0 1". Of a symmetric measure each pair is held once.
    """

    file_kind: ClassVar[str] = "model_grid"
    similarity: str
    results: Report

    pictures = (
        Picture(
            "distance",
            "Distances between models",
            "How much the layers of each two models differ, layer by layer; for CKA the square root of the summed squared "
            "angles arccos(CKA) of equal layers (Brown et al. 2023, equation 2). Models stand in the order of the dendrogram.",
        ),
        Picture(
            "dendrogram",
            "Dendrogram of the models",
            "Hierarchical clustering by these distances (average linkage): models are joined at the height of their mean "
            "distance.",
        ),
        Picture(
            "groups",
            "Distances within and between groups",
            "Distances of all pairs of models, by the groups of the two (Brown et al. 2023, figure 8).",
        ),
    )

    def with_halves(self, first: Any, second: Any) -> Any:
        pairs = {name: one.with_halves(first.results[name], second.results[name]) for name, one in self.results.items()}
        return replace(self, results=Report(pairs))

    def __getitem__(self, pair: tuple[str, str]) -> Any:
        """The result of comparing two models, as `compare` returns it.

        Args:
            pair: names of the models that give the rows and the columns.

        Raises:
            LayersimError: a name is not one of the models'.
        """
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(name in self.models for name in pair):
            raise LayersimError(f"{pair!r} is no pair of models; index the grid by two of {', '.join(map(repr, self.models))}.")
        return either_order(self.results, self.models.index(pair[0]), self.models.index(pair[1]))

    def groups_by_layer(self, groups: Any = None) -> GroupCurves:
        """Values of equal layers, such as CKA(H_l, H'_l), as means within and between groups: where do the groups part?

        Args:
            groups: see `compare_groups`.

        Raises:
            LayersimError: the models have different numbers of sites.

        Source:
            Brown et al. 2023 (arXiv 2310.14993), figure 2 b.
        """
        labels = chosen_groups(groups, self.groups, self.models)
        results = [[self[a, b] for b in self.models] for a in self.models]
        first = results[0][0]
        if len({size for row in results for one in row for size in one.values.shape}) > 1:
            sites = ", ".join(f"{name}: {len(self[name, name].layers)}" for name in self.models)
            raise LayersimError(
                f"`groups_by_layer` compares equal layers, and the models have different numbers of sites: {sites}."
            )
        return group_curves(self, _of_equal_layers, labels, first.layers, self.similarity)


def _of_equal_layers(grid: ModelGrid) -> Tensor:
    """The values of equal layers of each two models, `model model layer`."""
    rows = [[grid[a, b].values.diagonal() for b in grid.models] for a in grid.models]
    return torch.stack([torch.stack(row) for row in rows])


def either_order(results: Mapping[str, Any], row: int, column: int) -> Any:
    """The result of a pair of models, transposed where only the other order is held.

    Args:
        results: by the numbers of the two models.
        row: number of the model of the rows.
        column: number of the model of the columns.
    """
    held = results.get(f"{row} {column}")
    return results[f"{column} {row}"].transposed() if held is None else held
