"""`ModelGrid`: the distance of each pair of many models, and the results of all pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float64
from torch import Tensor

from ..core.arguments import typed
from ..core.errors import LayersimError
from ..core.fields import Declaration
from ..core.intervals import headline_lines
from ..core.results import Report, Result, axes
from ..core.wording import headed


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ModelGrid(Result):
    """Distances between models, and for each pair the result of `compare`: `grid["a", "b"]`.

    `tl_layersim.many.compare_groups` and `tl_layersim.many.dendrogram` take it.

    Attributes:
        values: `row_model column_model`, float64; for CKA, `CKAResult.distance`. It may depend on the order of the two models.
            NaN if it is not defined.
        by_site: `row_model column_model site`, values of equal sites of every two models, such as CKA(H_l, H'_l). Empty if the
            models have different numbers of sites. For intervals see `grid["a", "b"].interval()`.
        models: names of the models.
        groups: the group of each model; empty without groups.
        sites: names of the sites in the first model.
        quantity: the distance in words, with its unit.
        results: results of the pairs by the indices of the two models, as "0 1". For a symmetric measure each pair appears
            once.
    """

    file_kind: ClassVar[str] = "model_grid"
    values_name = "distance"
    values: Float64[Tensor, "row_model column_model"] = axes(
        "row_model",
        "column_model",
        label="Distance",
        title="Distances between models",
        caption="Distance between two models, layer by layer; for CKA, the square root of the summed squared "
        "angles arccos(CKA) of equal layers (Brown et al. 2023, equation 2). Similar models stand side by side, by average "
        "linkage.",
    )
    by_site: Float64[Tensor, "row_model column_model site"] = axes(
        "row_model", "column_model", "site", title="Values of equal sites", within=None
    )
    models: tuple[str, ...]
    groups: tuple[str, ...]
    sites: tuple[str, ...]
    quantity: str
    results: Report

    @property
    def row_models(self) -> tuple[str, ...]:
        """Names of the models of the rows."""
        return self.models

    @property
    def column_models(self) -> tuple[str, ...]:
        """Names of the models of the columns."""
        return self.models

    def declared(self, field: str = "values") -> Declaration:
        own = super().declared(field)
        if "site" in own.axes:
            pair = next(iter(self.results.values())).declared()
            return replace(own, label=pair.label, unit=pair.unit)
        label, _, unit = self.quantity.partition(" (")
        return replace(own, label=label, unit=unit.removesuffix(")"))

    def with_halves(self, first: Any, second: Any) -> Any:
        pairs = {name: one.with_halves(first.results[name], second.results[name]) for name, one in self.results.items()}
        return replace(self, results=Report(pairs))

    def with_twins(self, twins: Sequence[Any]) -> Any:
        pairs = {name: one.with_twins([twin.results[name] for twin in twins]) for name, one in self.results.items()}
        return replace(self, results=Report(pairs), untrained=tuple(twins))

    def headline(self) -> dict[str, float]:
        values = self.values[~torch.eye(len(self.models), dtype=torch.bool)]
        return {"smallest distance of two models": float(values.min()), "largest": float(values.max())}

    def __repr__(self) -> str:
        title = f"ModelGrid({', '.join(self.models)}; {self.provenance.tokens} tokens)"
        return headed(title, [f"  {line}" for line in headline_lines(self)])

    def __getitem__(self, pair: tuple[str, str]) -> Any:
        """Result of comparing two models, as `compare` returns it.

        Args:
            pair: names of the models that give the rows and the columns.

        Raises:
            LayersimError: a name is not a name of one of the models.
        """
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(name in self.models for name in pair):
            raise LayersimError(f"{pair!r} is no pair of models; index the grid by two of {', '.join(map(repr, self.models))}.")
        return either_order(self.results, self.models.index(pair[0]), self.models.index(pair[1]))


def either_order(results: Mapping[str, Any], row: int, column: int) -> Any:
    """The result of a pair of models, transposed if only the other order is available.

    Args:
        results: results by the indices of the two models.
        row: index of the model of the rows.
        column: index of the model of the columns.
    """
    held = results.get(f"{row} {column}")
    return results[f"{column} {row}"].transposed() if held is None else held
