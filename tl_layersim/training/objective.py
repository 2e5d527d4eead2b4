"""The loss of one step, as a module: what several processes and mixed precision wrap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..core.errors import LayersimError
from ..models.softmax import cross_entropy
from .losses import chunks, layer_weights, logits_at, rows_at_once, summed_loss
from .residual_stream import ResidualStream, TrainingBatch
from .settings import AlignedTraining


class Objective(nn.Module):
    """What is minimised.

    Args:
        stream: the model.
        training: how.
    """

    def __init__(self, stream: ResidualStream, training: AlignedTraining) -> None:
        super().__init__()
        self.stream, self.training_of = stream, training
        self.module = stream.module
        self.weights = layer_weights(training.weights, stream.n_layers)
        self.heads = self._own_heads() if training.objective == "multi-head" else None

    def _own_heads(self) -> nn.ParameterList:
        """A copy of the model's head for each layer below the last."""
        unembed = self.stream.unembed
        if unembed.linear is None or len(unembed.parts) != 1:
            raise LayersimError(
                "Heads of their own are copies of a head that is one product.",
                given=str(self.stream.source.model.head),
                expected="a plain linear head",
                do="objective='aligned', which shares whatever head there is",
            )
        first = unembed.linear.weight.detach()
        return nn.ParameterList([nn.Parameter(first.clone()) for _ in range(self.stream.n_layers - 1)])

    def learning(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by name."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def forward(self, piece: TrainingBatch, step: int, run: Callable[[], Any] | None = None) -> Tensor:
        """Sum of the loss over answers.

        Args:
            piece: what goes in and what should come out.
            step: of the optimiser, from 0.
            run: a forward pass to its end, where what wraps the model must see it.
        """
        training, stream = self.training_of, self.stream
        terms = training.terms(step, stream.n_layers)
        norm = training.norm == "final"
        if training.is_standard(step) or training.objective == "aligned":
            return stream.loss(piece, terms, norm, run, whole=run is not None)[0]
        everything = range(1, stream.n_layers + 1)
        found = stream.residuals(everything, run or (lambda: stream.call(piece)), whole=run is not None)
        rows, wanted = stream.at_answers(piece, found)
        if training.objective == "cosine-reg":
            loss = stream.weighted({stream.n_layers: rows[stream.n_layers]}, wanted, terms, norm)
            # Per position that is attended to; the loss is divided by the number of answers later.
            return loss + training.beta * len(wanted) * self._distance(piece, found)
        return self._of_heads(rows, wanted, norm)

    def _distance(self, piece: TrainingBatch, found: Mapping[int, Tensor]) -> Tensor:
        """Mean over attended positions of the weighted distance of directions to the last layer's."""
        keep = slice(None) if piece.attended is None else piece.attended.flatten().nonzero()[:, 0]
        last = found[self.stream.n_layers].flatten(0, 1)[keep].float()
        parts = [
            weight * (1 - nn.functional.cosine_similarity(found[layer].flatten(0, 1)[keep].float(), last, dim=-1)).mean()
            for layer, weight in enumerate(self.weights[:-1], 1)
        ]
        return torch.stack(parts).sum() if parts else last.sum() * 0

    def _of_heads(self, rows: Mapping[int, Tensor], wanted: Tensor, norm: bool) -> Tensor:
        stream = self.stream
        total = torch.zeros((), device=wanted.device)
        last = stream.unembed.normed(rows[stream.n_layers])
        for layer, weight in enumerate(self.weights, 1):
            x = stream.normed(layer, rows[layer], norm)
            head = self.head_of(layer)
            total = total + summed_loss(stream.unembed, x, wanted, torch.full_like(wanted, weight, dtype=torch.float32), head)
            if self.training_of.kl and head is not None:
                total = total + weight * self.training_of.kl * self._divergence(last, x, head)
        return total

    def head_of(self, layer: int) -> Tensor | None:
        """The layer's own head, None for the model's."""
        return self.heads[layer - 1] if self.heads is not None and layer < self.stream.n_layers else None

    def _divergence(self, last: Tensor, x: Tensor, head: Tensor) -> Tensor:
        """Sum of KL(last layer || this layer), in chunks; nothing is learnt by the last layer from it."""
        unembed = self.stream.unembed

        def part(some_last: Tensor, some: Tensor) -> Tensor:
            with torch.no_grad():
                theirs = logits_at(unembed, some_last, None).log_softmax(-1)
            ours = logits_at(unembed, some, head).log_softmax(-1)
            return nn.functional.kl_div(ours, theirs, reduction="sum", log_target=True)

        size = rows_at_once(len(head))
        pieces = (checkpoint(part, last.detach()[at], x[at], use_reentrant=False) for at in chunks(len(x), size))
        return torch.stack(list(pieces)).sum()

    @torch.no_grad()
    def judge(self, piece: TrainingBatch) -> Tensor:
        """`3 layer`, float64: sums of cross-entropies, how many first choices are right, and of how many answers."""
        stream = self.stream
        found = stream.residuals(range(1, stream.n_layers + 1), lambda: stream.call(piece))
        rows, wanted = stream.at_answers(piece, found)
        out = torch.zeros(3, stream.n_layers, dtype=torch.float64)
        for layer, row in rows.items():
            x = stream.normed(layer, row, self.training_of.norm == "final")
            head = self.head_of(layer)
            with torch.autocast(x.device.type, enabled=False):
                size = rows_at_once(logits_at(stream.unembed, x[:1], head).shape[-1]) if len(x) else 1
                for at in chunks(len(x), size):
                    logits, right = logits_at(stream.unembed, x[at], head), wanted[at]
                    loss = cross_entropy(logits, right).sum()
                    hits = (logits.argmax(-1) == right).sum()
                    out[:, layer - 1] += torch.tensor([float(loss), float(hits), float(len(right))], dtype=torch.float64)
        return out
