"""Base class of the analyzers of summed cross-products, with their common options, covariances and warnings."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import combinations_with_replacement, product
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..activations.pools import Draws, PoolKernel, pool_rows
from ..activations.view import Kernel
from ..core.arguments import Limit, PermutationCount, Seed, typed
from ..core.errors import LayersimError, warn
from ..core.sums import Sums, need_memory
from ..core.wording import duration_in_words
from ..sources.model import Model
from ._cross_products import cross_product_kernel, draw_exchanged, exchanged_sums
from ._draws import samples
from ._ridge import ROUNDING
from .analyzer import Analyzer


class Covariances:
    """Covariances (with 1 / n) within and between the sites of one model, or of two models.

    Args:
        sums: of `cross_products` or `cross_products_of_two`, over all batches.
        prefix: of the names of the sums.

    Attributes:
        samples: number of samples, n.
        two_models: whether the columns are sites of a second model.
        rows: number of sites of the (first) model.
        columns: number of sites of the second model, or of the first again.
        row_mean: `row width`.
        column_mean: `column width`.
        permutations: number of random pairings of samples.
    """

    def __init__(self, sums: Sums, prefix: str = "") -> None:
        own = {name.removeprefix(prefix): value for name, value in sums.fields.items() if name.startswith(prefix)}
        self.samples = int(own["samples"])
        self.two_models = "yy" in own
        n = max(self.samples, 1)
        self.row_mean = own["x"] / n
        self.column_mean = own["y"] / n if self.two_models else self.row_mean
        self.rows, self.columns = len(self.row_mean), len(self.column_mean)
        self._null = own.get("null", ())
        self.permutations = len(self._null)
        self._cross = self._by_pair(own["cross"])
        if self.two_models:
            self._own_row, self._own_column = own["xx"], own["yy"]
        else:
            self._own_row = self._own_column = torch.stack([self._product(site, site) for site in range(self.rows)])

    def permuted(self, number: int) -> Covariances:
        """The same with the samples of the column sites in another order; covariances of a site with itself are kept.

        Args:
            number: of the permutation.
        """
        other = copy(self)
        other._cross = self._by_pair(self._null[number])
        return other

    def transposed(self) -> Covariances:
        """The same with rows and columns exchanged."""
        other = copy(self)
        other.rows, other.columns = self.columns, self.rows
        other.row_mean, other.column_mean = self.column_mean, self.row_mean
        other._own_row, other._own_column = self._own_column, self._own_row
        if self.two_models:
            other._cross = self._cross.permute(1, 0, 3, 2)
        return other

    def pairs(self, *, itself: bool = False) -> list[tuple[int, list[int]]]:
        """Each row site with its column sites; of one model, each pair of sites once.

        Args:
            itself: whether a site of one model and itself are a pair.
        """
        start = [0 if self.two_models else row + (not itself) for row in range(self.rows)]
        return [(row, list(range(first, self.columns))) for row, first in enumerate(start) if first < self.columns]

    def between(self, row: int, columns: list[int]) -> Tensor:
        """Covariances of a row site with column sites, `column row_width column_width`."""
        products = torch.stack([self._product(row, column) for column in columns])
        return products / self.samples - self.row_mean[row][:, None] * self.column_mean[columns][:, None]

    def of_row(self, row: int) -> Tensor:
        """Covariance of a row site with itself, `width width`."""
        return self._own_row[row] / self.samples - torch.outer(self.row_mean[row], self.row_mean[row])

    def of_column(self, column: int) -> Tensor:
        """Covariance of a column site with itself, `width width`."""
        return self._own_column[column] / self.samples - torch.outer(self.column_mean[column], self.column_mean[column])

    def row_power(self) -> tuple[Tensor, Tensor]:
        """Of each row site, the mean squared norm and the mean squared distance from the mean, each `row`."""
        return _power(self._own_row, self.row_mean, self.samples)

    def column_power(self) -> tuple[Tensor, Tensor]:
        """The same of each column site."""
        return _power(self._own_column, self.column_mean, self.samples)

    def _by_pair(self, cross: Tensor) -> Tensor:
        return cross.view(self.rows, self.columns, *cross.shape[1:]) if self.two_models else cross

    def _product(self, row: int, column: int) -> Tensor:
        if self.two_models:
            return self._cross[row, column]
        if row > column:
            return self._product(column, row).T
        # The rows before this one have `rows`, `rows` - 1, ... pairs.
        return self._cross[row * self.rows - row * (row - 1) // 2 + column - row]


def _power(own: Tensor, mean: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    square = own.diagonal(dim1=1, dim2=2).sum(1) / samples
    return square, square - mean.square().sum(1)


def are_defined(power: tuple[Tensor, Tensor]) -> Tensor:
    """Whether the samples of each site differ by more than the rounding error of the sums, `site`.

    Args:
        power: as `Covariances.row_power` returns it.
    """
    square, variance = power
    return variance > ROUNDING * square


def check_defined(sides: Iterable[tuple[tuple[str, ...], Tensor]], analyzer: str, count: str) -> None:
    """Warn of sites whose samples are all equal; refuse a run in which a side has no other sites.

    Args:
        sides: names of the sites of the rows, or of the columns, and whether each is defined.
        analyzer: its name, for the message.
        count: the samples in words, such as "128 tokens".

    Raises:
        LayersimError: no site of a side is defined.
    """
    sides = list(sides)
    equal = list(dict.fromkeys(name for names, known in sides for name, one in zip(names, known, strict=True) if not one))
    listed = f"{', '.join(equal[:4])}{' and others' if len(equal) > 4 else ''}"
    digits = "the mean is so much larger than the spread that the sums lose the spread to rounding"
    if not all(bool(known.any()) for _, known in sides):
        raise LayersimError(
            f"{analyzer} is not defined at any site: all {count} are equal at {listed}, or {digits}. "
            'CKA(estimator="minibatch") centres each minibatch.'
        )
    if equal:
        warn(
            f"{analyzer} is not defined at {listed}, and NaN there: {digits}, or all of {count} are equal, as first tokens or "
            "[CLS] tokens are before the first attention."
        )


def check_sums_fit(models: tuple[Model, ...], analyzer: Analyzer, limit_gb: float, permutations: int, parts: int = 1) -> None:
    """Refuse sums of cross-products that need more memory than a limit, before the run.

    Args:
        models: one model, two that are compared, or more of which all pairs are.
        analyzer: of the sums.
        limit_gb: `max_memory_gb` of the analyzer.
        permutations: number of random pairings, each of which has the products of all pairs of sites.
        parts: number of groups of samples that are summed separately.

    Raises:
        LayersimError: the sums need more.
    """
    if any(model.widest is None for model in models):
        return
    shapes = [(len(model.layers), model.widest or 0) for model in models]
    if len(shapes) == 1:
        [(sites, width)] = shapes
        cross, own = sites * (sites + 1) // 2 * width**2, 0
    else:
        # More than two models are each compared with themselves too.
        pairs_of = partial(combinations_with_replacement, r=2) if analyzer.symmetric else partial(product, repeat=2)
        both = list(pairs_of(shapes)) if len(shapes) > 2 else [(shapes[0], shapes[1])]
        cross = sum(a * b * d * e for (a, d), (b, e) in both)
        own = sum(a * d**2 + b * e**2 for (a, d), (b, e) in both)
    # The batch's products, the running sum, and the new sum while the two are added.
    name, need = type(analyzer).__name__, 3 * 8 * parts * (own + cross * (1 + permutations)) / 1e9
    fewer = "Fewer sites (at=) or permutations= take less." if permutations else "Fewer sites (at=) take less."
    need_memory(f"The sums of {name}", need, limit_gb, fewer)


def seconds_of_pairs(model: Model, per_pair: float, permutations: int) -> float:
    """Seconds on one core that decompositions of all pairs of sites take; 0 for a model of unknown width.

    Args:
        model: to be analyzed.
        per_pair: seconds at a width of 576, which grow as the third power of the width.
        permutations: number of random pairings, each of which is decomposed too.
    """
    pairs = len(model.layers) * (len(model.layers) + 1) // 2
    return pairs * (1 + permutations) * per_pair * ((model.widest or 0) / 576) ** 3


def cost_in_words(model: Model, analyzer: str, seconds: float, permutations: int) -> str:
    """A sentence on the time that decompositions of all pairs of sites take; "" if it is short.

    Args:
        model: to be analyzed.
        analyzer: its name.
        seconds: as `seconds_of_pairs` returns them.
        permutations: number of random pairings, each of which is decomposed too.
    """
    if seconds < 10:
        return ""
    pairs = len(model.layers) * (len(model.layers) + 1) // 2
    times = f", each with {permutations} permutations," if permutations else ""
    return (
        f"{analyzer} decomposes the cross-products of {pairs} pairs of sites{times} after the data pass. It takes "
        f"about {duration_in_words(seconds)} on one core. at=[...] selects fewer sites."
    )


# Annotations are objects here, not text: subclasses of other files, whose types are checked, lack names such as Literal.


# Samples of a pool whose rows are exchanged: 16 rows of tokens, or 256 rows of one sample.
EXCHANGED = 256


@typed
@dataclass(frozen=True, eq=False)
class CrossProductAnalyzer(Analyzer):
    """An analyzer whose sums are the cross-products between sites. Subclasses compute a result from them.

    Args:
        level: see `Procrustes`, as for all options.
        pool: see `Procrustes`.
        permutations: see `Procrustes`.
        unit: see `Procrustes`.
        seed: see `Procrustes`.
        max_memory_gb: see `Procrustes`.
    """

    compares: ClassVar[bool] = True
    symmetric: ClassVar[bool] = True

    level: Literal["token", "sequence"] = "token"
    pool: Literal["mean", "last", "first"] = "mean"
    permutations: PermutationCount = 0
    unit: Literal["row", "token"] = "row"
    seed: Seed = 0
    max_memory_gb: Limit = 4.0

    @property
    def whole_rows(self) -> bool:
        return self.level == "sequence"

    @property
    def samples_in_words(self) -> str:
        """What samples are."""
        return "tokens" if self.level == "token" else "sequences"

    def check_sites(self, *models: Model) -> None:
        super().check_sites(*models)
        check_sums_fit(models, self, self.max_memory_gb, self.permutations)

    def pool_need(self, density: float) -> int:
        return pool_rows(EXCHANGED, 1 if self.whole_rows else density) if self.permutations else 0

    def kernel(self, first: Sums) -> Kernel:
        return partial(cross_product_kernel, rows=self._rows())

    def pool_kernel(self, first: Sums) -> PoolKernel | None:
        if not self.permutations:
            return None
        sums = partial(exchanged_sums, permutations=self.permutations, seed=self.seed)
        return PoolKernel(self._rows(), self.whole_rows, EXCHANGED, self._draw(), sums)

    def _rows(self) -> partial[Tensor]:
        return partial(samples, level=self.level, pool=self.pool)

    def _draw(self) -> partial[Draws]:
        return partial(draw_exchanged, seed=self.seed, by_row=self.unit == "row")
