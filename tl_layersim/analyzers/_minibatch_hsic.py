"""HSIC averaged over minibatches of samples: the kernels and sums of `CKA` (Nguyen et al. 2021, equations 2 and 3).

Plain functions of torch: they are serialised by value and also run on a server.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from ..models.view import View
from ._hsic import centred, grams


def draw_minibatches(tokens: Tensor, total: int, size: int, seed: int) -> list[Tensor]:
    """Draw the samples of each minibatch without replacement, as indices.

    The shuffle depends on the batch's own tokens and the seed, not on the batch's number. The order of batches and padding
    therefore change nothing.

    Args:
        tokens: ids of the counted tokens of the batch.
        total: number of samples in the batch.
        size: samples per minibatch; a batch of fewer samples is one smaller minibatch, of fewer than 4 none.
        seed: of the shuffle.
    """
    size = min(size, total)
    if size < 4:
        return []
    tokens = tokens.cpu()
    weight = torch.arange(1, 2 * len(tokens), 2) * 0x9E3779B1
    key = int(((tokens + 1) * weight).sum()) & 0x7FFFFFFFFFFF
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed * 0x9E3779B1 + key & 0x7FFFFFFFFFFFFFFF))
    return list(torch.split(order[: total // size * size], size))


def minibatch_kernel(*views: View, rows: partial[Tensor], size: int, seed: int, biased: bool) -> dict[str, Tensor]:
    """Sums over minibatches of the HSIC between all pairs of layers.

    Args:
        *views: of one model, or of two models on the same tokens.
        rows: takes a view and returns its samples, `layer sample d_model`.
        size: samples per minibatch.
        seed: of the shuffle.
        biased: whether to take HSIC_0 instead of HSIC_1.
    """
    x, y = rows(views[0]), rows(views[-1])
    total = empty_sums(x.shape[0], y.shape[0], x.device)
    for chosen in draw_minibatches(views[0].tokens, x.shape[1], size, seed):
        a = grams(x[:, chosen.to(x.device)])
        add_minibatch(total, a, a if len(views) == 1 else grams(y[:, chosen.to(y.device)]), biased)
    return total


def empty_sums(rows: int, columns: int, device: torch.device) -> dict[str, Tensor]:
    """The sums of `minibatch_kernel` before the first minibatch: zeros.

    Args:
        rows: number of row layers.
        columns: number of column layers.
        device: of the sums.
    """
    lengths = {"xx": rows, "yy": columns, "r_x": rows, "r_x^2": rows, "r_y": columns, "r_y^2": columns}
    zeros = {name: torch.zeros(length, dtype=torch.float64, device=device) for name, length in lengths.items()}
    count = {name: torch.tensor(0) for name in ("minibatches", "samples")}
    return {"xy": torch.zeros(rows, columns, dtype=torch.float64, device=device)} | zeros | count


def add_minibatch(total: dict[str, Tensor], gram_x: Tensor, gram_y: Tensor, biased: bool) -> None:
    """Add the HSIC of one minibatch to the sums.

    Args:
        total: the sums, changed in place.
        gram_x: `layer n n`, Gram matrices of the row layers.
        gram_y: `layer n n`, of the column layers; the same object for one model.
        biased: whether to take HSIC_0 instead of HSIC_1.
    """
    a, r_x = centred(gram_x, biased)
    b, r_y = (a, r_x) if gram_y is gram_x else (z.to(a.device) for z in centred(gram_y, biased))
    for name, values in (("r_x", r_x), ("r_y", r_y)):
        total[name] += values.sum(1)
        total[f"{name}^2"] += values.square().sum(1)
    # All pairs of layers in one product. Each entry is n(n-3) HSIC_1, or (n-1)^2 HSIC_0. The factor stays: it weights a
    # smaller minibatch by its number of pairs, and cancels among minibatches of one size.
    total["xy"] += a @ b.T
    total["xx"] += a.square().sum(1)
    total["yy"] += b.square().sum(1)
    total["minibatches"] += 1
    total["samples"] += gram_x.shape[-1]


def gram_kernel(view: View, *, rows: partial[Tensor], size: int, seed: int) -> dict[str, Tensor]:
    """Upper triangles of the Gram matrices of one model, `minibatch layer pair`, for models on different machines.

    Args:
        view: of one model.
        rows: takes a view and returns its samples, `layer sample d_model`.
        size: samples per minibatch.
        seed: of the shuffle.
    """
    x = rows(view)
    minibatches = draw_minibatches(view.tokens, x.shape[1], size, seed)
    if not minibatches:
        return {"grams": x.new_zeros(0, len(x), 0)}
    upper = torch.triu_indices(len(minibatches[0]), len(minibatches[0]), device=x.device)
    return {"grams": torch.stack([grams(x[:, chosen.to(x.device)])[:, upper[0], upper[1]] for chosen in minibatches])}


def centred_grams(statistics: Mapping[str, Tensor], *, biased: bool) -> dict[str, Tensor]:
    """Centred Gram matrices of one model, and the sums that do not depend on the model it is compared with.

    Args:
        statistics: output of `gram_kernel`.
        biased: whether to centre for HSIC_0 instead of HSIC_1.

    Returns:
        `centred`, `minibatch layer (n n)` in float64; by layer `own`, the HSIC of a layer with itself as `add_minibatch` sums
        it, `r` and `r^2`; `minibatches` and `samples`.
    """
    upper = statistics["grams"]
    each = [centred(symmetric_grams(one), biased) for one in upper]
    gram = torch.stack([one for one, _ in each]) if each else upper.double()
    r = torch.cat([one for _, one in each], 1) if each else upper.new_zeros(upper.shape[1], 0).double()
    return {
        "centred": gram,
        "own": gram.square().sum((0, 2)),
        "r": r.sum(1),
        "r^2": r.square().sum(1),
        "minibatches": torch.tensor(len(gram)),
        "samples": torch.tensor(r.shape[1]),
    }


def sums_from_grams(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sums that `minibatch_kernel` returns for two views, from the centred Gram matrices of each view.

    Args:
        a: output of `centred_grams` for the first model.
        b: the same for the second model.
    """
    x, y = a["centred"], b["centred"]
    return {
        "xy": torch.bmm(x, y.to(x.device).transpose(1, 2)).sum(0),
        "xx": a["own"],
        "yy": b["own"],
        **{f"r_{side}{power}": own[f"r{power}"] for side, own in (("x", a), ("y", b)) for power in ("", "^2")},
        **{name: a[name] for name in ("minibatches", "samples")},
    }


def symmetric_grams(upper: Tensor) -> Tensor:
    """Symmetric matrices `layer n n` from their upper triangles.

    Args:
        upper: `layer pair`.
    """
    n = math.isqrt(2 * upper.shape[1])
    rows, columns = torch.triu_indices(n, n)
    gram = upper.new_empty(len(upper), n, n)
    gram[:, rows, columns] = upper
    gram[:, columns, rows] = upper
    return gram
