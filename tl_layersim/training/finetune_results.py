"""Result of a fine-tune: training loss, and held-out loss and accuracy of each layer."""

from __future__ import annotations

import math
from dataclasses import InitVar, dataclass
from typing import ClassVar

from jaxtyping import Float64
from torch import Tensor

from ..core.arguments import typed
from ..core.errors import LayersimError
from ..core.fields import Provenance
from ..core.results import Result, axes
from ..core.wording import amount
from ..lens.exit_heads import ExitHeads


def rows_in_words(run: Provenance, training: bool) -> str:
    """The number of training rows or of held-out targets, in words, for a figure.

    Args:
        run: record of the training.
        training: whether the figure shows the training loss, not the evaluations.
    """
    if training:
        rows = run.options.get("train_rows")
        return amount(rows, "training row") if rows else "training rows"
    return amount(run.tokens, f"held-out {'row' if run.tokens == run.sequences else 'token'}") if run.tokens else ""


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class AlignedResult(Result):
    """Result of a fine-tune: training loss, and held-out loss and accuracy of each layer. Tensors are float64.

    Args:
        exit_heads: the trained heads of the layers below the last; None if all layers use the model's head. Files of the result
            do not hold them.

    Attributes:
        values: `look layer`, the same as `held_out_loss`: cross-entropy of each layer in nats, under its trained head.
        accuracy: `look layer`, top-1 accuracy of each layer.
        loss: `step`, training loss at each optimiser step. In the alternating schedule, odd steps train the last layer alone.
        looks: number of optimiser steps before each evaluation.
        unit: unit of a target: "token", or "row" for a classifier.
    """

    file_kind: ClassVar[str] = "aligned_training"
    values_name = "held_out_loss"
    values: Float64[Tensor, "look layer"] = axes(
        "look",
        "layer",
        label="Held-out cross-entropy",
        unit="nats",
        title="Held-out loss of each layer",
        caption="Before, during and after training.",
        better="lower",
        within=(0, math.inf),
    )
    accuracy: Float64[Tensor, "look layer"] = axes(
        "look",
        "layer",
        label="Held-out accuracy",
        unit="fraction of targets",
        title="Held-out accuracy of each layer",
        caption="Before, during and after training.",
        better="higher",
        within=(0, 1),
    )
    loss: Float64[Tensor, " step"] = axes(
        "step",
        label="Training loss",
        unit="nats",
        title="Training loss",
        caption="At each step of the optimiser (Jiang, Zhou and Zhu 2024, equation 5); with the alternating schedule every "
        "other step trains the last layer alone.",
    )
    looks: tuple[int, ...]
    unit: str
    exit_heads: InitVar[ExitHeads | None] = None

    def __post_init__(self, exit_heads: ExitHeads | None) -> None:
        super().__post_init__()
        object.__setattr__(self, "_exit_heads", exit_heads)

    @property
    def heads(self) -> ExitHeads:
        """The trained heads of the layers below the last, for `LogitLens(heads=...)`, `EarlyExit(model, heads=...)` and others.

        Raises:
            LayersimError: the layers have no heads of their own, or the result was read from a file.
        """
        heads: ExitHeads | None = vars(self)["_exit_heads"]
        if heads is None:
            raise LayersimError(
                "This result has no heads for the layers below the last: only a result of objective='multi-head' from this "
                "process has them. Load saved heads with ExitHeads.load(path)."
            )
        return heads

    @property
    def held_out_loss(self) -> Tensor:
        """Held-out cross-entropies in nats, `look layer`, the same as `values`."""
        return self.values

    def measured_on(self, field: str) -> str:
        return rows_in_words(self.provenance, field == "loss")

    def headline(self) -> dict[str, float]:
        numbers = {
            "held-out loss of the last layer before": float(self.values[0, -1]),
            "held-out loss of the last layer after": float(self.values[-1, -1]),
        }
        if self.values.shape[1] > 1:
            numbers["mean over the other layers before"] = float(self.values[0, :-1].mean())
            numbers["mean over the other layers after"] = float(self.values[-1, :-1].mean())
        return numbers
