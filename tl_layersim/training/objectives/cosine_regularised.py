"""Cosine regularisation: the loss of the last layer, and the distance of each layer's direction to the last layer's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...models.vector_norms import scaled
from ..residual_stream import TrainingBatch
from .base import Objective, ObjectiveSettings


class CosineRegularisedObjective(Objective):
    r"""The last layer's loss with a cosine regulariser, $CE_L + \beta \sum_l w_l (1 - \cos(x^l, x^L))$, at every step.

    The regulariser is a mean over the features that the head reads where there is a target, before the final norm, as $CE_L$
    is; with `cosine_over="attended"` over all positions that are attended to.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), appendix B.3, "Alternative Approach for Enhancing Layer-wise Representation
        Similarity".
    """

    name = "cosine-reg"
    own_settings = ("beta", "cosine_over")
    schedule = "always"

    @classmethod
    def terms(cls, settings: ObjectiveSettings, step: int, n_layers: int) -> dict[int, float]:
        return {n_layers: 1.0}

    def loss(self, batch: TrainingBatch, step: int, run: Callable[[], Any] | None) -> Tensor:
        stream = self.stream
        residuals = self.residuals(batch, run)
        last = {stream.n_layers: residuals[stream.n_layers]}
        read, targets = stream.at_targets(batch, last, self.norms_every_layer)
        loss = stream.weighted(read, targets, self.terms(self.settings, step, stream.n_layers))
        if self.settings.cosine_over == "targets":
            features, _ = stream.at_targets(batch, residuals, None)
        else:
            keep = slice(None) if batch.attended is None else batch.attended.flatten().nonzero()[:, 0]
            features = {layer: x.flatten(0, 1)[keep] for layer, x in residuals.items()}
        # The training divides the whole loss by the number of targets.
        return loss + self.settings.beta * len(targets) * self._distance(features)

    def _distance(self, features: Mapping[int, Tensor]) -> Tensor:
        """Weighted cosine distance of each layer's features `sample width` to the last layer's, averaged over samples."""
        last = _direction(features[self.stream.n_layers])
        parts = [
            weight * (1 - nn.functional.cosine_similarity(_direction(features[layer]), last, dim=-1)).sum() / max(1, len(last))
            for layer, weight in enumerate(self.weights[:-1], 1)
        ]
        return torch.stack(parts).sum() if parts else last.sum() * 0


def _direction(x: Tensor) -> Tensor:
    """Vectors of the same direction whose squares do not overflow, in float32, or in float64 if `x` is."""
    return scaled(x if x.dtype == torch.float64 else x.float())[0]
