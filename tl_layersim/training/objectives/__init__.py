"""Training objectives, one class for each value of `AlignedTraining.objective`.

A new subclass of `Objective` goes into this file, or into a new module of this folder. No other file changes.

An objective is a module, so that `DistributedDataParallel` and autocast can wrap its forward pass.

Examples:
    >>> sorted(OBJECTIVES.all())[:2]
    ['aligned', 'cka-reg']
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...activations.norms import scaled
from ...core.cross_entropy import cross_entropy
from ...core.errors import LayersimError
from ...core.registry import Registry
from ...lens.exit_heads import ExitHeads
from ...sources.identity import hash_weights
from ..losses import chunks, layer_weights, logits_at, summed_loss
from ..residual_stream import ResidualStream, TrainingBatch


class Objective(nn.Module):
    """Base class of training objectives. The forward pass computes the loss of a batch.

    A new subclass goes into this `__init__.py`, or into a new module of this folder. It is then available as
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


class StandardObjective(Objective):
    r"""The cross-entropy of the last layer, $CE_L$, at every step."""

    name = "standard"

    @classmethod
    def is_standard(cls, settings: Any, step: int) -> bool:
        return True


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


class RegularisedObjective(Objective, ABC):
    r"""Base class of objectives with a regulariser R, $CE_L + \beta R$."""

    schedule = "always"

    @classmethod
    def terms(cls, settings: Any, step: int, n_layers: int) -> dict[int, float]:
        return {n_layers: 1.0}

    def loss(self, batch: TrainingBatch, step: int, run: Callable[[], Any] | None) -> Tensor:
        stream = self.stream
        residuals = self.residuals(batch, run)
        last = {stream.n_layers: residuals[stream.n_layers]}
        head_inputs, targets = stream.at_targets(batch, last, self.norms_every_layer)
        loss = stream.weighted(head_inputs, targets, self.terms(self.settings, step, stream.n_layers))
        if self.settings.cosine_over == "targets":
            features, _ = stream.at_targets(batch, residuals, None)
        else:
            positions = slice(None) if batch.attended is None else batch.attended.flatten().nonzero()[:, 0]
            features = {layer: x.flatten(0, 1)[positions] for layer, x in residuals.items()}
        # The training divides the whole loss by the number of targets.
        beta: float = self.settings.beta
        return loss + beta * len(targets) * self._distance(features)

    @abstractmethod
    def _distance(self, features: Mapping[int, Tensor]) -> Tensor:
        """The regulariser R: a weighted sum of distances to the last layer."""


class CosineRegularisedObjective(RegularisedObjective):
    r"""The last layer's loss with a cosine regulariser, $CE_L + \beta \sum_l w_l (1 - \cos(x^l, x^L))$.

    The regulariser is a mean over the positions with a target, of the head's input before the final norm; with
    `cosine_over="attended"`, over all attended positions.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), appendix B.3, "Alternative Approach for Enhancing Layer-wise Representation
        Similarity".
    """

    name = "cosine-reg"
    own_settings = ("beta", "cosine_over")

    def _distance(self, features: Mapping[int, Tensor]) -> Tensor:
        last = _rescaled(features[self.stream.n_layers])
        distances = []
        for layer, weight in enumerate(self.weights[:-1], 1):
            cosines = nn.functional.cosine_similarity(_rescaled(features[layer]), last, dim=-1)
            distances.append(weight * (1 - cosines).sum() / max(1, len(last)))
        # A model of one block has no layer below the last; 0 times the features keeps the graph of gradients.
        return torch.stack(distances).sum() if distances else last.sum() * 0


class CKARegularisedObjective(RegularisedObjective):
    r"""The last layer's loss with a CKA regulariser, $CE_L + \beta \sum_l w_l (1 - \mathrm{CKA}(x^l, x^L))$.

    CKA is linear and biased, over the positions with a target, of the head's input before the final norm. It relates the
    samples of one forward pass to each other, so that the loss of rows depends on the rows beside them.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), equation 3 and appendix B.3, "Another approach"; without an equation there.
    """

    name = "cka-reg"
    own_settings = ("beta",)

    def _distance(self, features: Mapping[int, Tensor]) -> Tensor:
        last = _centred(features[self.stream.n_layers])
        with torch.autocast(last.device.type, enabled=False):
            distances = []
            for layer, weight in enumerate(self.weights[:-1], 1):
                distances.append(weight * (1 - _cka(_centred(features[layer]), last)))
            return torch.stack(distances).sum() if distances else last.sum() * 0


def _centred(x: Tensor) -> Tensor:
    """Samples (`sample width`) minus their mean, scaled to Frobenius norm 1."""
    x = x if x.dtype == torch.float64 else x.float()
    x = x - x.sum(0) / max(1, len(x))
    unit: Tensor = x / x.norm().clamp(min=torch.finfo(x.dtype).tiny)
    return unit


def _cka(x: Tensor, y: Tensor) -> Tensor:
    """Biased linear CKA of two sets of centred samples (both `sample width`)."""
    # The smaller of the two Gram matrices, of samples or of features. Both have the same CKA.
    if len(x) < x.shape[1]:
        covariance = ((x @ x.T) * (y @ y.T)).sum()
        norms = (x @ x.T).norm() * (y @ y.T).norm()
    else:
        covariance = (x.T @ y).square().sum()
        norms = (x.T @ x).norm() * (y.T @ y).norm()
    cka: Tensor = covariance / norms.clamp(min=torch.finfo(norms.dtype).tiny)
    return cka


def _rescaled(x: Tensor) -> Tensor:
    """Vectors rescaled so that their squares do not overflow."""
    return scaled(x if x.dtype == torch.float64 else x.float())[0]


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


OBJECTIVES = Registry(__name__, Objective, "objective")
