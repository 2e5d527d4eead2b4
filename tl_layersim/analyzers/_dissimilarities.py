"""Dissimilarities between the samples of a minibatch at each layer, for `RSA` and `MutualKNN`.

Plain functions of torch: they are serialised by value with the kernels that call them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..models.vector_norms import unit_vectors
from ._hsic import beyond_rounding


def dissimilarities(x: Tensor, widths: tuple[int, ...], *, kind: str) -> Tensor:
    """Dissimilarities between samples, `layer n n` in float32, with a zero diagonal.

    They are computed in float64 and rounded to float32, so that equal samples have equal dissimilarities, and ties are ties.

    Args:
        x: `layer n d_model`.
        widths: of the layers; narrower ones are padded with zeros. Empty for layers of one width.
        kind: "correlation" is 1 minus the Pearson correlation over dimensions, "cosine" 1 minus the cosine, "euclidean" the
            distance. A vector without direction has correlation or cosine 0 with all others.
    """
    x = x.double()
    if kind == "euclidean":
        # Distances do not change with the mean, which would use up digits.
        x = x - x.mean(1, keepdim=True)
        norm = x.square().sum(-1)
        gram = torch.bmm(x, x.transpose(1, 2))
        both = norm[:, :, None] + norm[:, None, :]
        squared = both - 2 * gram
        distance = squared.where(squared > 64 * torch.finfo(x.dtype).eps * both, 0).sqrt()
        return _without_diagonal(distance)
    mean = torch.zeros_like(x[..., :1])
    if kind == "correlation":
        width = x.new_tensor(widths or [x.shape[-1]] * len(x))[:, None, None]
        mean = x.sum(-1, keepdim=True) / width
        inside = torch.arange(x.shape[-1], device=x.device) < width
        x = (x - mean) * inside
    known = beyond_rounding(x, mean)
    unit = unit_vectors(x)[0] * known[..., None]
    apart = 1 - torch.bmm(unit, unit.transpose(1, 2))
    return _without_diagonal(apart.where(apart > 64 * torch.finfo(x.dtype).eps, 0))


def _without_diagonal(matrix: Tensor) -> Tensor:
    matrix = (matrix + matrix.transpose(1, 2)) / 2
    matrix.diagonal(dim1=1, dim2=2).zero_()
    return matrix.float()


def average_ranks(values: Tensor) -> Tensor:
    """Ranks within each row, from 1, in float64; equal values share the mean of their ranks.

    Args:
        values: `layer pair`.
    """
    ordered, order = values.sort(1)
    place = torch.arange(1, values.shape[1] + 1, device=values.device, dtype=torch.float64).expand(values.shape)
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    ends = torch.ones_like(starts)
    ends[:, :-1] = starts[:, 1:]
    first = place.where(starts, 0).cummax(1).values
    last = place.where(ends, torch.inf).flip(1).cummin(1).values.flip(1)
    return torch.empty_like(first).scatter_(1, order, (first + last) / 2)
