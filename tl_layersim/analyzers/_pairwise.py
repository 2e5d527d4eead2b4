"""Layer similarities from sample-by-sample matrices, for `CKA`, `RSA` and `MutualKNN`.

Each layer of a minibatch of n samples becomes an n x n matrix of relations between samples: a centred Gram matrix, ranked
dissimilarities, or the graph of nearest neighbours. The sums are products of these matrices, of all pairs of layers; and for a
null the same for rows that are exchanged.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..activations.norms import beyond_rounding, unit_vectors
from ..activations.row_pools import AnyKernel, Draws, PoolKernel, Samples, pool_texts
from ..core import LayerMatrix, LayersimError, Sums, result_class, typed, warn
from ..core.arguments import Limit, PermutationCount, PositiveInt, Seed
from ..core.wording import amount
from ..sources.model_description import ModelDescription
from ._permutation_null import CalibratedMatrix, is_one_model, null_fields
from ._samples import cyclic_shifts, draw_grid, draw_minibatches, draw_orders, pool_key, with_unit
from .analyzer import Exchange, Run, SampleAnalyzer, compared
from .needs import Needs

# The input of the first block.
EMBEDDING = "blocks.0.hook_resid_pre"
# A minibatch of fewer different texts has few pairs of independent samples.
FEW_TEXTS = 8


def dissimilarities(x: Tensor, widths: tuple[int, ...], *, kind: str) -> Tensor:
    """Dissimilarity of each pair of samples, `layer n n` in float32, with a zero diagonal.

    They are computed in float64 and rounded to float32, so that equal samples have equal dissimilarities, and ties are ties.

    Args:
        x: `layer n d_model`.
        widths: widths of the layers; narrower layers are padded with zeros. Empty if all layers have one width.
        kind: "correlation" is 1 minus the Pearson correlation over dimensions, "cosine" 1 minus the cosine, "euclidean" the
            distance, "squared_euclidean" the squared distance divided by the width. A vector without direction has correlation
            or cosine 0 with all others.
    """
    x = x.double()
    width = x.new_tensor(widths or [x.shape[-1]] * len(x))[:, None, None]
    if kind == "euclidean":
        return _without_diagonal(squared_distances(x).sqrt())
    if kind == "squared_euclidean":
        return _without_diagonal(squared_distances(x) / width)
    mean = torch.zeros_like(x[..., :1])
    if kind == "correlation":
        mean = x.sum(-1, keepdim=True) / width
        inside = torch.arange(x.shape[-1], device=x.device) < width
        x = (x - mean) * inside
    has_direction = beyond_rounding(x, mean)
    unit = unit_vectors(x)[0] * has_direction[..., None]
    dissimilarity = 1 - torch.bmm(unit, unit.transpose(1, 2))
    return _without_diagonal(dissimilarity.where(dissimilarity > 64 * torch.finfo(x.dtype).eps, 0))


def squared_distances(x: Tensor) -> Tensor:
    """Squared Euclidean distances between samples, `layer n n` in float64; exactly 0 for samples that are equal up to rounding.

    Args:
        x: `layer n d_model`.
    """
    # Distances do not change with the mean, which would use up digits.
    x = x.double()
    x = x - x.mean(1, keepdim=True)
    norm = x.square().sum(-1)
    gram = torch.bmm(x, x.transpose(1, 2))
    norm_sums = norm[:, :, None] + norm[:, None, :]
    squared = norm_sums - 2 * gram
    # Below this, the difference is rounding error: the samples are equal.
    return squared.where(squared > 64 * torch.finfo(x.dtype).eps * norm_sums, 0)


def _without_diagonal(matrix: Tensor) -> Tensor:
    matrix = (matrix + matrix.transpose(1, 2)) / 2
    matrix.diagonal(dim1=1, dim2=2).zero_()
    return matrix.float()


def average_ranks(values: Tensor) -> Tensor:
    """Rank the values of each row, from 1, in float64. Equal values share the mean of their ranks.

    Args:
        values: `layer pair`.
    """
    ordered, order = values.sort(1)
    place = torch.arange(1, values.shape[1] + 1, device=values.device, dtype=torch.float64).expand(values.shape)
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    ends = torch.ones_like(starts)
    ends[:, :-1] = starts[:, 1:]
    first = place.where(starts, 0).cummax(1).values
    last = place.where(ends, torch.inf).flip(1).cummin(1).values.flip(1)
    return torch.empty_like(first).scatter_(1, order, (first + last) / 2)


# Takes the matrices of one layer, `matrix n n`, and those of several layers, `layer matrix n n`; returns the unnormalised
# similarity of the one with each of the others, `layer`.
PairFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class PairRelation:
    """Relations between the samples of a minibatch: one vector for each layer, such as a flattened centred Gram matrix.

    The inner product of two vectors, weighted by `signs`, is the unnormalised similarity of their layers, unless there is a
    function `pair`, which takes the matrices.

    Attributes:
        terms: `layer term`, float64, the entries of the vectors.
        signs: `term`, the sign of each product of terms.
        numbers: numbers by layer that are summed over minibatches; {} in a name stands for the side, x or y.
        by_text: `layer text text term`, the terms by pair of texts, for samples on a grid `text position`; None if not asked
            for.
        diagonal_signs: signs of the terms on the diagonal of `by_text`, which pair a text with itself.
        ratios: whether the similarities of each minibatch are summed too, divided by those of each layer with itself.
        pair: function that compares two layers, for similarities that are no inner product; None to take inner products.
        matrices: `layer matrix n n`, the sample-by-sample matrices that `pair` takes.
    """

    terms: Tensor
    signs: Tensor
    numbers: Mapping[str, Tensor]
    by_text: Tensor | None = None
    diagonal_signs: Tensor | None = None
    ratios: bool = False
    pair: PairFunction | None = None
    matrices: Tensor | None = None


# Takes the matrix of each layer, `layer n n`; the text of each sample, or None if no two are of one text; the number of texts;
# and whether the terms are wanted by text.
RelationFunction = Callable[[Tensor, Tensor | None, int, bool], PairRelation]
MatrixFunction = Callable[[Tensor, tuple[int, ...]], Tensor]


def draw_pool(samples: Samples, *, size: int, seed: int, least: int, unit: str, permuted: bool) -> Draws:
    """Draw minibatches, and samples for the permutation null, from collected rows. Returns a dict of sample indices.

    Args:
        samples: the samples of the pool.
        size: number of samples in a minibatch.
        seed: random seed of the draws.
        least: smallest number of samples that the measure needs.
        unit: what is independent of each other, see `with_unit`.
        permuted: whether there is a null.
    """
    samples = with_unit(samples, unit)
    minibatches = draw_minibatches(samples, size, seed, least, unit != "token")
    if not permuted or not minibatches:
        return {"minibatches": minibatches}
    # Independent samples are texts of their own.
    grid = minibatches[0][:, None] if unit == "token" else draw_grid(samples, size, seed, least)
    return {"minibatches": minibatches, "grid": [grid] if grid.numel() else []}


def pool_sums(
    sides: Sequence[Tensor],
    widths: Sequence[tuple[int, ...]],
    samples: Samples,
    draws: Draws,
    *,
    matrix: MatrixFunction,
    relate: RelationFunction,
    unit: str,
    permutations: int,
    seed: int,
) -> dict[str, Tensor]:
    """Sum the unnormalised similarities of all pairs of layers over minibatches.

    Args:
        sides: samples of one model or of two models, `layer sample d_model`.
        widths: widths of the layers of each model.
        samples: rows and hashes of the samples.
        draws: output of `draw_pool`.
        matrix: function that takes the samples of a minibatch and the widths of the layers, and returns a matrix for each
            layer, `layer n n`.
        relate: function that turns the matrices into a `PairRelation`, see `RelationFunction`.
        unit: see `draw_pool`.
        permutations: number of permutations of the null.
        seed: random seed of the permutations.
    """
    statistics_of = partial(pair_statistics, matrix=matrix, unit=unit, seed=seed, triangles=False)
    total: dict[str, Tensor] = {}
    # One minibatch after the other: the matrices of a whole pool may not fit in memory.
    for number, minibatch in enumerate(draws["minibatches"]):
        # The pool has one grid for the null; it goes with the first minibatch.
        grid = [] if number else draws.get("grid", ())
        draws_of_minibatch = {"minibatches": [minibatch], "grid": grid}
        statistics = [
            statistics_of([x], [layer_widths], samples, draws_of_minibatch)
            for x, layer_widths in zip(sides, widths, strict=True)
        ]
        relations = [minibatch_relations(model_statistics, relate=relate) for model_statistics in statistics]
        similarities = minibatch_similarities(relations[0], relations[-1], permutations=permutations)
        for name, value in similarities.items():
            total[name] = value if name not in total else total[name] + value
    return total


def pair_statistics(
    sides: Sequence[Tensor],
    widths: Sequence[tuple[int, ...]],
    samples: Samples,
    draws: Draws,
    *,
    matrix: MatrixFunction,
    unit: str,
    seed: int,
    triangles: bool = True,
) -> dict[str, Tensor]:
    """Sample-by-sample matrices of each layer of one model, for each minibatch.

    Args:
        sides: samples of the model, `layer sample d_model`.
        widths: widths of the layers.
        samples: see `pool_sums`.
        draws: see `pool_sums`.
        matrix: see `pool_sums`.
        unit: see `pool_sums`.
        seed: see `pool_sums`.
        triangles: whether to return only the upper triangle of each matrix, `pair`, for a transfer; else `n n`.

    Returns:
        `pairs`, `minibatch layer pair`; `text`, `minibatch n`, the text of each sample; `texts`, the number of texts;
        `distinct`, `minibatch`; with a null also `grid`, `layer pair`, with its `height` and `key`. Empty for a pool without a
        minibatch.
    """
    if not draws["minibatches"]:
        return {}
    [x] = sides
    [layer_widths] = widths
    # Independent samples are texts of their own.
    text = torch.unique_consecutive(with_unit(samples, unit).text, return_inverse=True)[1]
    texts = int(text[-1]) + 1
    minibatches = torch.stack(list(draws["minibatches"]))

    def matrices(chosen: Tensor) -> Tensor:
        square = matrix(x[:, chosen.to(x.device)], layer_widths)
        return upper_triangles(square) if triangles else square

    # Without pairs of one text, no text has to be told from another.
    text_of_sample = text[minibatches] if texts < len(text) else torch.full(minibatches.shape, -1)
    distinct = torch.tensor([len(torch.unique(text[minibatch])) for minibatch in minibatches])
    pairs = torch.stack([matrices(minibatch) for minibatch in minibatches])
    out = {"pairs": pairs, "text": text_of_sample, "texts": torch.tensor(texts), "distinct": distinct}
    for grid in draws.get("grid", ()):
        out |= {
            "grid": matrices(grid.flatten()),
            "height": torch.tensor(len(grid)),
            "key": torch.tensor(pool_key(samples, seed)),
        }
    return out


# The statistics of one model, and its relations for the minibatches and for the null.
MinibatchRelations = tuple[Mapping[str, Tensor], Mapping[str, list[PairRelation]]]


def minibatch_relations(statistics: Mapping[str, Tensor], *, relate: RelationFunction) -> MinibatchRelations:
    """Turn the sample-by-sample matrices of one model into `PairRelation`s, for each minibatch and for the null.

    Args:
        statistics: output of `pair_statistics`.
        relate: see `RelationFunction`.
    """
    texts = int(statistics["texts"])
    pairs = statistics["pairs"]
    # Three axes, `minibatch layer pair`, are upper triangles.
    matrices = symmetric_matrices(pairs) if pairs.dim() == 3 else pairs
    relations: dict[str, list[PairRelation]] = {"minibatches": []}
    for minibatch, text in zip(matrices, statistics["text"], strict=True):
        text_of_sample = None if int(text[0]) < 0 else text
        relations["minibatches"].append(relate(minibatch, text_of_sample, texts, False))
    if "grid" in statistics:
        grid = statistics["grid"]
        height = int(statistics["height"])
        grid_matrices = symmetric_matrices(grid) if grid.dim() == 2 else grid
        samples = grid_matrices.shape[-1]
        width = samples // height
        text_of_grid = torch.arange(height).repeat_interleave(width) if width > 1 else None
        relations["grid"] = [relate(grid_matrices, text_of_grid, height, True)]
        statistics = {**statistics, "grid samples": torch.tensor(samples)}
    return statistics, relations


def minibatch_similarities(a: MinibatchRelations, b: MinibatchRelations, *, permutations: int) -> dict[str, Tensor]:
    """Sum the unnormalised similarities between layers of two models over minibatches.

    The sums are those of `pool_sums`, from statistics of each model instead of activations.

    Args:
        a: output of `minibatch_relations` for the first model.
        b: output of `minibatch_relations` for the second model.
        permutations: number of permutations of the null.
    """
    statistics, a_relations = a
    _, b_relations = b
    total: dict[str, Tensor] = {}
    size = statistics["text"].shape[1]
    distinct_texts = statistics["distinct"].tolist()
    for x, y, texts in zip(a_relations["minibatches"], b_relations["minibatches"], distinct_texts, strict=True):
        for name, value in products(x, y, texts, size).items():
            total[name] = value if name not in total else total[name] + value
    for x, y in zip(a_relations.get("grid", ()), b_relations.get("grid", ()), strict=True):
        orders = draw_orders(permutations, int(statistics["height"]), int(statistics["key"]))
        null = _similarities(x, y)
        if x.pair is None:
            null["permuted"] = permuted_products(x, y, orders)[:permutations]
        else:
            null["permuted"] = permuted_pairs(x, y, orders, permutations)
        for name, value in null.items():
            total[f"null {name}"] = value
        total["null samples"] = statistics["grid samples"]
    return total


def products(x: PairRelation, y: PairRelation, texts: int, samples: int) -> dict[str, Tensor]:
    """Unnormalised similarities of all pairs of layers in one minibatch.

    Args:
        x: relation of the first model.
        y: relation of the second model; within one model, `x` again.
        texts: number of independent texts of the minibatch.
        samples: number of samples in the minibatch.

    Returns:
        `xy` and `norms` (the product of the norms of the terms) by pair of layers; `xx` and `yy` by layer; `x0`, `y0`,
        `x0 norms` and `y0 norms`, the same for each layer with the first layer of its model; the `numbers` of each relation;
        `ratios`, if they are summed, NaN where one is not defined; `minibatches`, `samples` and `texts`.
    """
    out = _similarities(x, y)
    if x.ratios:
        out["ratios"] = out["xy"] / torch.outer(out["xx"].sqrt(), out["yy"].sqrt())
    out["minibatches"] = torch.tensor(1)
    out["samples"] = torch.tensor(samples)
    out["texts"] = torch.tensor(texts)
    return out


def _similarities(x: PairRelation, y: PairRelation) -> dict[str, Tensor]:
    if x.pair is not None:
        return _similarities_by_function(x, y)
    device = x.terms.device
    x_terms = x.terms
    y_terms = y.terms.to(device)
    x_signs = x.signs.to(device)
    y_signs = y.signs.to(device)
    x_norms = x_terms.norm(dim=1)
    y_norms = y_terms.norm(dim=1)
    out = {
        "xy": (x_terms * x_signs) @ y_terms.T,
        "xx": x_terms.square() @ x_signs,
        "yy": y_terms.square() @ y_signs,
        "norms": torch.outer(x_norms, y_norms),
    }
    sides = (("x", x, x_terms, x_signs, x_norms), ("y", y, y_terms, y_signs, y_norms))
    for side, relation, terms, signs, norms in sides:
        out[f"{side}0"] = (terms * signs) @ terms[0]
        out[f"{side}0 norms"] = norms * norms[0]
        for name, number in relation.numbers.items():
            out[name.format(side)] = number
    return out


def _similarities_by_function(x: PairRelation, y: PairRelation) -> dict[str, Tensor]:
    assert x.pair is not None
    assert x.matrices is not None
    assert y.matrices is not None
    y_matrices = y.matrices.to(x.matrices.device)
    out = {"xy": torch.stack([x.pair(layer, y_matrices) for layer in x.matrices])}
    for side, relation, matrices in (("x", x, x.matrices), ("y", y, y_matrices)):
        out[side * 2] = torch.cat([x.pair(layer, layer[None]) for layer in matrices])
        for name, number in relation.numbers.items():
            out[name.format(side)] = number
    return out


def permuted_pairs(x: PairRelation, y: PairRelation, orders: Tensor, permutations: int) -> Tensor:
    """Similarities by the function of a relation, with the texts of the second model permuted (`permutation row column`).

    The permutations are those of `permuted_products`.

    Args:
        x: relation of the first model, on a grid `text position` of samples.
        y: relation of the second model.
        orders: random orders of the texts, `order text`.
        permutations: number of permutations.
    """
    assert x.pair is not None
    assert x.matrices is not None
    assert y.matrices is not None
    texts = orders.shape[1]
    sample = torch.arange(y.matrices.shape[-1]).view(texts, -1)
    values = []
    for order in cyclic_shifts(orders)[:permutations]:
        index = sample[order].flatten().to(y.matrices.device)
        permuted = y.matrices[:, :, index][..., index].to(x.matrices.device)
        values.append(torch.stack([x.pair(layer, permuted) for layer in x.matrices]))
    return torch.stack(values)


def permuted_products(x: PairRelation, y: PairRelation, orders: Tensor) -> Tensor:
    """Unnormalised similarities with the texts of the second model permuted (`permutation row column`).

    Entry k, a, b is the sum over rows i and j of the products of A_a[i, j] and B_b[p_k(i), p_k(j)], with p_k the permutations
    of `draw_permutations`: cyclic shifts, whose products follow from Fourier transforms along the diagonals.

    Args:
        x: relation of the first model, with terms by text.
        y: relation of the second model, with terms by text.
        orders: random orders of the texts, `order text`.
    """
    assert x.by_text is not None
    assert y.by_text is not None
    assert x.diagonal_signs is not None
    rows = orders.shape[1]
    signed = x.by_text.clone()
    text = torch.arange(rows, device=signed.device)
    signed[:, text, text] *= x.diagonal_signs
    x_spectra = shift_spectra(signed, text)
    products_of_orders = []
    for order in orders:
        y_spectra = shift_spectra(y.by_text.to(signed.device), order.to(signed.device))
        products_of_orders.append(torch.fft.irfft(x_spectra.conj() @ y_spectra.transpose(1, 2), n=rows, dim=0))
    return torch.cat(products_of_orders)


def shift_spectra(terms: Tensor, order: Tensor) -> Tensor:
    """Fourier transforms along the diagonals of the text-pair matrix of each layer (`frequency layer (diagonal term)`).

    The texts are first reordered. A cyclic shift of the texts moves the entries of a matrix along its diagonals,
    which wrap around.

    Args:
        terms: terms by pair of texts, `layer text text term`.
        order: `text`, the new order of the texts.
    """
    rows = len(order)
    place = torch.arange(rows, device=terms.device)
    # `layer diagonal text term`
    entries = terms[:, order, order[(place + place[:, None]) % rows]]
    spectra: Tensor = torch.fft.rfft(entries, dim=2).permute(2, 0, 1, 3).flatten(2)
    return spectra


def upper_triangles(matrices: Tensor) -> Tensor:
    """Upper triangles of symmetric matrices, diagonal included: `... n n` to `... pair`."""
    rows, columns = torch.triu_indices(matrices.shape[-1], matrices.shape[-1], device=matrices.device)
    return matrices[..., rows, columns]


def symmetric_matrices(upper: Tensor) -> Tensor:
    """Symmetric matrices `... n n` from their upper triangles.

    Args:
        upper: `... pair`, diagonal included.
    """
    n = (math.isqrt(8 * upper.shape[-1] + 1) - 1) // 2
    rows, columns = torch.triu_indices(n, n)
    matrices = upper.new_empty(*upper.shape[:-1], n, n)
    matrices[..., rows, columns] = upper
    matrices[..., columns, rows] = upper
    return matrices


def doubly_centred(matrices: Tensor) -> Tensor:
    """Matrices whose rows and columns have a mean of 0 (`layer n n`).

    Args:
        matrices: `layer n n`.
    """
    row_means = matrices.mean(2, keepdim=True)
    column_means = matrices.mean(1, keepdim=True)
    return matrices - column_means - row_means + matrices.mean((1, 2), keepdim=True)


def relation_of_matrices(terms: Tensor, texts: int | None, numbers: Mapping[str, Tensor] | None = None) -> PairRelation:
    """Make a `PairRelation` from flattened sample-by-sample matrices.

    Args:
        terms: `layer (n n)`, 0 for pairs that are left out.
        texts: number of texts, if terms by text are wanted; the samples are then a grid `text position`. None if not.
        numbers: see `PairRelation`.
    """
    signs = terms.new_ones(terms.shape[1])
    if texts is None:
        return PairRelation(terms, signs, numbers or {})
    positions = math.isqrt(terms.shape[1]) // texts
    by_text = terms.view(-1, texts, positions, texts, positions).permute(0, 1, 3, 2, 4).flatten(3)
    return PairRelation(terms, signs, numbers or {}, by_text, by_text.new_ones(positions**2))


def arccos_distance(result: LayerMatrix) -> float:
    """Distance between two models: root of the sum of arccos(similarity)^2 over layers of equal depth.

    Layers are outputs of blocks, or other sites.

    Args:
        result: a result of two models whose values are similarities; values outside [-1, 1] are clipped.

    Raises:
        LayersimError: the models have different numbers of sites.
    """
    # The input of the first block is not the output of one.
    inputs = (".hook_resid_pre", ".input")
    rows = len(result.layers) - result.layers[0].endswith(inputs)
    columns = len(result.column_layers) - result.column_layers[0].endswith(inputs)
    if rows != columns or result.values.shape[0] != result.values.shape[1]:
        raise LayersimError(
            f"The distance is defined for models with equally many layers; these models have {rows} and {columns}."
        )
    equal_depth: Tensor = result.values.diagonal()[-rows:]
    return float(equal_depth.clamp(-1, 1).arccos().square().sum().sqrt())


def angles(result: LayerMatrix) -> Tensor:
    """The arccos of each similarity, in radians (`row column`); values outside [-1, 1] are clipped.

    Args:
        result: a result whose values are cosines.
    """
    return result.values.clamp(-1, 1).arccos()


@result_class
class MinibatchMatrix(CalibratedMatrix):
    """Similarities of all pairs of layers, computed from minibatches of samples, with their permutation null.

    Attributes:
        samples: number of tokens (or sequences) in all minibatches.
        minibatches: number of minibatches.
        texts: number of different texts in a minibatch, averaged over minibatches.
    """

    former_names: ClassVar[Mapping[str, str]] = {"rows": "texts"}
    samples: int
    minibatches: int
    texts: float


def without_inputs(values: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Partial correlations of layers, given the embedding.

    Args:
        values: similarities, `... row column`; the first row and the first column are the embeddings.
        row: similarity of each row layer with its model's embedding.
        column: similarity of each column layer with its model's embedding.

    Returns:
        Similarities of the same shape; NaN for a layer that equals the embedding.

    Source:
        Cui, Kumar, Marttinen and Kaski 2022 (arXiv 2202.00095), section 3, without the projection to positive eigenvalues.
    """
    residual = values - row[:, None] * values[..., :1, :] - values[..., :, :1] * column
    residual = residual + torch.outer(row, column) * values[..., :1, :1]
    residual_variance = torch.outer(1 - row.square(), 1 - column.square())
    # A layer that equals the embedding has no residual but rounding error.
    return (residual / residual_variance.clamp(min=0).sqrt()).where(residual_variance > 1e-12, float("nan"))


@typed
@dataclass(frozen=True, eq=False, kw_only=True)
class MinibatchAnalyzer(SampleAnalyzer):
    """Base class of analyzers that compare layers on minibatches of samples, drawn from pools of texts.

    Args:
        minibatch: see `CKA`, as for all options.
        unit: see `CKA`.
        seed: see `CKA`.
        max_memory_gb: see `CKA`.
        permutations: see `CKA`.
    """

    minibatch: PositiveInt = 256
    unit: Literal["text", "row", "token"] = "text"
    seed: Seed = 0
    max_memory_gb: Limit = 4.0
    permutations: PermutationCount = 0

    @property
    def needs(self) -> Needs:
        return replace(super().needs, models="one_or_two")

    @property
    def least(self) -> int:
        """Smallest number of samples in a minibatch."""
        return 4

    def __post_init__(self) -> None:
        if self.minibatch < self.least:
            raise LayersimError(f"`minibatch` of {type(self).__name__} is {self.minibatch}; it must be at least {self.least}.")

    def check_sites(self, *models: ModelDescription) -> None:
        super().check_sites(*models)
        for model in models:
            if getattr(self, "deconfound", None) and not model.layers[0].endswith(EMBEDDING):
                raise LayersimError(
                    f"`deconfound` needs the embedding, {EMBEDDING}, as the first site; the first site of {model.name} is "
                    f"{model.layers[0]}."
                )

    def sum_numbers(self, *models: ModelDescription) -> float:
        return self.permutations * sum(len(a.layers) * len(b.layers) for a, b in compared(models))

    def pool_need(self, density: float) -> int:
        return pool_texts(self.minibatch, 1 if self.needs.whole_rows else density)

    def _pool_kernel(self, sums: Any) -> PoolKernel:
        draw = partial(
            draw_pool,
            size=self.minibatch,
            seed=self.seed,
            least=self.least,
            unit=self.unit,
            permuted=self.permutations > 0,
        )
        return PoolKernel(self.read, self.needs.whole_rows, self.minibatch, draw, sums)

    def similarities(
        self,
        sums: Sums,
        run: Run,
        values: Tensor,
        null_scale: Tensor,
        inputs: tuple[Tensor, Tensor] | None = None,
        *,
        symmetric: bool = True,
    ) -> dict[str, Any]:
        """Fields of a `MinibatchMatrix`, by name. Warns if minibatches have few texts.

        Args:
            sums: sums over all pools.
            run: the finished run.
            values: the similarities.
            null_scale: divisor of the null's summed products.
            inputs: similarity of each layer with the embedding, for the rows and for the columns, to be regressed out; None not
                to.
            symmetric: whether two layers of one model have one value in either order.
        """
        minibatches = 1
        texts = float(run.provenance.texts)
        if "minibatches" in sums.fields:
            minibatches = int(sums["minibatches"])
            texts = float(sums["texts"]) / minibatches
            if self.unit != "token" and texts < FEW_TEXTS:
                warn(
                    f"A minibatch of {type(self).__name__} has samples of {texts:.3g} {self.unit}s on average; with fewer "
                    f"than {FEW_TEXTS} {self.unit}s, values scatter widely. "
                    f"Pass more {self.unit}s, or a larger minibatch=."
                )
        if inputs is not None:
            values = without_inputs(values, *inputs)
        null: dict[str, Any] = {}
        if "null xy" in sums.fields:
            observed = sums["null xy"] / null_scale
            permuted = sums["null permuted"] / null_scale
            if inputs is not None:
                observed = without_inputs(observed, *inputs)
                permuted = without_inputs(permuted, *inputs)
            # A pair that is undefined in one permutation has no null distribution.
            defined = ~values.isnan() & ~permuted.isnan().any(0)
            observed = observed.where(defined, math.nan)
            null = null_fields(observed, permuted, one_model=is_one_model(run.models), symmetric=symmetric)
        elif self.permutations:
            warn(
                f"`permutations` is {self.permutations}, but {type(self).__name__} has no permutation null: permutations "
                "need four texts with enough tokens at the same positions, among the texts that are compared at once. Pass "
                "more texts."
            )
        return {
            "values": values,
            "samples": int(sums["samples"]),
            "minibatches": minibatches,
            "texts": texts,
            "layers": run.layers,
            "column_layers": run.column_layers,
            "provenance": run.provenance,
            **null,
        }

    def need_rows(self, enough: bool, run: Run) -> None:
        """Raise an error if the data has too few rows.

        Args:
            enough: whether a pool had enough samples for a minibatch.
            run: the finished run.

        Raises:
            LayersimError: the data has too few rows.
        """
        if enough:
            return
        unit = self.unit
        reason = ""
        remedy = ""
        if unit != "token":
            reason = f" from 4 {unit}s, because tokens of one {unit} depend on each other"
            remedy = f' Pass more {unit}s, or unit="token", which treats tokens of one text as independent.'
        data = f"{amount(run.provenance.tokens, 'token')} in {amount(run.provenance.sequences, 'row')}"
        if run.provenance.texts < run.provenance.sequences:
            data += f" of {amount(run.provenance.texts, 'text')}"
        raise LayersimError(
            f"{type(self).__name__} needs {self.least} {self.sample_word}{reason}; the data has {data}.{remedy}"
        )


@typed
@dataclass(frozen=True, eq=False, kw_only=True)
class SampleMatrixAnalyzer(MinibatchAnalyzer):
    """Base class of analyzers that compare layers by sample-by-sample matrices of minibatches."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, symmetric=True)

    @property
    @abstractmethod
    def formula(self) -> tuple[MatrixFunction, RelationFunction]:
        """Two functions: from samples to sample-by-sample matrices, and from these to a `PairRelation`. See `pool_sums`."""

    def kernel(self, first: Sums) -> AnyKernel:
        matrix, relate = self.formula
        options: dict[str, Any] = {"unit": self.unit, "permutations": self.permutations, "seed": self.seed}
        return self._pool_kernel(partial(pool_sums, matrix=matrix, relate=relate, **options))

    def exchange(self) -> Exchange | None:
        matrix, relate = self.formula
        statistics = partial(pair_statistics, matrix=matrix, unit=self.unit, seed=self.seed)
        return Exchange(
            self._pool_kernel(statistics),
            partial(minibatch_similarities, permutations=self.permutations),
            self._statistics_bytes,
            partial(minibatch_relations, relate=relate),
        )

    def _statistics_bytes(self, texts: int, density: float, layers: int) -> int:
        pools = -(-texts // self.pool_need(density))
        kernel = self._pool_kernel(None)
        drawn = kernel.samples_in(texts // pools, density)
        n = min(self.minibatch, drawn)
        if n < self.least:
            return 0
        # Upper triangles in float32; the text of each sample and their number, of each minibatch, and the number of texts.
        triangles = 4 * layers * n * (n + 1) // 2
        null = triangles + 16 if self.permutations else 0
        return pools * (drawn // n * (triangles + 8 * n + 8) + 8 + null)
