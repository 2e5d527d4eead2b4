"""Sums of cross-products between sites, as `Procrustes`, `CCA` and `LinearPredictivity` need them.

Plain functions of torch: they are serialised by value and also run on a server.

The sums are uncentred float64. Activations of float32 lose the spread s about a mean m with an error of about 6e-8 m / s, and
the sums with an error of about 1e-16 (m / s)^2, which is smaller wherever float32 represents the spread at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from einops import rearrange
from torch import Tensor

from ..activations.row_pools import SAMPLES_OF_ROW, Draws, Samples
from ..activations.view import View, row_ends
from ._minibatch_draws import draw_grid, draw_permutations, pool_key
from .linear_probe_kernels import held_out


def cross_product_kernel(*views: View, rows: partial[Tensor]) -> dict[str, Tensor]:
    """Sums over a batch of the cross-products between sites, in one model or between two models.

    Analyzers of one run that read the same samples of one model share the products of a batch.

    Args:
        *views: the view of one model, or the views of two models on the same tokens.
        rows: function that takes a view and returns its samples, `site sample width`.

    Returns:
        See `cross_products`.
    """
    key = f"cross-products {sorted(rows.keywords.items())}"
    if len(views) == 1:
        memo, full = views[0].memo, f"{key} of one model"
        if full not in memo:
            memo[full] = cross_products(rows(views[0]).double())
        shared: dict[str, Tensor] = memo[full]
        return shared
    sides, own = [rows(view).double() for view in views], []
    for view, side in zip(views, sides, strict=True):
        # A model that is compared with several others is multiplied with itself once.
        if key not in view.memo:
            view.memo[key] = side.transpose(1, 2) @ side
        own.append(view.memo[key])
    return cross_products_of_two(sides[0], sides[1], own)


def split_cross_product_kernel(*views: View, rows: partial[Tensor], split: tuple[float, int, int | None]) -> dict[str, Tensor]:
    """Cross-products as `cross_product_kernel`, apart for training samples ("train.") and held-out samples ("test.").

    Args:
        *views: the view of one model, or the views of two models on the same tokens.
        rows: function that takes a view and returns its samples, `site sample width`.
        split: the arguments of `held_out` after `row`.
    """
    number = views[0].row
    assert number is not None
    if rows.keywords["level"] == "sequence":
        number = number[row_ends(views[0]).to(number.device)]
    test = held_out(number, *split)
    sides = [rows(view).double() for view in views]
    out: dict[str, Tensor] = {}
    for name, chosen in (("train", ~test), ("test", test)):
        # A batch may have held-out rows only, or none.
        parts = [side[:, chosen.to(side.device)] for side in sides]
        out |= {f"{name}.{field}": value for field, value in products_of(parts).items()}
    out["test.rows"] = torch.tensor(len(torch.unique(number[test])))
    return out


def draw_exchanged(samples: Samples, *, seed: int, by_row: bool) -> Draws:
    """Draw the samples that the null exchanges: rows with positions that all of them have, or single samples.

    Args:
        samples: the samples of a pool.
        seed: random seed of the draw.
        by_row: whether whole rows are exchanged, not single samples.
    """
    if by_row:
        return {"": [draw_grid(samples, len(samples.row) * SAMPLES_OF_ROW, seed, least_rows=1)]}
    return {"": [torch.arange(len(samples.row))[:, None]]}


def draw_exchanged_split(samples: Samples, *, seed: int, by_row: bool, split: tuple[float, int, int | None]) -> Draws:
    """Draw the samples that the null exchanges, apart for training samples ("train.") and held-out samples ("test.").

    Args:
        samples: the samples of a pool.
        seed: random seed of the draw.
        by_row: whether whole rows are exchanged, not single samples.
        split: the arguments of `held_out` after `row`.
    """
    test = held_out(samples.origin, *split)
    out: dict[str, list[Tensor]] = {}
    for name, chosen in (("train.", ~test), ("test.", test)):
        index = chosen.nonzero()[:, 0]
        [grid] = draw_exchanged(samples.some(index), seed=seed, by_row=by_row)[""]
        out[name] = [index[grid]]
    return out


def exchanged_sums(
    sides: Sequence[Tensor],
    widths: Sequence[tuple[int, ...]],
    samples: Samples,
    draws: Draws,
    *,
    permutations: int,
    seed: int,
) -> dict[str, Tensor]:
    """Cross-products of a pool's samples, and again with the rows of the second site permuted.

    Args:
        sides: samples of one model or of two, `site sample width`.
        widths: widths of the sites.
        samples: rows and hashes of the samples.
        draws: indices of the drawn samples, `row position`, by part of the data.
        permutations: number of random pairings of rows.
        seed: random seed of the pairings.

    Returns:
        See `cross_products`; names begin with "null." and the name of the part.
    """
    out: dict[str, Tensor] = {}
    for name, [grid] in draws.items():
        if not grid.numel():
            continue
        order = draw_permutations(permutations, len(grid), pool_key(samples, seed))
        place = torch.arange(grid.numel()).view(grid.shape)
        parts = [side[:, grid.flatten().to(side.device)].double() for side in sides]
        found = products_of(parts, place[order].flatten(1))
        out |= {f"null.{name}{field}": value for field, value in found.items()}
    return out


def products_of(sides: Sequence[Tensor], permutations: Tensor | None = None) -> dict[str, Tensor]:
    """Sums and cross-products of samples, in one model or between two models.

    Args:
        sides: samples of each model, `site sample width`, float64.
        permutations: `permutation sample`, indices of the permuted samples; None without a null.
    """
    if len(sides) == 1:
        return cross_products(sides[0], permutations)
    return cross_products_of_two(sides[0], sides[1], [side.transpose(1, 2) @ side for side in sides], permutations)


def cross_products(x: Tensor, permutations: Tensor | None = None) -> dict[str, Tensor]:
    """Sums and cross-products between the sites of one model.

    Args:
        x: samples, `site sample width`, float64.
        permutations: `permutation sample`, indices of the permuted samples; None without a null.

    Returns:
        `samples`, their number; `x`, sums of the samples, `site width`; `cross`, `pair width width`, for the pairs of sites (0,
        0), (0, 1), ..., (1, 1), (1, 2), ... (the other pairs are transposes); with permutations also `null`,
        `permutation pair width width`, the same with permuted samples of the second site.
    """
    out = {"samples": torch.tensor(x.shape[1]), "x": x.sum(1), "cross": _products(x, x, later=True)}
    if permutations is not None:
        out["null"] = torch.stack([_products(x, x[:, order], later=True) for order in permutations.to(x.device)])
    return out


def cross_products_of_two(x: Tensor, y: Tensor, own: list[Tensor], permutations: Tensor | None = None) -> dict[str, Tensor]:
    """Sums and cross-products between the sites of two models.

    Args:
        x: samples of the first model, `site sample width`, float64.
        y: the same samples in the second model, `site sample width`, float64.
        own: for each model, cross-products of each site with itself, `site width width`.
        permutations: `permutation sample`, indices of the permuted samples; None without a null.

    Returns:
        `samples`, their number; `x` and `y`, sums of the samples, `site width`; `xx` and `yy`, the products in `own`; `cross`,
        `pair width width`, with the first site of the first model and all sites of the second, then its second site, and so on;
        with permutations also `null`, as in `cross_products`.
    """
    y = y.to(x.device)
    out = {"samples": torch.tensor(x.shape[1]), "x": x.sum(1), "y": y.sum(1), "xx": own[0], "yy": own[1]}
    out["cross"] = _products(x, y, later=False)
    if permutations is not None:
        out["null"] = torch.stack([_products(x, y[:, order], later=False) for order in permutations.to(x.device)])
    return out


def _products(x: Tensor, y: Tensor, *, later: bool) -> Tensor:
    """Products x'y of all pairs of sites, `pair width_x width_y`; `later` leaves out pairs with an earlier second site."""
    width = y.shape[-1]
    flat = rearrange(y, "site sample d -> sample (site d)").contiguous()
    counts = [len(y) - site * later for site in range(len(x))]
    out, start = x.new_empty(sum(counts), x.shape[-1], width), 0
    for samples, count in zip(x, counts, strict=True):
        product = samples.T @ flat[:, (len(y) - count) * width :]
        out[start : start + count] = rearrange(product, "d (other e) -> other d e", other=count)
        start += count
    return out
