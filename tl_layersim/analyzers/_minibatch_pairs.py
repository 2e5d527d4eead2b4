"""Similarities of matrices over pairs of samples, within minibatches: the kernels and sums of CKA, RSA and MutualKNN.

Each layer of a minibatch of n samples becomes an n x n matrix of relations between samples: a centred Gram matrix, ranked
dissimilarities, or the graph of nearest neighbours. The sums are products of these matrices, of all pairs of layers, for
the samples as they are and for permuted samples.

Plain functions of torch: they are serialised by value and also run on a server.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..models.view import View
from ._permutation_null import draw_orders, sample_key

# Takes the matrix of each layer, `layer n n`, and returns the relations, `layer (n n)` in float64, and numbers by layer that
# are summed over minibatches. The name of a number has {} for the side, x or y.
Relate = Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]
SampleReader = Callable[[View], Tensor]
Matrix = Callable[[Tensor, tuple[int, ...]], Tensor]
Prepare = Callable[[Tensor, Sequence[int]], dict[str, Tensor]]


def draw_minibatches(tokens: Tensor, total: int, size: int, seed: int, least: int = 4) -> list[Tensor]:
    """Draw the samples of each minibatch without replacement, as indices.

    The shuffle depends on the batch's own tokens and the seed, not on the batch's number. The order of batches and padding
    therefore change nothing.

    Args:
        tokens: ids of the counted tokens of the batch.
        total: number of samples in the batch.
        size: samples per minibatch; a batch of fewer samples is one smaller minibatch, of fewer than `least` none.
        seed: of the shuffle.
        least: samples that the measure needs.
    """
    size = min(size, total)
    if size < least:
        return []
    order = torch.randperm(total, generator=torch.Generator().manual_seed(sample_key(tokens, seed)))
    return list(torch.split(order[: total // size * size], size))


def minibatch_kernel(
    *views: View, rows: SampleReader, matrix: Matrix, prepare: Prepare, size: int, seed: int, least: int
) -> dict[str, Tensor]:
    """Sums over minibatches of the products of relations between all pairs of layers.

    Args:
        *views: of one model, or of two models on the same tokens.
        rows: takes a view and returns its samples, `layer sample d_model`.
        matrix: takes the samples of a minibatch and the widths of the layers, and returns a matrix for each layer, `layer n n`.
        prepare: `relations` with its options.
        size: samples per minibatch.
        seed: of the shuffle and of the permutations.
        least: samples that the measure needs.
    """
    samples = [rows(view) for view in views]
    minibatches = draw_minibatches(views[0].tokens, samples[0].shape[1], size, seed, least)
    empty = [prepare(x.new_zeros(0, len(x), least, least), []) for x in samples]
    total = products(empty[0], empty[-1])
    for key, chosen in enumerate(minibatches, sample_key(views[0].tokens, seed) + 1):
        sides = [
            prepare(matrix(x[:, chosen.to(x.device)], view.widths)[None], [key]) for x, view in zip(samples, views, strict=True)
        ]
        for name, value in products(sides[0], sides[-1]).items():
            total[name] = total[name] + value
    return total


def pair_kernel(view: View, *, rows: SampleReader, matrix: Matrix, size: int, seed: int, least: int) -> dict[str, Tensor]:
    """Upper triangles of the matrices of one model, `minibatch layer pair`, and the keys of their permutations.

    Models on different machines are compared by these.

    Args:
        view: of one model.
        rows: see `minibatch_kernel`.
        matrix: see `minibatch_kernel`.
        size: samples per minibatch.
        seed: of the shuffle and of the permutations.
        least: samples that the measure needs.
    """
    x = rows(view)
    minibatches = draw_minibatches(view.tokens, x.shape[1], size, seed, least)
    keys = sample_key(view.tokens, seed) + 1 + torch.arange(len(minibatches))
    if not minibatches:
        return {"pairs": x.new_zeros(0, len(x), 0), "keys": keys}
    upper = torch.triu_indices(len(minibatches[0]), len(minibatches[0]), device=x.device)
    matrices = (matrix(x[:, chosen.to(x.device)], view.widths) for chosen in minibatches)
    return {"pairs": torch.stack([one[:, upper[0], upper[1]] for one in matrices]), "keys": keys}


def relations_of_pairs(statistics: Mapping[str, Tensor], *, prepare: Prepare) -> dict[str, Tensor]:
    """Relations of one model from the output of `pair_kernel`.

    Args:
        statistics: output of `pair_kernel`.
        prepare: `relations` with its options.
    """
    return prepare(symmetric_matrices(statistics["pairs"]), statistics["keys"].tolist())


def relations(
    matrices: Tensor, keys: Sequence[int], *, relate: Relate, least: int, permutations: int, symmetric: bool
) -> dict[str, Tensor]:
    """Relations of one model, and the sums that do not depend on the model it is compared with.

    Args:
        matrices: `minibatch layer n n`.
        keys: seed of the permutations of each minibatch.
        relate: see `Relate`.
        least: samples that the measure needs.
        permutations: number of permutations of the null.
        symmetric: whether relations are symmetric matrices.

    Returns:
        `relation`, `minibatch layer (n n)` in float64; by layer `own`, the product of a layer with itself, and the numbers of
        `relate`; `minibatches` and `samples`; with permutations their number and the spectra of `permuted_products`.
    """
    count, layers, n = matrices.shape[:3]
    if not count:
        # Without a minibatch, all sums have their names and are 0.
        matrices, keys, n = matrices.new_zeros(1, layers, least, least), [0], least
    each = [relate(one) for one in matrices]
    # One minibatch needs no copy.
    relation = (each[0][0][None] if len(each) == 1 else torch.stack([one for one, _ in each]))[:count]
    out = {"relation": relation, "own": relation.square().sum((0, 2))}
    out |= {name: torch.stack([numbers[name] for _, numbers in each])[:count].sum(0) for name in each[0][1]}
    out |= {"minibatches": torch.tensor(count), "samples": torch.tensor(count * n)}
    if permutations:
        as_drawn = torch.arange(n)[None]
        left = [shift_spectra(one, as_drawn, symmetric)[0] for one, _ in each]
        right = [
            shift_spectra(one, draw_orders(permutations, n, key), symmetric) for (one, _), key in zip(each, keys, strict=True)
        ]
        out |= {"left": torch.stack(left)[:count], "right": torch.stack(right)[:count]}
        out["permutations"] = torch.tensor(permutations)
    return out


def products(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sums of two models from the relations of each.

    Args:
        a: output of `relations` for the first model.
        b: the same for the second model, or for the first again.

    Returns:
        `xy` by pair of layers, `xx` and `yy` by layer, the numbers of `relate` for each side, `minibatches`, `samples`;
        `norms` by pair of layers, the product of the norms of the two relations of a minibatch; with permutations `null xy`,
        `permutation row column`.
    """
    x, y = a["relation"], b["relation"].to(a["relation"].device)
    out = {"xy": torch.bmm(x, y.transpose(1, 2)).sum(0), "xx": a["own"], "yy": b["own"]}
    norms = x.norm(dim=2)
    out["norms"] = norms.T @ (norms if b is a else y.norm(dim=2))
    out |= {name.format(side): own[name] for side, own in (("x", a), ("y", b)) for name in own if "{}" in name}
    out |= {name: a[name] for name in ("minibatches", "samples")}
    if "permutations" in a:
        count, n = int(a["permutations"]), math.isqrt(x.shape[2])
        out["null xy"] = x.new_zeros(count, x.shape[1], y.shape[1])
        for left, right in zip(a["left"], b["right"], strict=True):
            out["null xy"] += permuted_products(left, right.to(left.device), n)[:count]
    return out


def symmetric_matrices(upper: Tensor) -> Tensor:
    """Symmetric matrices `... n n` from their upper triangles, diagonal included.

    Args:
        upper: `... pair`.
    """
    n = (math.isqrt(8 * upper.shape[-1] + 1) - 1) // 2
    rows, columns = torch.triu_indices(n, n)
    matrices = upper.new_empty(*upper.shape[:-1], n, n)
    matrices[..., rows, columns] = upper
    matrices[..., columns, rows] = upper
    return matrices


def shift_spectra(relation: Tensor, orders: Tensor, symmetric: bool) -> Tensor:
    """Fourier transforms along the diagonals of relations whose samples are reordered, `order frequency layer diagonal`.

    A cyclic shift of the samples moves the entries of a matrix along its diagonals, which wrap around.

    Args:
        relation: `layer (n n)`.
        orders: `order n`.
        symmetric: whether each diagonal below the main one equals one above it. Then only half of them are taken, times the
            square root of 2, so that products of two spectra count both halves.
    """
    n = orders.shape[1]
    orders = orders.to(relation.device)
    place = torch.arange(n, device=relation.device)
    diagonal = place[: n // 2 + 1] if symmetric else place
    index = orders[:, None] * n + orders[:, (place + diagonal[:, None]) % n]
    entries = relation[:, index]
    if symmetric:
        twice = (diagonal > 0) & (2 * diagonal < n)
        entries = entries * (1 + twice.to(relation.dtype)).sqrt()[:, None]
    spectra: Tensor = torch.fft.rfft(entries, dim=-1).permute(1, 3, 0, 2)
    return spectra


def permuted_products(left: Tensor, right: Tensor, n: int) -> Tensor:
    """Products of the relations of a minibatch with those of permuted samples, `permutation row column`.

    Entry k, a, b is the sum over i and j of A_a[i, j] B_b[p_k(i), p_k(j)], with p_k the permutations of `draw_permutations`.

    Args:
        left: `frequency row diagonal`, spectra of A as drawn.
        right: `order frequency column diagonal`, spectra of B in random orders.
        n: number of samples.
    """
    shifted: Tensor = torch.fft.irfft(left.conj() @ right.transpose(2, 3), n=n, dim=1).flatten(0, 1)
    return shifted
