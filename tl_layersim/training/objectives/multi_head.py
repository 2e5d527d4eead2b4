"""Multi-exit training: a head of its own for each layer below the last, with an optional divergence from the last layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...core.errors import LayersimError
from ..losses import chunks, logits_at, rows_at_once, summed_loss
from ..residual_stream import ResidualStream, TrainingBatch
from .base import Objective, ObjectiveSettings, out_of_range


class MultiHeadObjective(Objective):
    r"""The weighted cross-entropies of all layers, $\sum_l w_l CE'_l$, each layer below the last read by a head of its own.

    The heads are copies of the model's head at the start. With `kl`, the loss has a further term
    $\kappa \sum_l w_l KL(p^L \| p^l)$, through which no gradient reaches $p^L$.
    """

    name = "multi-head"
    own_settings = ("kl",)
    has_own_parameters = True

    def __init__(self, stream: ResidualStream, settings: ObjectiveSettings) -> None:
        super().__init__(stream, settings)
        unembed = stream.unembed
        if unembed.linear is None or len(unembed.parts) != 1:
            raise LayersimError(
                f"`objective` {self.name!r} needs a model whose head is one linear layer: each layer gets a copy of it.",
                given=str(stream.source.model.head),
                expected="a plain linear head",
                do="objective='aligned', which uses the model's own head",
            )
        weight = unembed.linear.weight.detach()
        self.heads = nn.ParameterList([nn.Parameter(weight.clone()) for _ in range(stream.n_layers - 1)])

    @classmethod
    def check_settings(cls, settings: ObjectiveSettings) -> None:
        if not 0 <= settings.kl < math.inf:
            raise out_of_range(settings, "kl", "0 or more")

    def loss(self, batch: TrainingBatch, step: int, run: Callable[[], Any] | None) -> Tensor:
        stream = self.stream
        read, targets = stream.at_targets(batch, self.residuals(batch, run), self.norms_every_layer)
        total = torch.zeros((), device=targets.device)
        last = read[stream.n_layers]
        for layer, weight in enumerate(self.weights, 1):
            x, head = read[layer], self.head_of(layer)
            token_weights = torch.full_like(targets, weight, dtype=torch.float32)
            total = total + summed_loss(stream.unembed, x, targets, token_weights, head)
            if self.settings.kl and head is not None:
                total = total + weight * self.settings.kl * self._divergence(last, x, head)
        return total

    def _divergence(self, last: Tensor, x: Tensor, head: Tensor) -> Tensor:
        """Sum over tokens of KL(last layer || this layer), in chunks; its gradient does not reach the last layer."""
        unembed = self.stream.unembed

        def of_chunk(last_chunk: Tensor, chunk: Tensor) -> Tensor:
            with torch.no_grad():
                last_log_probs = logits_at(unembed, last_chunk, None).log_softmax(-1)
            log_probs = logits_at(unembed, chunk, head).log_softmax(-1)
            return nn.functional.kl_div(log_probs, last_log_probs, reduction="sum", log_target=True)

        size = rows_at_once(len(head))
        parts = (checkpoint(of_chunk, last.detach()[at], x[at], use_reentrant=False) for at in chunks(len(x), size))
        return torch.stack(list(parts)).sum()
