"""HSIC over all samples in one pass, from cross-products and moments: the exact estimator of `CKA`.

`exact_kernel` is a plain function of torch: it is serialised by value and also runs on a server.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..core.sums import Sums
from ..models.view import View
from ._hsic import MOMENTS, hsic_from_moments, moments


def exact_kernel(*views: View, rows: partial[Tensor]) -> dict[str, Tensor]:
    """Cross-products and moments of one batch, float64: their sums over batches determine HSIC_1 over all samples.

    Args:
        *views: of one model, or of two models on the same tokens.
        rows: takes a view and returns its samples, `layer sample d_model`.

    Returns:
        Fields `xy.*` for all pairs of layers; with two views, also `xx.*` and `yy.*` for each layer with itself.
    """
    x = rows(views[0]).double()
    y = x if len(views) == 1 else rows(views[-1]).to(x.device).double()
    out = {f"xy.{name}": value for name, value in moments(x, y).items()}
    if len(views) == 2:
        for own, z in (("xx", x), ("yy", y)):
            per_layer = [moments(layer[None], layer[None]) for layer in z]
            out |= {f"{own}.{name}": torch.stack([m[name] for m in per_layer]) for name in per_layer[0]}
    return out | {"samples": torch.tensor(x.shape[1])}


def exact_hsic(sums: Sums) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """HSIC_1 over all samples, from the summed output of `exact_kernel`.

    Args:
        sums: of all batches.

    Returns:
        HSIC_1 of all pairs of layers, `row column`; of each row layer with itself, `row`; of each column layer with itself,
        `column`; and the effective samples of both, `row` and `column`.
    """
    n = int(sums["samples"])

    def of(which: str, layer: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        m = {name: sums[f"{which}.{name}"] for name in MOMENTS}
        return hsic_from_moments(m if layer is None else {name: value[layer] for name, value in m.items()}, n)

    cross, r, r_r = of("xy")
    if "xx.x" not in sums.fields:
        effective = r.square() / r_r.diagonal()
        return cross, cross.diagonal(), cross.diagonal(), effective, effective
    own, effective_samples = [], []
    for which in ("xx", "yy"):
        layers = [of(which, layer) for layer in range(len(sums[f"{which}.x"]))]
        own.append(torch.stack([hsic[0, 0] for hsic, _, _ in layers]))
        effective_samples.append(torch.stack([r[0].square() / r_r[0, 0] for _, r, r_r in layers]))
    return cross, own[0], own[1], effective_samples[0], effective_samples[1]


def is_above_rounding(sums: Sums, own: Tensor, r: str) -> Tensor:
    """Whether the HSIC of each layer with itself is above the rounding error of its float64 sums.

    The sums are uncentred: where the mean is much larger than the spread, the subtraction of the mean leaves no digits.

    Args:
        sums: of all batches.
        own: `layer`, the HSIC of each layer with itself.
        r: the name of the sum of squared norms, such as "xy.r_x".

    Returns:
        `layer`, bool.
    """
    n = int(sums["samples"])
    return own * n * (n - 3) > 1e4 * torch.finfo(torch.float64).eps * sums[r].square()
