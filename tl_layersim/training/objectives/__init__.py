"""Training objectives: a module in this package with a subclass of `Objective` is a new objective, without further edits.

An objective is a module, so that `DistributedDataParallel` and autocast can wrap its forward pass.

Examples:
    >>> sorted(OBJECTIVES.all())[:2]
    ['aligned', 'cka-reg']
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ...core.cross_entropy import cross_entropy
from ...core.registry import Registry
from ...lens.exit_heads import ExitHeads
from ...sources.identity import hash_weights
from ..losses import chunks, layer_weights, logits_at, rows_at_once
from ..residual_stream import ResidualStream, TrainingBatch


class Objective(nn.Module):
    """Base class of training objectives: a module whose forward pass is the loss of a batch.

    A loss is a sum over targets. The training divides it by the number of targets in the step, so that the grouping of rows
    into forward passes has no effect.

    Args:
        stream: residual stream of the trained model.
        settings: the `AlignedTraining`.

    Attributes:
        name: value of `AlignedTraining(objective=...)` that selects the objective.
        own_settings: names of the settings that only this objective (or a few objectives) reads. Other objectives raise an
            error.
        schedule: default of the setting `schedule`.
        has_own_parameters: whether the objective trains parameters that are not part of the model.
        weights: w_l of each layer, from the first block to the last.
        heads: a linear head for each layer below the last; None if all layers use the model's head.
    """

    name: ClassVar[str]
    own_settings: ClassVar[tuple[str, ...]] = ()
    schedule: ClassVar[Literal["alternating", "always"]] = "alternating"
    has_own_parameters: ClassVar[bool] = False

    def __init__(self, stream: ResidualStream, settings: Any) -> None:
        super().__init__()
        self.stream, self.settings = stream, settings
        self.module = stream.module
        self.weights = layer_weights(settings.weights, stream.n_layers)
        self.heads: nn.ModuleList | None = None

    @classmethod
    def is_standard(cls, settings: Any, step: int) -> bool:
        """Whether a step, counted from 0, trains with the loss of the last layer alone."""
        return bool((settings.schedule or cls.schedule) == "alternating" and step % 2 == 0)

    @classmethod
    def terms(cls, settings: Any, step: int, n_layers: int) -> dict[int, float]:
        """Weights of the cross-entropies that `loss` sums at a step, by layer from 1. Default: all w_l above 0."""
        return {layer: weight for layer, weight in enumerate(layer_weights(settings.weights, n_layers), 1) if weight}

    def loss(self, batch: TrainingBatch, step: int, run: Callable[[], Any] | None) -> Tensor:
        """The loss of this objective on a batch, summed over targets. Default: the cross-entropies weighted by `terms`.

        Args:
            batch: inputs and targets.
            step: optimiser step, counted from 0.
            run: see `forward`.
        """
        return self.stream.loss(batch, self.terms(self.settings, step, self.stream.n_layers), self.norms_every_layer, run)[0]

    def forward(self, batch: TrainingBatch, step: int, run: Callable[[], Any] | None = None) -> Tensor:
        """The loss of a batch at a step of the schedule, summed over targets.

        Args:
            batch: inputs and targets.
            step: optimiser step, counted from 0.
            run: runs the whole forward pass, for wrappers such as `DistributedDataParallel`; None for a forward pass that ends
                at the highest layer of the loss.
        """
        if self.is_standard(self.settings, step):
            return self.stream.loss(batch, {self.stream.n_layers: 1.0}, self.norms_every_layer, run)[0]
        return self.loss(batch, step, run)

    @property
    def norms_every_layer(self) -> bool:
        """Whether the model's final norm is also applied below the last layer."""
        return bool(self.settings.norm == "final")

    def residuals(self, batch: TrainingBatch, run: Callable[[], Any] | None) -> dict[int, Tensor]:
        """The residual stream `batch pos d_model` of every layer, counted from 1, with gradients."""
        return self.stream.residuals(batch, range(1, self.stream.n_layers + 1), run)

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimiser updates, by name: those of model and objective that require a gradient."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def head_of(self, layer: int) -> nn.Linear | None:
        """The layer's own head; None if it uses the model's head."""
        if self.heads is None or layer == self.stream.n_layers:
            return None
        head = self.heads[layer - 1]
        assert isinstance(head, nn.Linear)
        return head

    def exit_heads(self) -> ExitHeads | None:
        """A copy of the heads of the layers below the last; None if all layers use the model's head.

        The copy records the model's current weights, which the heads belong to.
        """
        heads = [head for layer in range(1, self.stream.n_layers) if (head := self.head_of(layer)) is not None]
        if not heads:
            return None
        return ExitHeads(
            torch.stack([head.weight.detach() for head in heads]),
            None if heads[0].bias is None else torch.stack([head.bias.detach() for head in heads]),
            norm="final" if self.norms_every_layer else "none",
            layers=self.stream.source.model.layers[1:-1],
            weights_hash=hash_weights(self.module),
        )

    @torch.no_grad()
    def evaluate(self, batch: TrainingBatch) -> Tensor:
        """Sums over a batch for each layer, `3 layer`, float64: cross-entropy, correct predictions, number of targets."""
        stream = self.stream
        read, targets = stream.at_targets(batch, self.residuals(batch, None), self.norms_every_layer)
        sums = torch.zeros(3, stream.n_layers, dtype=torch.float64)
        for layer, x in read.items():
            head = self.head_of(layer)
            with torch.autocast(x.device.type, enabled=False):
                size = rows_at_once(logits_at(stream.unembed, x[:1], head).shape[-1]) if len(x) else 1
                for at in chunks(len(x), size):
                    logits, target = logits_at(stream.unembed, x[at], head), targets[at]
                    loss = cross_entropy(logits, target).sum()
                    correct = (logits.argmax(-1) == target).sum()
                    sums[:, layer - 1] += torch.tensor([float(loss), float(correct), float(len(target))], dtype=torch.float64)
        return sums


OBJECTIVES = Registry(__name__, Objective, "objective")
