"""Least-squares fits of adapters from sums over tokens.

`own_moments` and `cross_moments` travel to NDIF servers as source: they need torch and the standard library alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Features = Callable[[Tensor], Tensor]
# Eigenvalues of the features' Gram matrix below this fraction of the largest one are rounding.
RANK = 1e-13


def own_moments(features: Features, hidden: Tensor) -> dict[str, Tensor]:
    """Sums over tokens of the front's features.

    Args:
        features: see `AdapterKind.features`.
        hidden: `token d_front`, the front's residuals.

    Returns:
        `count`; `u`, `d_front`, the sum of the features; `uu`, `d_front d_front`, the sum of their outer products.
    """
    u = features(hidden.double())
    return {"count": torch.tensor(u.shape[0]), "u": u.sum(0), "uu": u.T @ u}


def cross_moments(
    features: Features, adds_residual: Callable[[int, int], bool], hidden: Tensor, target: Tensor
) -> dict[str, Tensor]:
    """Sums over tokens of the back's residuals, and of their products with the front's features.

    Args:
        features: see `AdapterKind.features`.
        adds_residual: see `AdapterKind.adds_residual`; where it holds, the front's residual is taken off the target.
        hidden: `token d_front`, the front's residuals.
        target: `token d_back`, the back's residuals.

    Returns:
        `t`, `d_back`, the sum of the targets; `ut`, `d_front d_back`, the sum of the outer products; `tt`, the sum of squares.
    """
    hidden, target = hidden.double(), target.double()
    u = features(hidden)
    if adds_residual(hidden.shape[-1], target.shape[-1]):
        target = target - hidden
    return {"t": target.sum(0), "ut": u.T @ target, "tt": target.square().sum()}


def solve(moments: Mapping[str, Tensor], ridge: float, bias: bool) -> tuple[Tensor, Tensor | None, float]:
    """The weight and bias that minimise the squared distance to the back's residuals, and their R².

    Args:
        moments: sums of `own_moments` and `cross_moments` over all tokens.
        ridge: the diagonal of X'X is raised by this fraction of itself.
        bias: whether there is a bias. Features and targets are then centred.

    Returns:
        `d_back d_front`, `d_back` or None, and R² over the tokens of the fit (of an adapter that adds the residual: R² of the
        rest).
    """
    n, uu, ut = float(moments["count"]), moments["uu"], moments["ut"]
    if bias:
        uu = uu - torch.outer(moments["u"], moments["u"]) / n
        ut = ut - torch.outer(moments["u"], moments["t"]) / n
    # Features of very different sizes, as massive activations are, would cost digits, and a penalty of all features.
    size = uu.diagonal().clamp(min=0).sqrt()
    size = torch.where(size > 0, size, 1.0)
    damped = uu / size / size[:, None]
    values, vectors = torch.linalg.eigh(damped + ridge * torch.diag(damped.diagonal()))
    # Directions that no token has are left at zero, which gives the smallest weights.
    inverse = torch.where(values > RANK * values[-1], 1.0 / values, 0.0)
    weight = ((vectors * inverse) @ (vectors.T @ (ut / size[:, None]))).T / size
    offset = (moments["t"] - weight @ moments["u"]) / n if bias else None
    total = moments["tt"] - (moments["t"].square().sum() / n if bias else 0.0)
    left = total - 2 * (weight.T * ut).sum() + ((weight @ uu) * weight).sum()
    return weight, offset, float(1.0 - left / total) if total > 0 else float("nan")
