"""The aligned loss: every layer's residual, read by the model's own final norm and head, against the right answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..core.errors import LayersimError
from ..data.labels import NO_LABEL
from ..models.softmax import cross_entropy, cross_entropy_slopes
from ..models.unembed import Unembed

Weights = Literal["linear", "uniform"] | Sequence[int | float]
# Logits that are held at once.
LOGITS = 2**23


def layer_weights(weights: Weights, n_layers: int) -> list[float]:
    """The weight of each layer, the first block's first; they sum to 1.

    Raises:
        LayersimError: they are not one for each layer, negative, or do not sum to 1.

    >>> layer_weights("linear", 3)
    [0.16666666666666666, 0.3333333333333333, 0.5]
    """
    if weights == "linear":
        return [2 * layer / (n_layers * (n_layers + 1)) for layer in range(1, n_layers + 1)]
    if weights == "uniform":
        return [1 / n_layers] * n_layers
    if isinstance(weights, str):
        # A text is a sequence too, of nothing where it is empty.
        raise LayersimError(
            f"`weights` cannot be {weights!r}.",
            given=f"weights={weights!r}",
            expected="'linear', 'uniform', or one number for each layer",
            do="weights='linear'",
        )
    found = [float(weight) for weight in weights]
    if not found or len(found) != n_layers or not min(found) >= 0 or not math.isclose(sum(found), 1, rel_tol=1e-6):
        raise LayersimError(
            "These weights do not belong to the layers.",
            given=f"{len(found)} weights that sum to {sum(found):.6g}, the lowest {min(found, default=math.nan):.6g}",
            expected=f"{n_layers} weights of 0 or more that sum to 1",
            do="weights='linear', or weights=[w / sum(ws) for w in ws]",
        )
    return found


def positions_with_targets(reads: str, targets: Tensor, attended: Tensor | None, positions: int) -> tuple[Tensor, Tensor]:
    """Which of the flattened `batch pos` positions the head answers at, and the right answers there.

    Args:
        reads: see `Head`.
        targets: `batch pos`, or `batch` of a head that reads one position of a row; NO_LABEL where nothing is asked.
        attended: `batch pos`, None where there is no padding.
        positions: how many a row has in the residual stream.
    """
    if reads == "every":
        if targets.shape[-1] != positions:
            raise LayersimError(
                "The residual stream has other positions than the labels.",
                given=f"{positions} positions for {targets.shape[-1]} labels in a row",
                expected="one position for each token; soft prompts and image patches add some",
                do="the model without soft prompts",
            )
        flat = targets.flatten()
        index = (flat != NO_LABEL).nonzero()[:, 0]
        return index, flat[index]
    asked = (targets != NO_LABEL).nonzero()[:, 0]
    column = torch.zeros_like(targets)
    if reads == "last":
        column += positions - 1
        if attended is not None:
            at = torch.arange(positions, device=attended.device)
            column = (attended * at).amax(1).to(targets.device)
    return asked * positions + column[asked], targets[asked]


def summed_loss(unembed: Unembed, x: Tensor, wanted: Tensor, share: Tensor, head: Tensor | None = None) -> Tensor:
    """Weighted sum of cross-entropies in nats, in chunks of tokens: logits of a few thousand rows at most are held.

    Args:
        unembed: the model's way to logits.
        x: `token d_model`, residuals after the final norm, if they are to have one.
        wanted: `token`, right answers.
        share: `token`, what each counts.
        head: `vocabulary d_model`, in place of the model's own head.
    """
    linear = unembed.linear
    weight = head if head is not None else None if linear is None else linear.weight
    with torch.autocast(x.device.type, enabled=False):
        if not len(x):
            return x.float().sum() * 0
        if weight is not None and len(unembed.parts) == 1 and unembed.soft_cap is None:
            bias = None if linear is None or linear.bias is None else linear.bias * unembed.scale
            found: Tensor = _Summed.apply(x.to(weight.dtype) * unembed.scale, weight, bias, wanted, share)  # type: ignore[no-untyped-call]
            return found
        return _chunked(unembed, x, wanted, share, head)


class _Summed(torch.autograd.Function):
    """Cross-entropy of a linear head whose derivatives are made along with it, chunk by chunk.

    torch's own `linear_cross_entropy` has no weights of rows: it would be called once for each layer, and hold a gradient of
    the whole head for each until the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, wanted: Tensor, share: Tensor) -> Tensor:
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        refuse_other_labels(wanted, len(weight))
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        total = torch.zeros((), dtype=wide if x.device.type == "mps" else torch.float64, device=x.device)
        d_x = torch.empty_like(x) if for_x else None
        d_weight = torch.zeros_like(weight, dtype=wide) if for_weight else None
        d_bias = torch.zeros_like(weight[:, 0], dtype=wide) if for_bias else None
        for rows in chunks(len(x), rows_at_once(len(weight))):
            z = torch.nn.functional.linear(x[rows], weight, bias).to(wide)
            if d_x is None and d_weight is None:
                total += (cross_entropy(z, wanted[rows]).to(total) * share[rows]).sum()
                continue
            losses, z = cross_entropy_slopes(z, wanted[rows], share[rows])
            total += (losses * share[rows]).sum()
            if d_bias is not None:
                d_bias += z.sum(0)
            z = z.to(weight.dtype)
            if d_x is not None:
                d_x[rows] = z @ weight
            if d_weight is not None:
                d_weight += (z.T @ x[rows]).to(wide)
        ctx.save_for_backward(*(part for part in (d_x, d_weight, d_bias) if part is not None))
        ctx.given = (d_x is not None, d_weight is not None, d_bias is not None)
        ctx.dtype = weight.dtype
        return total.to(wide)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        parts = iter(ctx.saved_tensors)
        return (*((next(parts) * slope).to(ctx.dtype) if given else None for given in ctx.given), None, None)


class _Weighted(torch.autograd.Function):
    """Weighted sum of the cross-entropies of logits, in their dtype, whose derivative is made along with it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor, share: Tensor) -> Tensor:
        losses, slopes = cross_entropy_slopes(logits.clone(), wanted, share)
        ctx.save_for_backward(slopes)
        return (losses * share).sum().to(logits.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return slopes * slope, None, None


def _chunked(unembed: Unembed, x: Tensor, wanted: Tensor, share: Tensor, head: Tensor | None) -> Tensor:
    """The same for heads that are more than a product; the logits of a chunk are made once more in the backward pass."""

    def loss(some: Tensor, right: Tensor, counts: Tensor) -> Tensor:
        logits = logits_at(unembed, some, head)
        refuse_other_labels(right, logits.shape[-1])
        weighted: Tensor = _Weighted.apply(logits, right, counts)  # type: ignore[no-untyped-call]
        return weighted

    with torch.no_grad():
        size = rows_at_once(logits_at(unembed, x[:1], head).shape[-1])
    parts = (checkpoint(loss, x[at], wanted[at], share[at], use_reentrant=False) for at in chunks(len(x), size))
    return torch.stack(list(parts)).sum()


def refuse_other_labels(wanted: Tensor, vocabulary: int) -> None:
    """Refuse answers that the head cannot give."""
    if not 0 <= int(wanted.min()) <= int(wanted.max()) < vocabulary:
        raise LayersimError(
            "A label is none of the model's classes.",
            given=f"labels from {int(wanted.min())} to {int(wanted.max())}",
            expected=f"0 to {vocabulary - 1}, and {NO_LABEL} where nothing is asked",
            do="map the labels to the classes of the model's head",
        )


def chunks(count: int, size: int) -> Iterator[slice]:
    """So many rows as slices of at most that size."""
    return (slice(start, start + size) for start in range(0, count, size))


def rows_at_once(width: int) -> int:
    """How many rows of logits of this width are made at once."""
    return max(1, LOGITS // width)


def logits_at(unembed: Unembed, x: Tensor, head: Tensor | None) -> Tensor:
    """Logits of normed residuals, in float32 or wider."""
    if head is None:
        logits = unembed(x, normed=False)
    else:
        bias = None if unembed.linear is None else unembed.linear.bias
        logits = unembed.finish(torch.nn.functional.linear(x.to(head.dtype), head, bias))
    return logits if logits.dtype == torch.float64 else logits.float()


def attended_count(tokens: Tensor, attended: Tensor | None) -> int:
    """Number of tokens that the model attends to."""
    return tokens.numel() if attended is None else int(attended.sum())
