"""The final norm and the head as a linear map of the residual, at the scale that the norm has there.

These are plain functions of torch, which are shipped with the kernels that call them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..architectures.unembed import Unembed, rounding

# A centring norm changes by rounding if all dimensions are raised; any other norm changes by far more.
CENTRED_WITHIN = 0.01


@dataclass(frozen=True)
class LinearTail:
    """The logit of a token as a linear function of the residual: logit = <x, direction> + bias, at each position.

    Attributes:
        direction: `token width`, in float64. The scale of the final norm is that of the position's own residual.
        bias: `token`, what the biases of the norm and of the head add.
        logit: `token`, the logit that the norm and the head give, in the model's dtype.
        bent: `token`, whether the norm or the head is not linear there.
    """

    direction: Tensor
    bias: Tensor
    logit: Tensor
    bent: Tensor


def linear_tail(unembed: Unembed, x: Tensor, ids: Tensor, against: Tensor | None) -> LinearTail:
    r"""Linearise norm and head at residuals, for the logit of one token at each position.

    A layer norm is $y = w \odot (x - \bar x) / \sigma(x) + b$, and an RMS norm the same without the mean. With the scale
    $\sigma$ held at its value, both are linear in x. Weight, bias, scale and centring are read from outputs of the norm, and
    the direction of the head from its gradient; both are compared with what the modules return.

    Args:
        unembed: the model's logit lens.
        x: `token width`, outputs of the last block.
        ids: `token`, ids of the tokens whose logits are followed.
        against: `token`, ids of tokens whose logits are subtracted; None for none.
    """
    weight, offset, is_centred = _norm_parameters(unembed, x)
    normed = unembed.normed(x).to(x.device)
    residual = x.double()
    if is_centred:
        residual = residual - residual.mean(-1, keepdim=True)
    scaled = weight * residual
    out = normed.double() - offset
    # The factor of least squares.
    scale = (scaled * out).sum(-1) / scaled.square().sum(-1)
    allowed = rounding(unembed.norm_dtype or unembed.dtype or torch.float32)
    is_linear = (out - scale[:, None] * scaled).norm(dim=-1) <= allowed * out.norm(dim=-1)

    gradient, logit = _head_gradient(unembed, normed, ids, against)
    # What the head gives without a residual.
    constant = _at_ids(unembed(torch.zeros_like(normed[:1]), False).expand(len(ids), -1), ids, against)
    gap = ((gradient * normed.double()).sum(-1) + constant - logit).abs()
    allowed = rounding(unembed.dtype or torch.float32)
    is_linear &= gap <= allowed * (gradient.norm(dim=-1) * normed.double().norm(dim=-1) + constant.abs())

    direction = gradient * weight
    if is_centred:
        # The part of the residual that the norm subtracts is of no effect.
        direction = direction - direction.mean(-1, keepdim=True)
    bias = (gradient * offset).sum(-1) + constant
    return LinearTail(scale[:, None] * direction, bias, logit, ~is_linear)


def _norm_parameters(unembed: Unembed, x: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Weight and bias of the final norm (each `width`, float64), and whether it subtracts the mean over dimensions.

    The weight is up to a factor, which the scale at each position contains.

    Args:
        unembed: the model's logit lens.
        x: residuals, `token width`, for width and device.
    """
    width = x.shape[-1]
    if unembed.norm is None:
        return x.new_ones(width).double(), x.new_zeros(width).double(), False
    # A vector without a zero and with mean 0.
    probe = x.new_ones(1, width)
    probe[:, 1::2] = -1
    probe = probe - probe.mean()
    inputs = torch.cat([torch.zeros_like(probe), probe, probe + 1])
    offset, of_probe, of_raised = unembed.normed(inputs).to(x.device).double()
    of_probe = of_probe - offset
    of_raised = of_raised - offset
    is_centred = bool((of_raised - of_probe).norm() < CENTRED_WITHIN * of_probe.norm())
    return of_probe / probe[0].double(), offset, is_centred


def _head_gradient(unembed: Unembed, normed: Tensor, ids: Tensor, against: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradient of each position's logit by the normed residual (`token width`), and the logit (`token`); both float64."""
    with torch.enable_grad():
        inputs = normed.detach().requires_grad_(True)
        logits = _at_ids(unembed(inputs, False), ids, against)
        # No logit depends on another position, so the gradient of the sum has the gradient of each.
        [gradient] = torch.autograd.grad(logits.sum(), inputs)
    return gradient.double(), logits.detach()


def _at_ids(logits: Tensor, ids: Tensor, against: Tensor | None) -> Tensor:
    """The logit of one id at each position, minus that of another (`token`, float64, on the device of the ids)."""
    of_ids = logits.gather(-1, ids[:, None].to(logits.device))[:, 0].to(ids.device).double()
    if against is None:
        return of_ids
    of_others = logits.gather(-1, against[:, None].to(logits.device))[:, 0].to(ids.device).double()
    return of_ids - of_others
