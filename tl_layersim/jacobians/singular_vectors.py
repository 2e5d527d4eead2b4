"""Top singular vectors of Jacobians, by full SVD or block Golub-Kahan-Lanczos.

This module is serialised by value and runs on NDIF servers too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .jacobian import Jacobian

# Krylov: largest error of the singular vectors relative to the largest singular value, and number of additional vectors.
TOLERANCE, OVERSAMPLING = 1e-4, 6


@dataclass(frozen=True)
class Top:
    """The top singular triplets of each sample's Jacobian.

    Attributes:
        u: `sample d_model k`, left singular vectors.
        s: `sample k`, singular values in descending order.
        v: `sample d_model k`, right singular vectors.
        residual: `sample`, the largest |J'u_i - s_i v_i| over i, divided by s_1; 0 for a full decomposition.
        products: number of products with J or J'.
    """

    u: Tensor
    s: Tensor
    v: Tensor
    residual: Tensor
    products: int


def top_of(dense: Tensor, k: int) -> Top:
    """Top singular triplets by full SVD.

    Args:
        dense: `sample d_model d_model`, dense Jacobians.
        k: number of triplets.
    """
    u, s, vh = torch.linalg.svd(dense)
    exact = torch.zeros(len(dense), dtype=dense.dtype, device=dense.device)
    return Top(u[..., :k], s[..., :k], vh[..., :k, :].mT, exact, dense.shape[-1])


def krylov(jacobian: Jacobian, k: int, seed: int) -> Top:
    """Top singular triplets by block Golub-Kahan-Lanczos with full reorthogonalisation, from a random block.

    Iterates until the residual is at most `TOLERANCE`. Source: Golub, Luk and Overton 1981; randomised block Krylov in Musco
    and Musco 2015 (arXiv 1504.05477).

    Args:
        jacobian: products with J and J'.
        k: number of triplets.
        seed: seed of the random block.
    """
    samples, d = len(jacobian.row), jacobian.d_model
    width = min(k + OVERSAMPLING, d)
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(samples, d, width, generator=generator, dtype=torch.float64)
    block = torch.linalg.qr(start.to(jacobian.row.device, jacobian.dtype))[0]
    left, right, images, back = [list[Tensor]() for _ in range(4)]
    products = 0
    while True:
        right.append(block)
        images.append(jacobian.forward(block))
        left.append(orthogonal_to(images[-1], left, generator))
        back.append(jacobian.transposed(left[-1]))
        products += 2 * block.shape[-1]
        u_all, v_all = torch.cat(left, -1), torch.cat(right, -1)
        image, back_all = torch.cat(images, -1), torch.cat(back, -1)
        x, s, yh = torch.linalg.svd(u_all.mT @ image)
        u, v = u_all @ x[..., :k], v_all @ yh[..., :k, :].mT
        off = (back_all @ x[..., :k] - v * s[..., None, :k]).norm(dim=-2).amax(-1) / s[..., 0].clamp(min=1e-30)
        left_room = d - v_all.shape[-1]
        if left_room == 0 or bool((off <= TOLERANCE).all()):
            return Top(u, s[..., :k], v, off, products)
        block = orthogonal_to(back[-1][..., : min(width, left_room)], right, generator)


def orthogonal_to(block: Tensor, basis: list[Tensor], generator: torch.Generator) -> Tensor:
    """Orthonormalise `block` against `basis`; random directions replace linearly dependent columns.

    Args:
        block: `sample d_model n`.
        basis: orthonormal blocks.
        generator: generator of the random directions.
    """

    def without(x: Tensor) -> Tensor:
        for known in basis:
            x = x - known @ (known.mT @ x)
        return x

    # A column counts as dependent if less than this fraction of it remains, which is rounding error. Random ones lose little.
    remaining = 1e-4
    for _ in range(8):
        size = block.norm(dim=-2).clamp(min=1e-30)
        block, r = torch.linalg.qr(without(block))
        dependent = r.diagonal(dim1=-2, dim2=-1).abs() <= remaining * size
        if not bool(dependent.any()):
            break
        drawn = torch.randn(block.shape, generator=generator, dtype=torch.float64).to(block)
        block = torch.where(dependent[..., None, :], drawn / drawn.norm(dim=-2, keepdim=True), block)
        remaining = 1e-2
    # Twice more: the remainder of a column that lost nearly all of its length is not orthogonal up to rounding.
    block = torch.linalg.qr(without(block))[0]
    return torch.linalg.qr(without(block))[0]  # type: ignore[no-any-return]  # torch does not say
