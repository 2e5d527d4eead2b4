"""Cosine regularisation: the loss of the last layer, and the distance of each layer's direction to the last layer's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...models.vector_norms import scaled
from ..residual_stream import TrainingBatch
from .base import Objective, ObjectiveSettings, out_of_range


class CosineRegularisedObjective(Objective):
    r"""The last layer's loss with a cosine regulariser, $CE_L + \beta \sum_l w_l (1 - \cos(x^l, x^L))$.

    The regulariser is a mean over the positions that are attended to.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), appendix B.3.
    """

    name = "cosine-reg"
    own_settings = ("beta",)

    @classmethod
    def check_settings(cls, settings: ObjectiveSettings) -> None:
        if not 0 <= settings.beta < math.inf:
            raise out_of_range(settings, "beta", "0 or more")

    @classmethod
    def terms(cls, settings: ObjectiveSettings, step: int, n_layers: int) -> dict[int, float]:
        return {n_layers: 1.0}

    def loss(self, batch: TrainingBatch, step: int, run: Callable[[], Any] | None) -> Tensor:
        stream = self.stream
        residuals = self.residuals(batch, run)
        last = {stream.n_layers: residuals[stream.n_layers]}
        read, targets = stream.at_targets(batch, last, self.norms_every_layer)
        loss = stream.weighted(read, targets, self.terms(self.settings, step, stream.n_layers))
        # A mean over attended positions; the training divides the whole loss by the number of targets.
        return loss + self.settings.beta * len(targets) * self._distance(batch, residuals)

    def _distance(self, batch: TrainingBatch, residuals: Mapping[int, Tensor]) -> Tensor:
        """Weighted cosine distance of the layers to the last layer, a mean over attended positions."""
        keep = slice(None) if batch.attended is None else batch.attended.flatten().nonzero()[:, 0]
        layers = {layer: scaled(residual.flatten(0, 1)[keep].float())[0] for layer, residual in residuals.items()}
        last = layers[self.stream.n_layers]
        parts = [
            weight * (1 - nn.functional.cosine_similarity(layers[layer], last, dim=-1)).mean()
            for layer, weight in enumerate(self.weights[:-1], 1)
        ]
        return torch.stack(parts).sum() if parts else last.sum() * 0
