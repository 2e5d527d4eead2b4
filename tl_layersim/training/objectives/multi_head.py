"""The aligned loss with a separate head for each layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...core.errors import LayersimError
from ..losses import chunks, logits_at, summed_loss
from ..residual_stream import ResidualStream, TrainingBatch
from .objective import Objective


class MultiHeadObjective(Objective):
    r"""The loss with a separate head for each layer below the last, $\sum_l w_l CE'_l$.

    A layer's own head is a linear layer, initialised as a copy of the last part of the model's head. Earlier parts, such as
    BERT's pooler, are shared. With `kl`, the loss has a further term $\kappa \sum_l w_l KL(p^L \| p^l)$, through which no
    gradient reaches $p^L$.
    """

    name = "multi-head"
    own_settings = ("kl",)
    has_own_parameters = True

    def __init__(self, stream: ResidualStream, settings: Any) -> None:
        super().__init__(stream, settings)
        model_head = stream.unembed.linear
        if model_head is None:
            raise LayersimError(
                f"`objective` is {self.name!r}, which needs a head that ends in a linear layer; the head of `model` is "
                f"{stream.source.model.head}."
            )
        self.heads = nn.ModuleList([_copy_of(model_head) for _ in range(stream.n_layers - 1)])

    def loss(self, batch: TrainingBatch, step: int, run: Callable[[], Any] | None) -> Tensor:
        stream = self.stream
        head_inputs, targets = stream.at_targets(batch, self.residuals(batch, run), self.norms_every_layer)
        total = torch.zeros((), device=targets.device)
        last = head_inputs[stream.n_layers]
        for layer, weight in enumerate(self.weights, 1):
            x = head_inputs[layer]
            head = self.head_of(layer)
            token_weights = torch.full_like(targets, weight, dtype=torch.float32)
            total = total + summed_loss(stream.unembed, x, targets, token_weights, head)
            if self.settings.kl and head is not None:
                total = total + weight * self.settings.kl * self._divergence(last, x, head)
        return total

    def _divergence(self, last: Tensor, x: Tensor, head: nn.Linear) -> Tensor:
        """Sum over tokens of KL(last layer || this layer)."""
        unembed = self.stream.unembed

        def divergence_of_chunk(last_chunk: Tensor, x_chunk: Tensor) -> Tensor:
            with torch.no_grad():
                last_log_probs = logits_at(unembed, last_chunk, None).log_softmax(-1)
            log_probs = logits_at(unembed, x_chunk, head).log_softmax(-1)
            return nn.functional.kl_div(log_probs, last_log_probs, reduction="sum", log_target=True)

        divergences = []
        for chunk in chunks(len(x), head.out_features):
            divergences.append(checkpoint(divergence_of_chunk, last.detach()[chunk], x[chunk], use_reentrant=False))
        return torch.stack(divergences).sum()


def _copy_of(linear: nn.Linear) -> nn.Linear:
    """A copy of a linear layer without hooks, with trainable weights."""
    # The meta device draws no random numbers.
    copy = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
    copy.weight = nn.Parameter(linear.weight.detach().clone())
    if linear.bias is not None:
        copy.bias = nn.Parameter(linear.bias.detach().clone())
    return copy
