"""Weighted cross-entropies of residuals under the model's head."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..architectures.unembed import Unembed
from ..core.cross_entropy import cross_entropy, cross_entropy_slopes
from ..core.errors import LayersimError
from ..core.wording import brief
from ..data.labels import NO_LABEL

Weights = Literal["linear", "uniform"] | Sequence[int | float]
Norm = Literal["final", "none"]
# Largest number of logits in memory.
LOGITS = 2**23


def layer_weights(weights: Weights, n_layers: int) -> list[float]:
    """List of each layer's weight in the aligned loss, first layer first. The weights sum to 1.

    Raises:
        LayersimError: there is not one weight for each layer, a weight is negative, or they do not sum to 1.

    Examples:
        >>> layer_weights("linear", 3)
        [0.16666666666666666, 0.3333333333333333, 0.5]
    """
    if weights == "linear":
        return [2 * layer / (n_layers * (n_layers + 1)) for layer in range(1, n_layers + 1)]
    if weights == "uniform":
        return [1 / n_layers] * n_layers
    numbers = [float(weight) for weight in weights]
    if not numbers or len(numbers) != n_layers or not min(numbers) >= 0 or not math.isclose(sum(numbers), 1, rel_tol=1e-6):
        raise LayersimError(
            f"`weights` is {brief(weights)}; it must have {n_layers} numbers, one for each layer, of 0 or more and with sum 1."
        )
    return numbers


def positions_with_targets(reads: str, targets: Tensor, attended: Tensor | None, positions: int) -> tuple[Tensor, Tensor]:
    """Flat indices of the positions with a target, and the targets. An index counts positions of the flattened `batch pos`.

    Args:
        reads: see `Head`. For "rows", the position is the first of each row.
        targets: `batch pos`, or `batch` for a head that predicts a class for a row; NO_LABEL for no target. Targets at padding
            do not count.
        attended: attention mask `batch pos`; None without padding.
        positions: number of positions in a row of the residual stream.
    """
    if reads == "every":
        if targets.shape[-1] != positions:
            raise LayersimError(
                f"`labels` has {targets.shape[-1]} labels per row; it must have one for each of the {positions} positions of "
                "the residual stream. Soft prompts and image patches add positions."
            )
        if attended is not None:
            targets = targets.where(attended.to(targets.device) > 0, NO_LABEL)
        flat = targets.flatten()
        index = (flat != NO_LABEL).nonzero()[:, 0]
        return index, flat[index]
    rows = (targets != NO_LABEL).nonzero()[:, 0]
    column = torch.zeros_like(targets)
    if reads == "last":
        column += positions - 1
        if attended is not None:
            # The last attended position of each row, also with padding between or before the tokens.
            column_numbers = torch.arange(positions, device=attended.device)
            column = (attended * column_numbers).amax(1).to(targets.device)
    return rows * positions + column[rows], targets[rows]


def summed_loss(unembed: Unembed, x: Tensor, targets: Tensor, weights: Tensor, head: nn.Linear | None = None) -> Tensor:
    """Weighted sum of cross-entropies in nats, computed in chunks of tokens.

    Args:
        unembed: the model's final norm and head.
        x: `token d_model`, residuals, after the final norm if it is applied.
        targets: `token`.
        weights: `token`, the weight of each cross-entropy.
        head: replaces the last part of the model's own head.
    """
    linear = unembed.linear if head is None else head
    with torch.autocast(x.device.type, enabled=False):
        if not len(x):
            return x.float().sum() * 0
        if linear is not None and len(unembed.parts) == 1 and unembed.soft_cap is None:
            weight = linear.weight
            # The scale multiplies logits, thus the bias as well as the product with x.
            bias = None if linear.bias is None else linear.bias * unembed.scale
            scaled_x = x.to(weight.dtype) * unembed.scale
            loss: Tensor = _LinearHeadLoss.apply(scaled_x, weight, bias, targets, weights)  # type: ignore[no-untyped-call]
            return loss
        return _loss_in_chunks(unembed, x, targets, weights, head)


class _LinearHeadLoss(torch.autograd.Function):
    """Autograd function of `summed_loss` for a linear head. The forward pass also computes the gradients.

    torch's `linear_cross_entropy` has no weights of rows: it would be called for each layer, and hold a gradient of the whole
    head for each call.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, weights: Tensor) -> Tensor:
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        refuse_other_labels(targets, len(weight))
        x_needs_gradient, weight_needs_gradient, bias_needs_gradient = ctx.needs_input_grad[:3]
        total = torch.zeros((), dtype=wide if x.device.type == "mps" else torch.float64, device=x.device)
        d_x = torch.empty_like(x) if x_needs_gradient else None
        d_weight = torch.zeros_like(weight, dtype=wide) if weight_needs_gradient else None
        d_bias = torch.zeros_like(weight[:, 0], dtype=wide) if bias_needs_gradient else None
        for rows in chunks(len(x), len(weight)):
            logits = torch.nn.functional.linear(x[rows], weight, bias).to(wide)
            if d_x is None and d_weight is None:
                total += (cross_entropy(logits, targets[rows]).to(total) * weights[rows]).sum()
                continue
            # The slopes overwrite the logits.
            losses, slopes = cross_entropy_slopes(logits, targets[rows], weights[rows])
            del logits
            total += (losses * weights[rows]).sum()
            if d_bias is not None:
                d_bias += slopes.sum(0)
            slopes = slopes.to(weight.dtype)
            if d_x is not None:
                d_x[rows] = slopes @ weight
            if d_weight is not None:
                d_weight += (slopes.T @ x[rows]).to(wide)
        gradients = (d_x, d_weight, d_bias)
        ctx.save_for_backward(*(gradient for gradient in gradients if gradient is not None))
        ctx.has_gradient = [gradient is not None for gradient in gradients]
        ctx.dtype = weight.dtype
        return total.to(wide)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        saved_gradients = iter(ctx.saved_tensors)
        gradients: list[Tensor | None] = []
        for has_gradient in ctx.has_gradient:
            gradients.append((next(saved_gradients) * slope).to(ctx.dtype) if has_gradient else None)
        # Targets and weights of tokens have no gradient.
        return (*gradients, None, None)


class _LossOfLogits(torch.autograd.Function):
    """Autograd function from logits to the weighted sum of cross-entropies. The forward pass also computes the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        losses, slopes = cross_entropy_slopes(logits.clone(), targets, weights)
        ctx.save_for_backward(slopes)
        return (losses * weights).sum().to(logits.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return slopes * slope, None, None


def _loss_in_chunks(unembed: Unembed, x: Tensor, targets: Tensor, weights: Tensor, head: nn.Linear | None) -> Tensor:
    """Weighted sum of cross-entropies in nats, for a head that is not one linear layer."""

    def loss(chunk: Tensor, chunk_targets: Tensor, chunk_weights: Tensor) -> Tensor:
        logits = logits_at(unembed, chunk, head)
        refuse_other_labels(chunk_targets, logits.shape[-1])
        weighted: Tensor = _LossOfLogits.apply(logits, chunk_targets, chunk_weights)  # type: ignore[no-untyped-call]
        return weighted

    with torch.no_grad():
        vocabulary = logits_at(unembed, x[:1], head).shape[-1]
    parts = (checkpoint(loss, x[at], targets[at], weights[at], use_reentrant=False) for at in chunks(len(x), vocabulary))
    return torch.stack(list(parts)).sum()


def refuse_other_labels(targets: Tensor, vocabulary: int, of: str = "") -> None:
    """Raise an error if a target is not a class of the head.

    Args:
        targets: targets of any shape, without NO_LABEL.
        vocabulary: number of logits of the head.
        of: words that follow "labels" in the message.

    Raises:
        LayersimError: a target is below 0, or not below `vocabulary`.
    """
    if not 0 <= int(targets.min()) <= int(targets.max()) < vocabulary:
        raise LayersimError(
            f"`labels`{of} has values from {int(targets.min())} to {int(targets.max())}; the classes of the model are 0 to "
            f"{vocabulary - 1}."
        )


def chunks(count: int, vocabulary: int) -> Iterator[slice]:
    """Slices that divide `count` tokens into chunks of at most `LOGITS` logits."""
    size = max(1, LOGITS // vocabulary)
    return (slice(start, start + size) for start in range(0, count, size))


def logits_at(unembed: Unembed, x: Tensor, head: nn.Linear | None) -> Tensor:
    """Logits of normed residuals, in float32 or float64. `head` replaces the last linear layer of the model's own head."""
    if head is None:
        logits = unembed(x, normed=False)
    else:
        logits = unembed.finish(head(unembed.features(x, normed=False).to(head.weight.dtype)))
    return logits if logits.dtype == torch.float64 else logits.float()
