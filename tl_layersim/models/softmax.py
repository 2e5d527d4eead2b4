"""Cross-entropy and confidence of logits, in float64: the package's only ones beside the lens, which equals them.

Plain functions of torch: they travel with the kernels that call them. `torch.nn.functional.cross_entropy` adds up a float32
vocabulary in float32, which biases it: by -6e-5 nats for 152,000 ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Logits at once in float64: on a CPU so that the passes over them find them in its cache.
CPU_BLOCK, DEVICE_BLOCK = 2**16, 2**24
# What is so far below the largest logit weighs nothing, and a CPU takes a hundred times longer over its exponential.
LEAST = {torch.float64: -700.0, torch.float32: -80.0}


def on_float64_device(x: Tensor) -> Tensor:
    """The tensor where float64 exists: on the CPU if it is on an Apple GPU."""
    return x.cpu() if x.device.type == "mps" else x


def block_size(z: Tensor) -> int:
    """How many logits are widened to float64 at once."""
    return CPU_BLOCK if z.device.type == "cpu" else DEVICE_BLOCK


def cross_entropy(z: Tensor, right: Tensor) -> Tensor:
    """`row`, float64: -ln softmax(z)[right] in nats of logits `row vocabulary` in any dtype, without a derivative.

    Args:
        z: logits.
        right: `row`, ids from 0 to vocabulary - 1.
    """
    z = on_float64_device(z.detach())
    right = right.to(z.device)
    losses = torch.empty(len(z), dtype=torch.float64, device=z.device)
    size = max(1, block_size(z) // z.shape[-1])
    for start in range(0, len(z), size):
        rows = slice(start, start + size)
        losses[rows] = _shifted(z[rows].to(torch.float64, copy=True), right[rows])[0]
    return losses


def cross_entropy_slopes(z: Tensor, right: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """`cross_entropy` for training: beside it the derivative by z of the sum of `share` times it, both without a graph.

    Exponentials are those of z's own float32 or float64, which a GPU makes much faster; they are added up in float64, so the
    cross-entropy is that of float64 to about 1e-7.

    Args:
        z: float32 or float64 logits `row vocabulary`; overwritten if it needs no gradient.
        right: `row`, ids from 0 to vocabulary - 1.
        share: `row`, what each row counts.

    Returns:
        `row`, float64 (float32 on Apple GPUs); and `row vocabulary`, in z's dtype.
    """
    away = z.detach().clone() if z.requires_grad else z
    losses, total = _shifted(away, right)
    counts = share.to(total)[:, None]
    slopes = away.mul_((counts / total).to(away.dtype)).scatter_add_(-1, right[:, None], -counts.to(away.dtype))
    return losses, slopes


def _shifted(z: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy `row`, and `row 1`, the sum of exponentials of z less its largest, which z is overwritten with."""
    wide = torch.float32 if z.device.type == "mps" else torch.float64
    z.sub_(z.amax(-1, keepdim=True))
    said = z.gather(-1, right[:, None])[:, 0].to(wide)
    total = z.clamp_(min=LEAST[z.dtype]).exp_().sum(-1, keepdim=True, dtype=wide)
    return total.log()[:, 0] - said, total


def confidence(z: Tensor, margin: bool = False) -> Tensor:
    """`row`, float64: the largest probability under softmax of logits `row vocabulary`; less the second largest for `margin`.

    Args:
        z: logits, in any dtype.
        margin: whether the second largest is subtracted.
    """
    z = on_float64_device(z)
    out = torch.empty(len(z), dtype=torch.float64, device=z.device)
    size = max(1, block_size(z) // z.shape[-1])
    for start in range(0, len(z), size):
        rows = slice(start, start + size)
        best = z[rows].topk(2, -1).values.double() if margin else z[rows].amax(-1, keepdim=True).double()
        total = z[rows].to(torch.float64, copy=True).sub_(best[:, :1]).clamp_(min=LEAST[torch.float64]).exp_().sum(-1)
        out[rows] = (-torch.expm1(best[:, 1] - best[:, 0]) if margin else 1.0) / total
    return out
