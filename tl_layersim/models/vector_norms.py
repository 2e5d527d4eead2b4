"""Directions and Euclidean norms of vectors of any finite size; the square of a float32 above 1.8e19 is infinite.

Plain functions of torch: they are serialised by value with the kernels that call them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors divided by their largest absolute entry, and this entry of each, `... 1`; a zero vector stays zero.

    The entries are constants to autograd, which does not change the gradient of a cosine.

    Args:
        x: `... width`.

    Examples:
        >>> scaled(torch.tensor([[0.0, -4e30], [0.0, 0.0]]))
        (tensor([[ 0., -1.],
                [ 0.,  0.]]), tensor([[4.0000e+30],
                [0.0000e+00]]))
    """
    largest = torch.maximum(x.detach().amax(-1, keepdim=True), -x.detach().amin(-1, keepdim=True))
    return x / largest.where(largest > 0, 1), largest


def unit_vectors(x: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors `... width` divided by their norm, in the dtype of `x`, and the norms `...` in float64; a zero vector stays zero.

    Args:
        x: `... width`.

    Examples:
        >>> unit, norm = unit_vectors(torch.tensor([[3e30, 4e30], [0.0, 0.0]]))
        >>> unit, [f"{value:.3g}" for value in norm]
        (tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]]), ['5e+30', '0'])
    """
    unit, largest = scaled(x)
    length = torch.linalg.vector_norm(unit, dim=-1, keepdim=True, dtype=torch.float64)
    return unit.div_(length.where(length > 0, 1).to(x.dtype)), (length * largest)[..., 0]


def norms(x: Tensor) -> Tensor:
    """Norms of vectors `... width` in float64, `...`.

    Args:
        x: `... width`.
    """
    unit, largest = scaled(x)
    found: Tensor = torch.linalg.vector_norm(unit, dim=-1, dtype=torch.float64) * largest[..., 0]
    return found
