"""Stitching penalties between models: a matrix of fronts by backs, with its clustering and groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch

from ..analysis.model_matrix import ModelMatrix
from ..core.argument_checks import typed
from ..core.errors import LayersimError
from ..core.results import Picture
from ..core.wording import brief

PenaltyField: TypeAlias = Literal["penalty", "accuracy_penalty"]


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Penalties(ModelMatrix):
    """Stitching penalties of all fronts into all backs.

    Attributes:
        values: `row_model column_model`, float64: the front of the row into the back of the column, at one stitch point or as
            the mean over all. Clusters are of the mean of both directions, each at least 0.
        models: names of the models.
        groups: the group of each model; empty where no groups were given.
        quantity: the penalty in words, with its unit.
        seam: the stitch point.
        kind: the kind of adapter.
        fit: how adapters were fitted; "" where nothing was.
    """

    file_kind: ClassVar[str] = "stitch_penalties"
    values_name = "penalty"
    seam: str
    kind: str
    fit: str

    pictures = (
        Picture(
            "penalty",
            "Stitching penalty between models",
            "How much each back loses when it reads the layer of each front. Models of one group use the same coordinates if "
            "identity costs little within the group and much between groups (Brown et al. 2023, figure 2).",
        ),
        Picture(
            "dendrogram",
            "Dendrogram of the models",
            "Hierarchical clustering by the mean penalty of both directions, those below 0 taken as 0 (average linkage).",
        ),
        Picture(
            "groups",
            "Penalties within and between groups",
            "Penalties of all pairs of models, by the groups of front and back.",
        ),
    )

    def sides(self) -> tuple[str, str]:
        return "Front (lower blocks)", "Back (upper blocks)"

    def about(self) -> str:
        return f"{adapter_words(self.kind, self.fit)}, {self.seam}"

    def headline(self) -> dict[str, float]:
        values = self.values[~torch.eye(len(self.models), dtype=torch.bool)]
        return {
            f"smallest penalty of two models, {self.seam}": float(values.min()),
            "largest": float(values.max()),
        }


def penalties_between(grid: Any, seam: int | str | None, of: PenaltyField) -> Penalties:
    """The penalties of a `StitchGrid` at a stitch point, see `StitchGrid.between_models`.

    Raises:
        LayersimError: the grid has no such stitch point, or one model only.
    """
    if len(grid.fronts) < 2:
        raise LayersimError(f"A matrix of models needs two of them; this grid has {grid.fronts[0]} alone.")
    number = grid.seams.index(seam) if seam in grid.seams else seam
    if number is not None and not (isinstance(number, int) and 0 <= number < len(grid.seams)):
        raise LayersimError(
            f"`seam` is {brief(seam)}; it must be 0 to {len(grid.seams) - 1}, or one of {', '.join(grid.seams[:4])}, or None "
            "for the mean over all."
        )
    values = grid.values if of == "penalty" else getattr(grid, of)
    return Penalties(
        values=(values.mean(-1) if number is None else values[..., number]).contiguous(),
        models=grid.fronts,
        groups=grid.groups,
        quantity=penalty_words(of, grid.unit),
        seam=f"mean over {len(grid.seams)} stitch points" if number is None else grid.seams[number],
        kind=grid.kind,
        fit=grid.fit,
        layers=(),
        provenance=grid.provenance,
    )


def adapter_words(kind: str, fit: str) -> str:
    """The adapter of a stitch in words.

    Args:
        kind: of the adapter.
        fit: how it was fitted; "" where nothing was.
    """
    return f"{kind} adapter{f', fitted by {fit}' if fit else ''}"


def penalty_words(of: PenaltyField, unit: str) -> str:
    """A penalty in words, with its unit.

    Args:
        of: the penalty in loss or in accuracy.
        unit: of a target.
    """
    return f"Stitching penalty (nats per {unit})" if of == "penalty" else "Accuracy penalty (fraction of targets)"
