"""Hilbert-Schmidt independence criterion (HSIC), the basis of CKA: from Gram matrices, or from moments of all samples.

Plain functions of torch: they are serialised by value with the kernels that call them.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

# Names of the sums that `moments` returns.
MOMENTS = ("x", "y", "cross", "r_x", "r_y", "r_x r_y", "r_x y", "r_y x")
# Rows of a Gram matrix that are one product; smaller products are slower by the FLOP.
GRAM_ROWS = 128


def grams(x: Tensor) -> Tensor:
    """Gram matrices of the centred samples, `layer n n`, in the dtype of the samples.

    The matrix of a layer is exactly 0 if its samples are equal up to rounding.

    Args:
        x: `layer n d_model`, n samples.
    """
    # Centring does not change HSIC. Without it, a large common vector would use up the digits of float32.
    mean = x.mean(1, keepdim=True)
    x = x - mean
    same = ~beyond_rounding(x, mean).any(1)
    if bool(same.any()):
        x = x.masked_fill(same[:, None, None], 0)
    samples = x.shape[1]
    gram = x.new_empty(len(x), samples, samples)
    # The lower triangle is copied: its products would be the largest cost of CKA.
    for start in range(0, samples, GRAM_ROWS):
        end = start + GRAM_ROWS
        gram[:, start:end, start:] = torch.bmm(x[:, start:end], x[:, start:].transpose(1, 2))
        gram[:, end:, start:end] = gram[:, start:end, end:].transpose(1, 2)
    return gram


def beyond_rounding(centred: Tensor, mean: Tensor) -> Tensor:
    """Whether centred samples differ from zero by more than the rounding error of the subtraction, `layer sample`.

    A difference within rounding error has no direction: its cosine, or its weight in CKA, would be arbitrary.

    Args:
        centred: `layer sample d_model`, samples minus their mean.
        mean: the mean, in a shape that broadcasts to `centred`.
    """
    allowed = 16 * torch.finfo(centred.dtype).eps
    # Norms decide almost all samples; the others are compared dimension by dimension.
    beyond: Tensor = centred.norm(dim=-1) > allowed * mean.norm(dim=-1)
    layers, samples = (~beyond).nonzero(as_tuple=True)
    if len(layers):
        mean = mean.expand_as(centred)[layers, samples]
        beyond[layers, samples] = (centred[layers, samples].abs() > allowed * mean.abs()).any(-1)
    return beyond


def centred(gram: Tensor, biased: bool) -> tuple[Tensor, Tensor]:
    """Centre Gram matrices for HSIC, in float64.

    The sum of the product of two U-centred Gram matrices is n(n-3) HSIC_1 (Szekely and Rizzo 2014).

    Args:
        gram: `layer n n`.
        biased: double centring, for HSIC_0; else U-centring with a zero diagonal, for HSIC_1.

    Returns:
        `layer (n n)`, the centred matrices, and `layer n`, the squared distance of each sample from the mean.
    """
    gram = gram.double()
    n = gram.shape[-1]
    r = gram.diagonal(dim1=1, dim2=2).clone()
    if biased:
        gram = gram - gram.mean(1, keepdim=True) - gram.mean(2, keepdim=True) + gram.mean((1, 2), keepdim=True)
    else:
        gram.diagonal(dim1=1, dim2=2).zero_()
        row = gram.sum(2) / (n - 2)
        gram -= row[:, :, None]
        gram -= row[:, None, :]
        gram += (row.sum(1) / (n - 1))[:, None, None]
        gram.diagonal(dim1=1, dim2=2).zero_()
    return gram.flatten(1), r


def moments(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Uncentred sums over samples of x, y, r = |row|^2 and their products.

    Args:
        x: `layer sample d_model`.
        y: `layer sample d_model` of the same samples; layers and width may differ from those of `x`.

    Returns:
        The sums by the names in `MOMENTS`.
    """
    r_x, r_y = x.square().sum(-1), y.square().sum(-1)
    return {
        "x": x.sum(1),
        "y": y.sum(1),
        "cross": rearrange(x, "layer sample d -> (layer d) sample") @ rearrange(y, "layer sample d -> sample (layer d)"),
        "r_x": r_x.sum(1),
        "r_y": r_y.sum(1),
        "r_x r_y": r_x @ r_y.T,
        "r_x y": torch.einsum("an,bnd->abd", r_x, y),
        "r_y x": torch.einsum("bn,and->abd", r_y, x),
    }


def hsic_from_moments(m: dict[str, Tensor], n: int) -> tuple[Tensor, Tensor, Tensor]:
    """HSIC_1 of all pairs of layers from moments.

    n(n-3) HSIC_1 = |X'Y|_F^2 - n/(n-2) sum r^x r^y + sum r^x sum r^y / ((n-1)(n-2)), X and Y centred over all samples.

    Args:
        m: sums over all samples, as from `moments`.
        n: number of samples.

    Returns:
        HSIC_1 `row column`, sum r^x of each row layer, and sum r^x r^y `row column`, all centred.
    """
    mu, nu = m["x"] / n, m["y"] / n
    mu2, nu2 = mu.square().sum(-1), nu.square().sum(-1)
    a, b = len(mu), len(nu)
    frobenius, mu_c_nu = torch.empty(a, b, dtype=torch.float64), torch.empty(a, b, dtype=torch.float64)
    for layer, block in enumerate(rearrange(m["cross"], "(a d) (b e) -> a d b e", a=a, b=b)):
        frobenius[layer] = (block - n * torch.einsum("d,be->dbe", mu[layer], nu)).square().sum((0, 2))
        mu_c_nu[layer] = torch.einsum("d,dbe,be->b", mu[layer], block, nu)
    r_x, r_y = m["r_x"] - n * mu2, m["r_y"] - n * nu2
    r_x_r_y = (
        m["r_x r_y"]
        - 2 * torch.einsum("abd,bd->ab", m["r_x y"], nu)
        - 2 * torch.einsum("abd,ad->ab", m["r_y x"], mu)
        + torch.outer(m["r_x"], nu2)
        + torch.outer(mu2, m["r_y"])
        + 4 * mu_c_nu
        - 3 * n * torch.outer(mu2, nu2)
    )
    hsic = (frobenius - n / (n - 2) * r_x_r_y + torch.outer(r_x, r_y) / ((n - 1) * (n - 2))) / (n * (n - 3))
    return hsic, r_x, r_x_r_y
