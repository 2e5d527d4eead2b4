"""The training objectives of this package."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...activations.norms import scaled
from ...core.errors import LayersimError
from ..losses import chunks, layer_weights, logits_at, rows_at_once, summed_loss
from ..residual_stream import ResidualStream, TrainingBatch
from . import Objective


class StandardObjective(Objective):
    r"""The cross-entropy of the last layer, $CE_L$, at every step."""

    name = "standard"

    @classmethod
    def is_standard(cls, settings: Any, step: int) -> bool:
        return True


class AlignedObjective(Objective):
    r"""The aligned loss, $\sum_l w_l CE_l$, over all layers or over a random draw of `layers_per_step` of them.

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
    r"""Base class of objectives with a regulariser R, $CE_L + \beta R$, at every step."""

    schedule = "always"

    @classmethod
    def terms(cls, settings: Any, step: int, n_layers: int) -> dict[int, float]:
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
        beta: float = self.settings.beta
        return loss + beta * len(targets) * self._distance(features)

    @abstractmethod
    def _distance(self, features: Mapping[int, Tensor]) -> Tensor:
        """R: the weighted sum of the distances of the layers from the last one, from their features `sample width`."""


class CosineRegularisedObjective(RegularisedObjective):
    r"""The last layer's loss with a cosine regulariser, $CE_L + \beta \sum_l w_l (1 - \cos(x^l, x^L))$, at every step.

    The regulariser is a mean over the positions with a target, of the head's input before the final norm; with
    `cosine_over="attended"`, over all attended positions.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), appendix B.3, "Alternative Approach for Enhancing Layer-wise Representation
        Similarity".
    """

    name = "cosine-reg"
    own_settings = ("beta", "cosine_over")

    def _distance(self, features: Mapping[int, Tensor]) -> Tensor:
        """Weighted sum over layers of the mean cosine distance between a layer's features `sample width` and the last
        layer's.
        """
        last = _direction(features[self.stream.n_layers])
        parts = [
            weight * (1 - nn.functional.cosine_similarity(_direction(features[layer]), last, dim=-1)).sum() / max(1, len(last))
            for layer, weight in enumerate(self.weights[:-1], 1)
        ]
        return torch.stack(parts).sum() if parts else last.sum() * 0


class CKARegularisedObjective(RegularisedObjective):
    r"""The last layer's loss with a CKA regulariser, $CE_L + \beta \sum_l w_l (1 - \mathrm{CKA}(x^l, x^L))$, at every step.

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
            parts = [weight * (1 - _cka(_centred(features[layer]), last)) for layer, weight in enumerate(self.weights[:-1], 1)]
            return torch.stack(parts).sum() if parts else last.sum() * 0


def _centred(x: Tensor) -> Tensor:
    """Samples `sample width` minus their mean, scaled to Frobenius norm 1; in float32, or in float64 if `x` is float64."""
    x = x if x.dtype == torch.float64 else x.float()
    x = x - x.sum(0) / max(1, len(x))
    unit: Tensor = x / x.norm().clamp(min=torch.finfo(x.dtype).tiny)
    return unit


def _cka(x: Tensor, y: Tensor) -> Tensor:
    """Linear CKA of centred samples `sample width`, by the biased HSIC; 0 if all samples of one are equal."""
    if len(x) < x.shape[1]:
        between, own = ((x @ x.T) * (y @ y.T)).sum(), (x @ x.T).norm() * (y @ y.T).norm()
    else:
        between, own = (x.T @ y).square().sum(), (x.T @ x).norm() * (y.T @ y).norm()
    cka: Tensor = between / own.clamp(min=torch.finfo(own.dtype).tiny)
    return cka


def _direction(x: Tensor) -> Tensor:
    """Vectors rescaled so that their squares do not overflow, in float32, or in float64 if `x` is float64."""
    return scaled(x if x.dtype == torch.float64 else x.float())[0]


class MultiHeadObjective(Objective):
    r"""The weighted cross-entropies of all layers, $\sum_l w_l CE'_l$, with a separate head for each layer below the last.

    A layer's own head is a linear layer, initialised as a copy of the last part of the model's head. Earlier parts, such as
    BERT's pooler, are shared. With `kl`, the loss has a further term $\kappa \sum_l w_l KL(p^L \| p^l)$, through which no
    gradient reaches $p^L$.
    """

    name = "multi-head"
    own_settings = ("kl",)
    has_own_parameters = True

    def __init__(self, stream: ResidualStream, settings: Any) -> None:
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
        """Sum over tokens of KL(last layer || this layer), in chunks. No gradient reaches the last layer."""
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
    """A copy of a linear layer without hooks, with all weights trainable."""
    # On the meta device, so that no random numbers are drawn.
    copy = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
    copy.weight = nn.Parameter(linear.weight.detach().clone())
    if linear.bias is not None:
        copy.bias = nn.Parameter(linear.bias.detach().clone())
    return copy
