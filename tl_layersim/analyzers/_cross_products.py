"""Sums of cross-products between sites, from which `Procrustes`, `CCA` and `LinearPredictivity` are computed.

Plain functions of torch: they are serialised by value and also run on a server.

The sums are uncentred float64. Activations of float32 lose the spread s about a mean m with an error of about 6e-8 m / s, and
the sums with an error of about 1e-16 (m / s)^2, which is smaller wherever float32 represents the spread at all.
"""

from __future__ import annotations

from functools import partial

import torch
from einops import rearrange
from torch import Tensor

from ..models.view import View, row_ends
from ._permutation_null import draw_permutations, sample_key
from ._probe_kernels import held_out


def cross_product_kernel(*views: View, rows: partial[Tensor], permutations: int, seed: int) -> dict[str, Tensor]:
    """Cross-products of the sites of one model, or between the sites of two models, over the samples of one batch.

    Analyzers of one run that read the same samples of one model share the products of a batch.

    Args:
        *views: of one model, or of two models on the same tokens.
        rows: takes a view and returns its samples, `site sample width`.
        permutations: number of random pairings of samples.
        seed: of the pairings.

    Returns:
        See `cross_products`.
    """
    key = f"cross-products {sorted(rows.keywords.items())}"
    drawn = sample_key(views[0].tokens, seed)
    if len(views) == 1:
        memo, full = views[0].memo, f"{key} {permutations} {seed}"
        if full not in memo:
            x = rows(views[0]).double()
            memo[full] = cross_products(x, draw_permutations(permutations, x.shape[1], drawn))
        shared: dict[str, Tensor] = memo[full]
        return shared
    sides, own = [rows(view).double() for view in views], []
    for view, side in zip(views, sides, strict=True):
        # A model that is compared with several others is multiplied with itself once.
        if key not in view.memo:
            view.memo[key] = side.transpose(1, 2) @ side
        own.append(view.memo[key])
    return cross_products_of_two(sides[0], sides[1], draw_permutations(permutations, sides[0].shape[1], drawn), own)


def split_cross_product_kernel(
    *views: View, rows: partial[Tensor], permutations: int, seed: int, split: tuple[float, int, int | None]
) -> dict[str, Tensor]:
    """The same for training samples, with names that begin with "train.", and held-out samples, "test.".

    Args:
        *views: of one model, or of two models on the same tokens.
        rows: takes a view and returns its samples, `site sample width`.
        permutations: number of random pairings, of training samples with each other and of held-out samples with each other.
        seed: of the pairings.
        split: the arguments of `held_out` after the rows.

    Returns:
        Also `width.x` and `width.y`: the width of each site times the number of samples, because a site that is narrower than
        the widest one is padded with zeros.
    """
    number = views[0].row
    assert number is not None
    if rows.keywords["level"] == "sequence":
        number = number[row_ends(views[0]).to(number.device)]
    test = held_out(number, *split)
    sides = [rows(view).double() for view in views]
    out: dict[str, Tensor] = {}
    drawn = sample_key(views[0].tokens, seed)
    for name, chosen in (("train", ~test), ("test", test)):
        parts = [side[:, chosen.to(side.device)] for side in sides]
        # A batch may have held-out rows only, or none.
        count = parts[0].shape[1]
        order = draw_permutations(permutations, count, drawn) if count else torch.zeros(permutations, 0, dtype=torch.int64)
        if len(parts) == 1:
            products = cross_products(parts[0], order)
        else:
            products = cross_products_of_two(parts[0], parts[1], order, [part.transpose(1, 2) @ part for part in parts])
        out |= {f"{name}.{field}": value for field, value in products.items()}
    for name, view in zip("xy", views, strict=False):
        widths = torch.tensor(view.widths or [view.activations.shape[-1]] * len(view.activations))
        out[f"width.{name}"] = widths * len(test)
    return out


def cross_products(x: Tensor, permutations: Tensor) -> dict[str, Tensor]:
    """Sums and cross-products of the sites of one model.

    Args:
        x: `site sample width`, float64.
        permutations: `permutation sample`.

    Returns:
        `samples`; `x`, `site width`; `cross`, `pair width width`, for the pairs (0, 0), (0, 1), ..., (1, 1), (1, 2), ... of
        sites, because the products of the other pairs are transposed ones; and `null`, `permutation pair width width`, the
        same with permuted samples of the second site, where there are permutations.
    """
    out = {"samples": torch.tensor(x.shape[1]), "x": x.sum(1), "cross": _products(x, x, later=True)}
    if len(permutations):
        out["null"] = torch.stack([_products(x, x[:, order], later=True) for order in permutations.to(x.device)])
    return out


def cross_products_of_two(x: Tensor, y: Tensor, permutations: Tensor, own: list[Tensor]) -> dict[str, Tensor]:
    """Sums and cross-products of the sites of two models.

    Args:
        x: `site sample width` of the first model, float64.
        y: `site sample width` of the second model, of the same samples.
        permutations: `permutation sample`.
        own: of each model, products of each site with itself, `site width width`.

    Returns:
        `samples`; `x` and `y`, `site width`; `xx` and `yy`, which are `own`; `cross`, `pair width width`, with all sites of the
        second model for the first site of the first model, then for its second site, and so on; and `null` as above.
    """
    y = y.to(x.device)
    out = {"samples": torch.tensor(x.shape[1]), "x": x.sum(1), "y": y.sum(1), "xx": own[0], "yy": own[1]}
    out["cross"] = _products(x, y, later=False)
    if len(permutations):
        out["null"] = torch.stack([_products(x, y[:, order], later=False) for order in permutations.to(x.device)])
    return out


def _products(x: Tensor, y: Tensor, *, later: bool) -> Tensor:
    """Products x'y of pairs of sites, `pair width_x width_y`; with `later`, of each site of x with those from its number on."""
    width = y.shape[-1]
    flat = rearrange(y, "site sample d -> sample (site d)").contiguous()
    counts = [len(y) - site * later for site in range(len(x))]
    out, start = x.new_empty(sum(counts), x.shape[-1], width), 0
    for samples, count in zip(x, counts, strict=True):
        product = samples.T @ flat[:, (len(y) - count) * width :]
        out[start : start + count] = rearrange(product, "d (other e) -> other d e", other=count)
        start += count
    return out
