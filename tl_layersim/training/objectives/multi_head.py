"""Multi-exit training: a head of its own for each layer below the last, with an optional divergence from the last layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...core.errors import LayersimError
from ..losses import chunks, logits_at, rows_at_once, summed_loss
from ..residual_stream import ResidualStream, TrainingBatch
from .base import Objective, ObjectiveSettings


class MultiHeadObjective(Objective):
    r"""The weighted cross-entropies of all layers, $\sum_l w_l CE'_l$, each layer below the last read by a head of its own.

    A layer's own head is a linear layer with the shape of the last part of the model's head, and begins as its copy. Parts
    before it, such as BERT's pooler, are shared. With `kl`, the loss has a further term
    $\kappa \sum_l w_l KL(p^L \| p^l)$, through which no gradient reaches $p^L$.
    """

    name = "multi-head"
    own_settings = ("kl",)
    has_own_parameters = True

    def __init__(self, stream: ResidualStream, settings: ObjectiveSettings) -> None:
        super().__init__(stream, settings)
        own = stream.unembed.linear
        if own is None:
            raise LayersimError(
                f"`objective` is {self.name!r}, which needs a model whose head ends in a linear layer; this head is "
                f"{stream.source.model.head}."
            )
        self.heads = nn.ModuleList([_copy_of(own) for _ in range(stream.n_layers - 1)])

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

    def _divergence(self, last: Tensor, x: Tensor, head: nn.Linear) -> Tensor:
        """Sum over tokens of KL(last layer || this layer), in chunks; its gradient does not reach the last layer."""
        unembed = self.stream.unembed

        def of_chunk(last_chunk: Tensor, chunk: Tensor) -> Tensor:
            with torch.no_grad():
                last_log_probs = logits_at(unembed, last_chunk, None).log_softmax(-1)
            log_probs = logits_at(unembed, chunk, head).log_softmax(-1)
            return nn.functional.kl_div(log_probs, last_log_probs, reduction="sum", log_target=True)

        size = rows_at_once(head.out_features)
        parts = (checkpoint(of_chunk, last.detach()[at], x[at], use_reentrant=False) for at in chunks(len(x), size))
        return torch.stack(list(parts)).sum()


def _copy_of(linear: nn.Linear) -> nn.Linear:
    """A linear layer with the same weights, all of which are trained, and without hooks."""
    # On the meta device, so that no random numbers are drawn.
    copy = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
    copy.weight = nn.Parameter(linear.weight.detach().clone())
    if linear.bias is not None:
        copy.bias = nn.Parameter(linear.bias.detach().clone())
    return copy
