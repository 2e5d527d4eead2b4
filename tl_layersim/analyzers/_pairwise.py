"""Layer similarities from sample-by-sample matrices, for `CKA`, `RSA` and `MutualKNN`.

Each layer of a minibatch of n samples becomes an n x n matrix of relations between samples: a centred Gram matrix, ranked
dissimilarities, or the graph of nearest neighbours. The sums are products of these matrices, of all pairs of layers; and for a
null the same for rows that are exchanged.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..activations.norms import beyond_rounding, unit_vectors
from ..activations.row_pools import AnyKernel, Draws, PoolKernel, Samples, pool_texts
from ..core import LayerMatrix, LayersimError, Sums, result_class, typed, warn
from ..core.arguments import Limit, PermutationCount, PositiveInt, Seed
from ..core.wording import amount
from ..sources.model_description import Model
from ._permutation_null import CalibratedMatrix, is_one_model, null_fields
from ._samples import draw_grid, draw_minibatches, draw_orders, pool_key, with_unit
from .analyzer import Exchange, Run, SampleAnalyzer, compared

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
            distance. A vector without direction has correlation or cosine 0 with all others.
    """
    x = x.double()
    if kind == "euclidean":
        # Distances do not change with the mean, which would use up digits.
        x = x - x.mean(1, keepdim=True)
        norm = x.square().sum(-1)
        gram = torch.bmm(x, x.transpose(1, 2))
        both = norm[:, :, None] + norm[:, None, :]
        squared = both - 2 * gram
        distance = squared.where(squared > 64 * torch.finfo(x.dtype).eps * both, 0).sqrt()
        return _without_diagonal(distance)
    mean = torch.zeros_like(x[..., :1])
    if kind == "correlation":
        width = x.new_tensor(widths or [x.shape[-1]] * len(x))[:, None, None]
        mean = x.sum(-1, keepdim=True) / width
        inside = torch.arange(x.shape[-1], device=x.device) < width
        x = (x - mean) * inside
    known = beyond_rounding(x, mean)
    unit = unit_vectors(x)[0] * known[..., None]
    apart = 1 - torch.bmm(unit, unit.transpose(1, 2))
    return _without_diagonal(apart.where(apart > 64 * torch.finfo(x.dtype).eps, 0))


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


@dataclass(frozen=True)
class PairRelation:
    """Relations between the samples of a minibatch: one vector for each layer, such as a flattened centred Gram matrix.

    The inner product of two vectors, weighted by `signs`, is the unnormalised similarity of their layers.

    Attributes:
        terms: `layer term`, float64, the entries of the vectors.
        signs: `term`, the sign of each product of terms.
        numbers: numbers by layer that are summed over minibatches; {} in a name stands for the side, x or y.
        by_text: `layer text text term`, the terms by pair of texts, for samples on a grid `text position`; None if not asked
            for.
        own_signs: signs of the terms on the diagonal of `by_text`, which pair a text with itself.
        ratios: whether the similarities of each minibatch are summed too, divided by those of each layer with itself.
    """

    terms: Tensor
    signs: Tensor
    numbers: Mapping[str, Tensor]
    by_text: Tensor | None = None
    own_signs: Tensor | None = None
    ratios: bool = False


# Takes the matrix of each layer, `layer n n`; the text of each sample, or None if no two are of one text; the number of texts;
# and whether the terms are wanted by text.
Relate = Callable[[Tensor, Tensor | None, int, bool], PairRelation]
Matrix = Callable[[Tensor, tuple[int, ...]], Tensor]


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
    matrix: Matrix,
    relate: Relate,
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
        relate: function that turns the matrices into a `PairRelation`, see `Relate`.
        unit: see `draw_pool`.
        permutations: number of permutations of the null.
        seed: random seed of the permutations.
    """
    own = partial(pair_statistics, matrix=matrix, unit=unit, seed=seed, triangles=False)
    total: dict[str, Tensor] = {}
    # One minibatch after the other: the matrices of a whole pool may not fit in memory.
    for number, one in enumerate(draws["minibatches"]):
        drawn = {"minibatches": [one], "grid": [] if number else draws.get("grid", ())}
        known = [own([x], [wide], samples, drawn) for x, wide in zip(sides, widths, strict=True)]
        related = [relations_of_pairs(each, relate=relate) for each in known]
        for name, value in products_of_pairs(related[0], related[-1], permutations=permutations).items():
            total[name] = value if name not in total else total[name] + value
    return total


def pair_statistics(
    sides: Sequence[Tensor],
    widths: Sequence[tuple[int, ...]],
    samples: Samples,
    draws: Draws,
    *,
    matrix: Matrix,
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
    [x], [wide] = sides, widths
    # Independent samples are texts of their own.
    text = torch.unique_consecutive(with_unit(samples, unit).text, return_inverse=True)[1]
    texts = int(text[-1]) + 1
    drawn = torch.stack(list(draws["minibatches"]))

    def matrices(chosen: Tensor) -> Tensor:
        whole = matrix(x[:, chosen.to(x.device)], wide)
        return upper_triangles(whole) if triangles else whole

    # Without pairs of one text, no text has to be told from another.
    own = text[drawn] if texts < len(text) else torch.full(drawn.shape, -1)
    distinct = torch.tensor([len(torch.unique(text[one])) for one in drawn])
    pairs = torch.stack([matrices(one) for one in drawn])
    out = {"pairs": pairs, "text": own, "texts": torch.tensor(texts), "distinct": distinct}
    for grid in draws.get("grid", ()):
        out |= {
            "grid": matrices(grid.flatten()),
            "height": torch.tensor(len(grid)),
            "key": torch.tensor(pool_key(samples, seed)),
        }
    return out


Prepared = tuple[Mapping[str, Tensor], Mapping[str, list[PairRelation]]]


def relations_of_pairs(statistics: Mapping[str, Tensor], *, relate: Relate) -> Prepared:
    """Turn the sample-by-sample matrices of one model into `PairRelation`s, for each minibatch and for the null.

    Args:
        statistics: output of `pair_statistics`.
        relate: see `Relate`.
    """
    texts, own, pairs = int(statistics["texts"]), statistics["text"], statistics["pairs"]
    each = zip(symmetric_matrices(pairs) if pairs.dim() == 3 else pairs, own, strict=True)
    related: dict[str, list[PairRelation]] = {
        "minibatches": [relate(one, None if int(text[0]) < 0 else text, texts, False) for one, text in each]
    }
    if "grid" in statistics:
        grid, height = statistics["grid"], int(statistics["height"])
        whole = symmetric_matrices(grid) if grid.dim() == 2 else grid
        width = whole.shape[-1] // height
        text = torch.arange(height).repeat_interleave(width) if width > 1 else None
        related["grid"] = [relate(whole, text, height, True)]
        statistics = {**statistics, "grid samples": torch.tensor(whole.shape[-1])}
    return statistics, related


def products_of_pairs(a: Prepared, b: Prepared, *, permutations: int) -> dict[str, Tensor]:
    """Sum the unnormalised similarities between layers of two models over minibatches.

    The sums are those of `pool_sums`, from statistics of each model instead of activations.

    Args:
        a: output of `relations_of_pairs` for the first model.
        b: output of `relations_of_pairs` for the second model.
        permutations: number of permutations of the null.
    """
    (known, x), (_, y) = a, b
    total: dict[str, Tensor] = {}
    size = known["text"].shape[1]
    for one, other, distinct in zip(x["minibatches"], y["minibatches"], known["distinct"].tolist(), strict=True):
        for name, value in products(one, other, distinct, size).items():
            total[name] = value if name not in total else total[name] + value
    for one, other in zip(x.get("grid", ()), y.get("grid", ()), strict=True):
        orders = draw_orders(permutations, int(known["height"]), int(known["key"]))
        null = _similarities(one, other) | {"permuted": permuted_products(one, other, orders)[:permutations]}
        total |= {f"null {name}": value for name, value in null.items()} | {"null samples": known["grid samples"]}
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
    out |= {"ratios": out["xy"] / torch.outer(out["xx"].sqrt(), out["yy"].sqrt())} if x.ratios else {}
    counts = {"minibatches": 1, "samples": samples, "texts": texts}
    return out | {name: torch.tensor(count) for name, count in counts.items()}


def _similarities(x: PairRelation, y: PairRelation) -> dict[str, Tensor]:
    a, b = x.terms, y.terms.to(x.terms.device)
    norms = a.norm(dim=1), b.norm(dim=1)
    own = [(terms.square() @ one.signs.to(terms.device)) for terms, one in ((a, x), (b, y))]
    out = {"xy": (a * x.signs) @ b.T, "xx": own[0], "yy": own[1], "norms": torch.outer(*norms)}
    for side, one, terms, norm in (("x", x, a, norms[0]), ("y", y, b, norms[1])):
        out |= {f"{side}0": (terms * one.signs.to(terms.device)) @ terms[0], f"{side}0 norms": norm * norm[0]}
        out |= {name.format(side): number for name, number in one.numbers.items()}
    return out


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
    assert x.own_signs is not None
    rows = orders.shape[1]
    signed = x.by_text.clone()
    own = torch.arange(rows, device=signed.device)
    signed[:, own, own] *= x.own_signs
    left = shift_spectra(signed, own)
    each = []
    for order in orders:
        right = shift_spectra(y.by_text.to(signed.device), order.to(signed.device))
        each.append(torch.fft.irfft(left.conj() @ right.transpose(1, 2), n=rows, dim=0))
    return torch.cat(each)


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


def relation_of_pairs(terms: Tensor, texts: int | None, numbers: Mapping[str, Tensor] | None = None) -> PairRelation:
    """Make a `PairRelation` from flattened sample-by-sample matrices.

    Args:
        terms: `layer (n n)`, 0 for pairs that are left out.
        texts: number of texts, if terms by text are wanted; the samples are then a grid `text position`. None if not.
        numbers: see `PairRelation`.
    """
    ones = terms.new_ones(terms.shape[1])
    if texts is None:
        return PairRelation(terms, ones, numbers or {})
    each = math.isqrt(terms.shape[1]) // texts
    by_text = terms.view(-1, texts, each, texts, each).permute(0, 1, 3, 2, 4).flatten(3)
    return PairRelation(terms, ones, numbers or {}, by_text, by_text.new_ones(each**2))


def arccos_distance(result: LayerMatrix) -> float:
    """Distance between two models: root of the sum of arccos(similarity)^2 over layers of equal depth.

    Layers are outputs of blocks, or other sites.

    Args:
        result: a result of two models whose values are similarities; values outside [-1, 1] are clipped.

    Raises:
        LayersimError: the models have different numbers of sites.
    """
    # The input of the first block is not the output of one.
    rows, columns = (
        len(names) - names[0].endswith((".hook_resid_pre", ".input")) for names in (result.layers, result.column_layers)
    )
    if rows != columns or result.values.shape[0] != result.values.shape[1]:
        raise LayersimError(
            f"The distance is defined for models with equally many layers; these models have {rows} and {columns}."
        )
    equal: Tensor = result.values.diagonal()[-rows:]
    return float(equal.clamp(-1, 1).arccos().square().sum().sqrt())


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
    rest = values - row[:, None] * values[..., :1, :] - values[..., :, :1] * column
    rest = rest + torch.outer(row, column) * values[..., :1, :1]
    left = torch.outer(1 - row.square(), 1 - column.square())
    return (rest / left.clamp(min=0).sqrt()).where(left > 1e-12, float("nan"))


@typed
@dataclass(frozen=True, eq=False)
class MinibatchAnalyzer(SampleAnalyzer):
    """Base class of analyzers that compare layers by sample-by-sample matrices of minibatches.

    Args:
        minibatch: see `CKA`, as for all options.
        unit: see `CKA`.
        seed: see `CKA`.
        max_memory_gb: see `CKA`.
        permutations: see `CKA`.
    """

    compares: ClassVar[bool] = True
    symmetric: ClassVar[bool] = True

    minibatch: PositiveInt = 256
    unit: Literal["text", "row", "token"] = "text"
    seed: Seed = 0
    max_memory_gb: Limit = 4.0
    permutations: PermutationCount = 0

    @property
    @abstractmethod
    def formula(self) -> tuple[Matrix, Relate]:
        """Two functions: from samples to sample-by-sample matrices, and from these to a `PairRelation`. See `pool_sums`."""

    @property
    def least(self) -> int:
        """Smallest number of samples in a minibatch."""
        return 4

    def __post_init__(self) -> None:
        if self.minibatch < self.least:
            raise LayersimError(f"`minibatch` of {type(self).__name__} is {self.minibatch}; it must be at least {self.least}.")

    def check_sites(self, *models: Model) -> None:
        super().check_sites(*models)
        for model in models:
            if getattr(self, "deconfound", None) and not model.layers[0].endswith(EMBEDDING):
                raise LayersimError(
                    f"`deconfound` needs the embedding, {EMBEDDING}, as the first site; the first site of {model.name} is "
                    f"{model.layers[0]}."
                )

    def sum_numbers(self, *models: Model) -> float:
        return self.permutations * sum(len(a.layers) * len(b.layers) for a, b in compared(models))

    def pool_need(self, density: float) -> int:
        return pool_texts(self.minibatch, 1 if self.whole_rows else density)

    def kernel(self, first: Sums) -> AnyKernel:
        matrix, relate = self.formula
        options: dict[str, Any] = {"unit": self.unit, "permutations": self.permutations, "seed": self.seed}
        return self._pools(partial(pool_sums, matrix=matrix, relate=relate, **options))

    def exchange(self) -> Exchange | None:
        matrix, relate = self.formula
        statistics = partial(pair_statistics, matrix=matrix, unit=self.unit, seed=self.seed)
        return Exchange(
            self._pools(statistics),
            partial(products_of_pairs, permutations=self.permutations),
            self._crossing,
            partial(relations_of_pairs, relate=relate),
        )

    def _pools(self, sums: Any) -> PoolKernel:
        draw = partial(
            draw_pool,
            size=self.minibatch,
            seed=self.seed,
            least=self.least,
            unit=self.unit,
            permuted=self.permutations > 0,
        )
        return PoolKernel(self.read, self.whole_rows, self.minibatch, draw, sums)

    def _crossing(self, texts: int, density: float, layers: int) -> int:
        pools = -(-texts // self.pool_need(density))
        kernel = self._pools(None)
        drawn = kernel.samples_in(texts // pools, density)
        n = min(self.minibatch, drawn)
        if n < self.least:
            return 0
        # Upper triangles in float32; the text of each sample and their number, of each minibatch, and the number of texts.
        triangles = 4 * layers * n * (n + 1) // 2
        null = triangles + 16 if self.permutations else 0
        return pools * (drawn // n * (triangles + 8 * n + 8) + 8 + null)

    def similarities(
        self, sums: Sums, run: Run, values: Tensor, null_scale: Tensor, inputs: tuple[Tensor, Tensor] | None = None
    ) -> dict[str, Any]:
        """Fields of the result that `CKA`, `RSA` and `MutualKNN` have in common, by name. Warns if minibatches have few texts.

        Args:
            sums: sums over all pools.
            run: the finished run.
            values: the similarities.
            null_scale: divisor of the null's summed products.
            inputs: similarity of each layer with the embedding, for the rows and for the columns, to be regressed out; None not
                to.
        """
        minibatches, each = 1, float(run.provenance.texts)
        if "minibatches" in sums.fields:
            minibatches = int(sums["minibatches"])
            each = float(sums["texts"]) / minibatches
            if self.unit != "token" and each < FEW_TEXTS:
                warn(
                    f"A minibatch of {type(self).__name__} has samples of {each:.3g} {self.unit}s on average; with fewer "
                    f"than {FEW_TEXTS} {self.unit}s, values scatter widely. "
                    f"Pass more {self.unit}s, or a larger minibatch=."
                )
        if inputs is not None:
            values = without_inputs(values, *inputs)
        null: dict[str, Any] = {}
        if "null xy" in sums.fields:
            observed, permuted = sums["null xy"] / null_scale, sums["null permuted"] / null_scale
            if inputs is not None:
                observed, permuted = without_inputs(observed, *inputs), without_inputs(permuted, *inputs)
            null = null_fields(observed.where(~values.isnan(), math.nan), permuted, one_model=is_one_model(run.models))
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
            "texts": each,
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
        why = f" from 4 {unit}s, because pairs of tokens from one {unit} are left out" if unit != "token" else ""
        tokens, given = amount(run.provenance.tokens, "token"), amount(run.provenance.sequences, "row")
        of = f" of {amount(run.provenance.texts, 'text')}" if run.provenance.texts < run.provenance.sequences else ""
        raise LayersimError(
            f"{type(self).__name__} needs {self.least} {self.samples_in_words}{why}; the data has {tokens} in {given}{of}."
            + (f' Pass more {unit}s, or unit="token", which treats tokens of one text as independent.' if why else "")
        )
