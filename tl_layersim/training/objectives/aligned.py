"""The aligned loss."""

from __future__ import annotations

from typing import Any

import torch

from ..losses import layer_weights
from .objective import Objective


class AlignedObjective(Objective):
    r"""The aligned loss, $\sum_l w_l CE_l$, over all layers or over `layers_per_step` random ones.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), equation 5.
    """

    name = "aligned"
    own_settings = ("layers_per_step",)

    @classmethod
    def terms(cls, settings: Any, step: int, n_layers: int) -> dict[int, float]:
        if settings.layers_per_step is None or settings.layers_per_step >= n_layers:
            return super().terms(settings, step, n_layers)
        weights = layer_weights(settings.weights, n_layers)
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
        drawn = torch.randperm(n_layers, generator=generator)[: settings.layers_per_step].tolist()
        # Each layer is drawn with probability k / L.
        return {layer + 1: weights[layer] * n_layers / settings.layers_per_step for layer in sorted(drawn)}
