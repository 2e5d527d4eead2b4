"""Cross-entropy of logits, its gradient, and the confidence of predictions, with sums in float64.

These are plain functions of torch, which are shipped with the kernels that call them. `torch.nn.functional.cross_entropy` sums
a float32 vocabulary in float32, which biases it: by -6e-5 nats for 152,000 ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import LayersimError

# Number of logits that are widened to float64 at once; on a CPU so that they fit its cache.
CPU_BLOCK = 2**16
DEVICE_BLOCK = 2**24
# Differences to the largest logit are clamped here: such terms do not change a sum, and their exponential takes a CPU a hundred
# times longer.
LEAST = {torch.float64: -700.0, torch.float32: -80.0}


def on_float64_device(x: Tensor) -> Tensor:
    """Move a tensor from an Apple GPU, which has no float64, to the CPU. Other tensors stay where they are."""
    return x.cpu() if x.device.type == "mps" else x


def block_size(z: Tensor) -> int:
    """Number of logits that are converted to float64 at once."""
    return CPU_BLOCK if z.device.type == "cpu" else DEVICE_BLOCK


def need_classes(outputs: int) -> None:
    """Raise an error if a head has a single output, whose softmax is always 1.

    Every layer would agree with the last one.

    Args:
        outputs: number of logits per position.

    Raises:
        LayersimError: there is one output.
    """
    if outputs == 1:
        raise LayersimError(
            "The model's head has one output; probabilities need two or more. "
            "For regression use lsim.TaskMetrics(labels=scores)."
        )


def cross_entropy(z: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy -ln softmax(z)[target] in nats, float64, without gradients.

    Args:
        z: logits `row vocabulary`, in any dtype.
        target: `row`, ids from 0 to vocabulary - 1.

    Raises:
        LayersimError: there is one class.
    """
    need_classes(z.shape[-1])
    z = on_float64_device(z.detach())
    target = target.to(z.device)
    losses = torch.empty(len(z), dtype=torch.float64, device=z.device)
    size = max(1, block_size(z) // z.shape[-1])
    for start in range(0, len(z), size):
        rows = slice(start, start + size)
        losses[rows] = _cross_entropy_in_place(z[rows].to(torch.float64, copy=True), target[rows])[0]
    return losses


def cross_entropy_slopes(z: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each row, and the gradient of the weighted sum over rows, without autograd.

    Exponentials are computed in the dtype of z, which is much faster on a GPU, and summed in float64. The result differs from a
    float64 computation by about 1e-7.

    Args:
        z: float32 or float64 logits `row vocabulary`; overwritten unless they need a gradient.
        target: `row`, ids from 0 to vocabulary - 1.
        weight: `row`, weight of each row.

    Returns:
        Cross-entropy `row`, float64 (float32 on Apple GPUs); and gradient with respect to z, `row vocabulary`, in z's dtype.

    Raises:
        LayersimError: there is one class.
    """
    need_classes(z.shape[-1])
    slopes = z.detach().clone() if z.requires_grad else z
    losses, total = _cross_entropy_in_place(slopes, target)
    # Now `slopes` holds the numerators of the softmax.
    weights = weight.to(total)[:, None]
    slopes.mul_((weights / total).to(slopes.dtype))
    slopes.scatter_add_(-1, target[:, None], -weights.to(slopes.dtype))
    return losses, slopes


def _cross_entropy_in_place(z: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy and softmax denominator of each row. z is overwritten by the numerators, exp(z - max z)."""
    wide = torch.float32 if z.device.type == "mps" else torch.float64
    z.sub_(z.amax(-1, keepdim=True))
    target_logit = z.gather(-1, target[:, None])[:, 0].to(wide)
    total = z.clamp_(min=LEAST[z.dtype]).exp_().sum(-1, keepdim=True, dtype=wide)
    return total.log()[:, 0] - target_logit, total


def confidence(z: Tensor, margin: bool = False) -> Tensor:
    """Largest softmax probability of each row, or its margin over the second largest; float64.

    Args:
        z: logits `row vocabulary`, in any dtype.
        margin: whether the second largest is subtracted.
    """
    z = on_float64_device(z)
    confidences = torch.empty(len(z), dtype=torch.float64, device=z.device)
    size = max(1, block_size(z) // z.shape[-1])
    for start in range(0, len(z), size):
        rows = slice(start, start + size)
        largest = z[rows].topk(2, -1).values.double() if margin else z[rows].amax(-1, keepdim=True).double()
        exponents = z[rows].to(torch.float64, copy=True).sub_(largest[:, :1])
        total = exponents.clamp_(min=LEAST[torch.float64]).exp_().sum(-1)
        # Freed before the next block is made.
        del exponents
        # The difference of two probabilities keeps its digits if the second is close to the first.
        numerator = -torch.expm1(largest[:, 1] - largest[:, 0]) if margin else 1.0
        confidences[rows] = numerator / total
    return confidences
