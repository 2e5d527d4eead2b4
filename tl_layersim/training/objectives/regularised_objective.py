"""The base class of objectives with a regulariser."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..residual_stream import TrainingBatch
from .objective import Objective


class RegularisedObjective(Objective, ABC):
    r"""Base class of objectives with a regulariser R, $CE_L + \beta R$."""

    schedule = "always"

    @classmethod
    def terms(cls, settings: Any, step: int, n_layers: int) -> dict[int, float]:
        return {n_layers: 1.0}

    def loss(self, batch: TrainingBatch, step: int, run: Callable[[], Any] | None) -> Tensor:
        stream = self.stream
        residuals = self.residuals(batch, run)
        last = {stream.n_layers: residuals[stream.n_layers]}
        head_inputs, targets = stream.at_targets(batch, last, self.norms_every_layer)
        loss = stream.weighted(head_inputs, targets, self.terms(self.settings, step, stream.n_layers))
        if self.settings.cosine_over == "targets":
            features, _ = stream.at_targets(batch, residuals, None)
        else:
            positions = slice(None) if batch.attended is None else batch.attended.flatten().nonzero()[:, 0]
            features = {layer: x.flatten(0, 1)[positions] for layer, x in residuals.items()}
        # The training divides the whole loss by the number of targets.
        beta: float = self.settings.beta
        return loss + beta * len(targets) * self._distance(features)

    @abstractmethod
    def _distance(self, features: Mapping[int, Tensor]) -> Tensor:
        """The regulariser R: a weighted sum of distances to the last layer."""
