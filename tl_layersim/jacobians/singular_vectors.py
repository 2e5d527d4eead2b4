"""The top singular vectors of Jacobians: by a full decomposition, or by products alone.

All of it travels to NDIF servers by value, as source, see `calls.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .products import Jacobian

# Krylov: how far from singular vectors they may be, as a share of the largest singular value, and how many more are kept.
TOLERANCE, SPARE = 1e-4, 6


@dataclass(frozen=True)
class Top:
    """The top singular triplets of each sample's Jacobian.

    Attributes:
        u: `sample d_model k`, left.
        s: `sample k`, descending.
        v: `sample d_model k`, right.
        residual: `sample`, the largest |J'u_i - s_i v_i| over i, as a share of s_1; 0 of a full decomposition.
        products: how many products with J or J' they took.
    """

    u: Tensor
    s: Tensor
    v: Tensor
    residual: Tensor
    products: int


def top_of(dense: Tensor, k: int) -> Top:
    """By the full decomposition of `sample d_model d_model`."""
    u, s, vh = torch.linalg.svd(dense)
    exact = torch.zeros(len(dense), dtype=dense.dtype, device=dense.device)
    return Top(u[..., :k], s[..., :k], vh[..., :k, :].mT, exact, dense.shape[-1])


def krylov(jacobian: Jacobian, k: int, seed: int) -> Top:
    """By block Golub-Kahan-Lanczos with full reorthogonalisation, from a random block, until residuals are small.

    Golub, Luk and Overton 1981; randomised block Krylov in Musco and Musco 2015 (arXiv 1504.05477).
    """
    samples, d = len(jacobian.row), jacobian.d_model
    width = min(k + SPARE, d)
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
    """An orthonormal basis of what the block adds to others; where it adds nothing, random directions complete it."""

    def without(x: Tensor) -> Tensor:
        for known in basis:
            x = x - known @ (known.mT @ x)
        return x

    # A direction is spent when so little of it is left; what is left is rounding. Drawn ones lose little.
    share = 1e-4
    for _ in range(8):
        size = block.norm(dim=-2).clamp(min=1e-30)
        block, r = torch.linalg.qr(without(block))
        spent = r.diagonal(dim1=-2, dim2=-1).abs() <= share * size
        if not bool(spent.any()):
            break
        drawn = torch.randn(block.shape, generator=generator, dtype=torch.float64).to(block)
        block, share = torch.where(spent[..., None, :], drawn / drawn.norm(dim=-2, keepdim=True), block), 1e-2
    # Once more: what was left of a column that lost nearly all is not orthogonal to rounding.
    block = torch.linalg.qr(without(block))[0]
    return torch.linalg.qr(without(block))[0]  # type: ignore[no-any-return]  # torch does not say
