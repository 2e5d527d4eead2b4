"""The base class of training objectives, and the objectives by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ...core.cross_entropy import cross_entropy
from ...core.registry import Registry
from ...lens.exit_heads import ExitHeads
from ...sources.identity import hash_weights
from ..losses import chunks, layer_weights, logits_at
from ..residual_stream import ResidualStream, TrainingBatch


class Objective(nn.Module):
    """Base class of training objectives. The forward pass computes the loss of a batch.

    A new subclass goes into a new file of this folder. It is then available as
    `AlignedTraining(objective=name)`; no other file changes.

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
        self.stream = stream
        self.settings = settings
        self.module = stream.module
        self.weights = layer_weights(settings.weights, stream.n_layers)
        self.heads: nn.ModuleList | None = None

    @classmethod
    def is_standard(cls, settings: Any, step: int) -> bool:
        """Whether the loss at a step is the cross-entropy of the last layer alone."""
        return bool((settings.schedule or cls.schedule) == "alternating" and step % 2 == 0)

    @classmethod
    def terms(cls, settings: Any, step: int, n_layers: int) -> dict[int, float]:
        """Dict from each trained layer, counted from 1, to the weight of its cross-entropy at a step."""
        weights = layer_weights(settings.weights, n_layers)
        return {layer: weight for layer, weight in enumerate(weights, 1) if weight}

    def loss(self, batch: TrainingBatch, step: int, run: Callable[[], Any] | None) -> Tensor:
        """The objective's loss of a batch, summed over targets. Steps with `is_standard` do not use this loss.

        Args:
            batch: inputs and targets.
            step: optimiser step, counted from 0.
            run: see `forward`.
        """
        terms = self.terms(self.settings, step, self.stream.n_layers)
        return self.stream.loss(batch, terms, self.norms_every_layer, run)[0]

    def forward(self, batch: TrainingBatch, step: int, run: Callable[[], Any] | None = None) -> Tensor:
        """The training loss of a batch, summed over targets.

        It is `loss`, or the last layer's cross-entropy at steps where `is_standard` is True.

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
        """Whether the final norm is applied at every layer."""
        return bool(self.settings.norm == "final")

    def residuals(self, batch: TrainingBatch, run: Callable[[], Any] | None) -> dict[int, Tensor]:
        """The residual stream after each layer (`batch pos d_model`), with gradients."""
        return self.stream.residuals(batch, range(1, self.stream.n_layers + 1), run)

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Dict of the trainable parameters, by name."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def head_of(self, layer: int) -> nn.Linear | None:
        """Separate linear head of a layer. None if the layer uses the model's head."""
        if self.heads is None or layer == self.stream.n_layers:
            return None
        head = self.heads[layer - 1]
        assert isinstance(head, nn.Linear)
        return head

    def exit_heads(self) -> ExitHeads | None:
        """Copy of the separate heads as `ExitHeads`. None if all layers use the model's head.

        The copy records the model's current weights, which the heads belong to.
        """
        heads = []
        for layer in range(1, self.stream.n_layers):
            head = self.head_of(layer)
            if head is not None:
                heads.append(head)
        if not heads:
            return None
        weights = torch.stack([head.weight.detach() for head in heads])
        biases = None if heads[0].bias is None else torch.stack([head.bias.detach() for head in heads])
        return ExitHeads(
            weights,
            biases,
            norm="final" if self.norms_every_layer else "none",
            layers=self.stream.source.model.layers[1:-1],
            weights_hash=hash_weights(self.module),
        )

    @torch.no_grad()
    def evaluate(self, batch: TrainingBatch) -> Tensor:
        """Summed loss and number of correct predictions of each layer on a batch.

        Returns:
            `3 layer`, float64: the sum of cross-entropies, the number of correct predictions and the number of targets.
        """
        stream = self.stream
        head_inputs, targets = stream.at_targets(batch, self.residuals(batch, None), self.norms_every_layer)
        sums = torch.zeros(3, stream.n_layers, dtype=torch.float64)
        for layer, x in head_inputs.items():
            head = self.head_of(layer)
            with torch.autocast(x.device.type, enabled=False):
                vocabulary = logits_at(stream.unembed, x[:1], head).shape[-1] if len(x) else 1
                for chunk in chunks(len(x), vocabulary):
                    logits = logits_at(stream.unembed, x[chunk], head)
                    target = targets[chunk]
                    loss = cross_entropy(logits, target).sum()
                    correct = (logits.argmax(-1) == target).sum()
                    sums[:, layer - 1] += torch.tensor([float(loss), float(correct), float(len(target))], dtype=torch.float64)
        return sums


OBJECTIVES = Registry(__package__, Objective, "objective")
