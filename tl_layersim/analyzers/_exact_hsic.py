"""HSIC over all samples without a Gram matrix, from cross-products of centred samples: the exact estimator of `CKA`.

`means_kernel` and `exact_kernel` are plain functions of torch: they are serialised by value and also run on a server.
"""

from __future__ import annotations

from functools import partial

import torch
from einops import rearrange
from torch import Tensor

from ..core.sums import Sums
from ..models.view import View
from ._hsic import beyond_rounding, tuples_of_rows


def means_kernel(*views: View, rows: partial[Tensor]) -> dict[str, Tensor]:
    """Sums of the samples of each model, and their number.

    Args:
        *views: of one model, or of two models on the same tokens.
        rows: takes a view and returns its samples, `layer sample d_model`.
    """
    totals = [torch.stack([layer.sum(0, dtype=torch.float64) for layer in rows(view)]) for view in views]
    return {"x": totals[0], "y": totals[-1], "count": torch.tensor(rows(views[0]).shape[1])}


def exact_kernel(*views: View, rows: partial[Tensor], means: tuple[Tensor, Tensor], by_row: bool) -> dict[str, Tensor]:
    """Cross-products of one batch, float64: their sums over batches determine HSIC without pairs of one row over all samples.

    Args:
        *views: of one model, or of two models on the same tokens.
        rows: takes a view and returns its samples, `layer sample d_model`.
        means: of the samples of each model, `layer d_model`.
        by_row: whether pairs of one row are left out, not only pairs of a sample with itself.

    Returns:
        Fields `xy.*` for all pairs of layers; with two views, also `xx.*` and `yy.*` for each layer with itself.
    """
    x = _centred(rows(views[0]), means[0])
    y = x if len(views) == 1 else _centred(rows(views[-1]).to(x.device), means[1])
    row = torch.arange(x.shape[1], device=x.device)
    if by_row and rows.keywords["level"] == "token":
        row = torch.unique_consecutive(views[0].sequence, return_inverse=True)[1].to(x.device)
    out = {f"xy.{name}": value for name, value in _products(x, y, row).items()}
    if len(views) == 2:
        for own, z in (("xx", x), ("yy", y)):
            per_layer = [_products(layer[None], layer[None], row) for layer in z]
            out |= {f"{own}.{name}": torch.stack([m[name] for m in per_layer]) for name in per_layer[0]}
    members = torch.bincount(row).double()
    return out | {"samples": torch.tensor(x.shape[1]), "tuples": torch.stack([members.pow(k).sum() for k in range(1, 5)])}


def _centred(x: Tensor, mean: Tensor) -> Tensor:
    """Samples minus their mean, float64, 0 where they differ from it by rounding alone."""
    offset = mean.to(x)[:, None]
    return (x.double() - mean.to(x.device)[:, None]) * beyond_rounding(x - offset, offset)[..., None]


def _products(x: Tensor, y: Tensor, row: Tensor) -> dict[str, Tensor]:
    """Products of centred samples, and of their sums over the samples of a row.

    Args:
        x: `layer sample d_model`.
        y: `layer sample d_model` of the same samples; layers and width may differ from those of `x`.
        row: `sample`, ascending.

    Returns:
        `cross` = X'Y and `between` = S'T for all pairs of layers, S and T the sums of the rows; by pair of layers `within`, the
        sum over rows of |X_a'Y_a|^2; `inner`, of (x_i s_a)(y_i t_a) over samples; `squares`, of |s_a|^2 |t_a|^2 over rows; and
        by layer `row_x`, `row_y`, the sums of |s_a|^2; `r_x`, `r_x^2`, `r_y`, `r_y^2`, of the squared norms of samples.
    """
    rows = int(row[-1]) + 1
    s, t = (z.new_zeros(len(z), rows, z.shape[-1]).index_add(1, row, z) for z in (x, y))
    r_x, r_y = x.square().sum(-1), y.square().sum(-1)
    if rows == len(row):
        within = r_x @ r_y.T
    else:
        counts = torch.bincount(row).tolist()
        grams = zip(*((torch.bmm(part, part.mT).flatten(1) for part in torch.split(z, counts, 1)) for z in (x, y)), strict=True)
        within = torch.stack([a @ b.T for a, b in grams]).sum(0)
    row_x, row_y = s.square().sum(-1), t.square().sum(-1)
    return {
        "cross": _stacked(x).T @ _stacked(y),
        "between": _stacked(s).T @ _stacked(t),
        "within": within,
        "inner": (x * s[:, row]).sum(-1) @ (y * t[:, row]).sum(-1).T,
        "squares": row_x @ row_y.T,
        "row_x": row_x.sum(1),
        "row_y": row_y.sum(1),
        "r_x": r_x.sum(1),
        "r_x^2": r_x.square().sum(1),
        "r_y": r_y.sum(1),
        "r_y^2": r_y.square().sum(1),
    }


def _stacked(x: Tensor) -> Tensor:
    return rearrange(x, "layer sample d -> sample (layer d)")


def exact_hsic(sums: Sums) -> tuple[Tensor, Tensor, Tensor]:
    """HSIC without pairs of one row over all samples, from the summed output of `exact_kernel`.

    The samples sum to 0, so the terms of METHODS become: pairs |X'Y|^2 - sum_a |X_a'Y_a|^2; quadruples
    sum |s_a|^2 sum |t_a|^2 - 6 sum |s_a|^2 |t_a|^2 + 2 |S'T|^2; and triples 2 sum_i (x_i s_a)(y_i t_a) - <X'Y, S'T>.

    Args:
        sums: of all batches.

    Returns:
        HSIC of all pairs of layers, `row column`; of each row layer with itself, `row`; and of each column layer, `column`.
    """
    cross = _hsic_of({name.removeprefix("xy."): value for name, value in sums.fields.items() if name.startswith("xy.")}, sums)
    if "xx.cross" not in sums.fields:
        return cross, cross.diagonal(), cross.diagonal()
    own = []
    for which in ("xx", "yy"):
        fields = {name.removeprefix(f"{which}."): v for name, v in sums.fields.items() if name.startswith(f"{which}.")}
        layers = range(len(fields["cross"]))
        own.append(torch.stack([_hsic_of({name: v[layer] for name, v in fields.items()}, sums)[0, 0] for layer in layers]))
    return cross, own[0], own[1]


def _hsic_of(m: dict[str, Tensor], sums: Sums) -> Tensor:
    pairs, triples, quadruples = tuples_of_rows(*sums["tuples"].tolist())
    a, b = m["within"].shape
    cross, between = (rearrange(m[name], "(a d) (b e) -> a b (d e)", a=a, b=b) for name in ("cross", "between"))
    two = cross.square().sum(-1) - m["within"]
    four = torch.outer(m["row_x"], m["row_y"]) - 6 * m["squares"] + 2 * between.square().sum(-1)
    three = 2 * m["inner"] - (cross * between).sum(-1)
    return two / pairs + four / quadruples - 2 * three / triples
