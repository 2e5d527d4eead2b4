"""The result of comparing many models: a distance for each pair, and the results of all pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.argument_checks import typed
from ..core.errors import LayersimError
from ..core.results import Picture, Report
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
        results: of the pairs, by the numbers of the two models: "0 1". Of a symmetric measure each pair is held once.
    """

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

    def __getitem__(self, pair: tuple[str, str]) -> Any:
        """The result of comparing two models, as `compare` returns it.

        Args:
            pair: names of the models that give the rows and the columns.

        Raises:
            LayersimError: a name is not one of the models'.
        """
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(name in self.models for name in pair):
            raise LayersimError(
                "A grid of models is indexed by the names of two of them.",
                given=repr(pair),
                expected=f"two of {', '.join(map(repr, self.models))}",
                do=f"grid[{self.models[0]!r}, {self.models[1]!r}]",
            )
        return either_order(self.results, self.models.index(pair[0]), self.models.index(pair[1]))


def either_order(results: Mapping[str, Any], row: int, column: int) -> Any:
    """The result of a pair of models, transposed where only the other order is held.

    Args:
        results: by the numbers of the two models.
        row: number of the model of the rows.
        column: number of the model of the columns.
    """
    held = results.get(f"{row} {column}")
    return results[f"{column} {row}"].transposed() if held is None else held
