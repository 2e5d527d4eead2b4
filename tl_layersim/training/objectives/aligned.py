"""The aligned loss: the weighted cross-entropies of all layers, read by one shared head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..losses import layer_weights
from ..residual_stream import TrainingBatch
from .base import Objective, ObjectiveSettings


class AlignedObjective(Objective):
    r"""The aligned loss, $\sum_l w_l CE_l$, over all layers or over a random draw of `layers_per_step` of them.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), equation 5.
    """

    name = "aligned"
    own_settings = ("layers_per_step",)

    @classmethod
    def terms(cls, settings: ObjectiveSettings, step: int, n_layers: int) -> dict[int, float]:
        if settings.layers_per_step is None or settings.layers_per_step >= n_layers:
            return super().terms(settings, step, n_layers)
        weights = layer_weights(settings.weights, n_layers)
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
        drawn = torch.randperm(n_layers, generator=generator)[: settings.layers_per_step].tolist()
        # Each layer is drawn with probability k / L.
        return {layer + 1: weights[layer] * n_layers / settings.layers_per_step for layer in sorted(drawn)}

    def loss(self, batch: TrainingBatch, step: int, run: Callable[[], Any] | None) -> Tensor:
        terms = self.terms(self.settings, step, self.stream.n_layers)
        return self.stream.loss(batch, terms, self.norms_every_layer, run, whole=run is not None)[0]
