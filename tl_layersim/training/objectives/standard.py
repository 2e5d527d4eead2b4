"""Standard fine-tuning: the cross-entropy of the last layer, for comparison with aligned training at the same budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..residual_stream import TrainingBatch
from .base import Objective, ObjectiveSettings


class StandardObjective(Objective):
    r"""The cross-entropy of the last layer, $CE_L$, at every step."""

    name = "standard"

    @classmethod
    def is_standard(cls, settings: ObjectiveSettings, step: int) -> bool:
        return True

    def loss(self, batch: TrainingBatch, step: int, run: Callable[[], Any] | None) -> Tensor:
        return self.last_layer_loss(batch, run)
