"""Base class of `Procrustes`, `CCA` and `LinearPredictivity`: their common options, covariances and warnings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..activations.row_pools import Draws, PoolKernel, pool_rows
from ..activations.view import Kernel
from ..core.arguments import Limit, PermutationCount, Seed, typed
from ..core.sums import Sums
from ..core.wording import duration_in_words
from ..sources.model import Model
from ._covariance_sums import cross_product_kernel, draw_exchanged, exchanged_sums
from ._permutation_null import is_one_model, null_fields
from ._ridge import ROUNDING
from .analyzer import Run, SampleAnalyzer, compared, refuse_undefined


class Covariances:
    """Covariances (divided by n) within and between sites, in one model or between two models.

    Args:
        sums: sums that `cross_products` or `cross_products_of_two` returned, added over all batches.
        prefix: prefix of the names of the sums, such as "null.".

    Attributes:
        samples: number of samples, n.
        two_models: whether the columns are sites of a second model; if not, of the first model.
        rows: number of sites of the (first) model.
        columns: number of sites of the second model; within one model, the same as `rows`.
        row_mean: `row width`, mean of the samples at each row site.
        column_mean: `column width`, mean of the samples at each column site.
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
        """These covariances for one random pairing of samples. The covariance of a site with itself is unchanged."""
        other = copy(self)
        other._cross = self._by_pair(self._null[number])
        return other

    def transposed(self) -> Covariances:
        """These covariances with rows and columns exchanged."""
        other = copy(self)
        other.rows, other.columns = self.columns, self.rows
        other.row_mean, other.column_mean = self.column_mean, self.row_mean
        other._own_row, other._own_column = self._own_column, self._own_row
        if self.two_models:
            other._cross = self._cross.permute(1, 0, 3, 2)
        return other

    def pairs(self, *, itself: bool = False) -> list[tuple[int, list[int]]]:
        """Each row site with its column sites; within one model, each pair of sites once.

        Args:
            itself: within one model, whether to include the pair of each site with itself.
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
        """For each row site, the mean squared norm and the mean squared distance from the mean, both `row`."""
        return _power(self._own_row, self.row_mean, self.samples)

    def column_power(self) -> tuple[Tensor, Tensor]:
        """For each column site, the mean squared norm and the mean squared distance from the mean, both `column`."""
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
    """Whether the samples of each site differ by more than rounding, `site`.

    Args:
        power: output of `Covariances.row_power` or `column_power`.
    """
    square, variance = power
    return variance > ROUNDING * square


# Samples of a pool whose rows are exchanged: 16 rows of tokens, or 256 rows of one sample.
EXCHANGED = 256


@typed
@dataclass(frozen=True, eq=False)
class CrossProductAnalyzer(SampleAnalyzer):
    """Base class of analyzers that sum the cross-products between sites. Subclasses compute a result from the sums.

    Args:
        permutations: see `Procrustes`, as for all options.
        unit: see `Procrustes`.
        seed: see `Procrustes`.
        max_memory_gb: see `Procrustes`.
    """

    compares: ClassVar[bool] = True
    symmetric: ClassVar[bool] = True
    # Seconds on one core that the decomposition of a pair of sites of width 576 takes; they grow as its third power.
    seconds_per_pair: ClassVar[float]
    # Groups of samples that are summed separately.
    groups: ClassVar[int] = 1

    permutations: PermutationCount = 0
    unit: Literal["row", "token"] = "row"
    seed: Seed = 0
    max_memory_gb: Limit = 4.0

    def sum_numbers(self, *models: Model) -> float:
        shapes = [(len(a.layers), a.widest or 0, len(b.layers), b.widest or 0) for a, b in compared(models, self.symmetric)]
        if len(models) == 1:
            [(sites, width, *_)] = shapes
            cross, own = sites * (sites + 1) // 2 * width**2, 0
        else:
            cross = sum(a * b * d * e for a, d, b, e in shapes)
            own = sum(a * d**2 + b * e**2 for a, d, b, e in shapes)
        return self.groups * (own + cross * (1 + self.permutations))

    def compute_seconds(self, model: Model) -> float:
        pairs = len(model.layers) * (len(model.layers) + 1) // 2
        return pairs * (1 + self.permutations) * self.seconds_per_pair * ((model.widest or 0) / 576) ** 3

    def cost(self, model: Model) -> str:
        if (seconds := self.compute_seconds(model)) < 10:
            return ""
        pairs = len(model.layers) * (len(model.layers) + 1) // 2
        times = f", each with {self.permutations} permutations," if self.permutations else ""
        return (
            f"{type(self).__name__} decomposes the cross-products of {pairs} pairs of sites{times} after the data pass. It "
            f"takes about {duration_in_words(seconds)} on one core. at=[...] selects fewer sites."
        )

    def pool_need(self, density: float) -> int:
        return pool_rows(EXCHANGED, 1 if self.whole_rows else density) if self.permutations else 0

    def kernel(self, first: Sums) -> Kernel:
        return partial(cross_product_kernel, rows=self.read)

    def pool_kernel(self, first: Sums) -> PoolKernel | None:
        if not self.permutations:
            return None
        sums = partial(exchanged_sums, permutations=self.permutations, seed=self.seed)
        return PoolKernel(self.read, self.whole_rows, EXCHANGED, self._draw(), sums)

    def _draw(self) -> partial[Draws]:
        return partial(draw_exchanged, seed=self.seed, by_row=self.unit == "row")

    def defined_pairs(self, run: Run, sides: Sequence[Tensor], count: int) -> Tensor:
        """Whether each pair of sites has a value, `row column`. Warns of sites whose samples are all equal.

        Args:
            run: the finished run.
            sides: whether the samples of each row site differ, then of each column site; a single entry within one model.
            count: number of samples.
        """
        why = (
            f"either all of {count} {self.samples_in_words} are equal, as first tokens or [CLS] tokens are before the first "
            "attention, or the mean is so large that rounding hides the spread "
            '(CKA(estimator="minibatch") centres each minibatch)'
        )
        refuse_undefined(type(self).__name__, zip((run.layers, run.column_layers), sides, strict=False), why)
        return sides[0][:, None] & sides[-1]

    def null(
        self, run: Run, known: Tensor, parts: Sequence[Covariances], values: Callable[[Sequence[Covariances], bool], Tensor]
    ) -> dict[str, Any]:
        """The fields of the result that describe the null: its values come from samples that are paired at random.

        Args:
            run: the finished run.
            known: whether each pair of sites has a value, `row column`.
            parts: covariances of the samples that the null exchanges, by part of the data ("", "train" or "test").
            values: function that takes covariances and whether they are permuted, and returns the value of each pair.
        """
        each = [values([part.permuted(i) for part in parts], True) for i in range(parts[0].permutations)]
        observed = values(parts, False).where(known, math.nan)
        return null_fields(observed, torch.stack(each), one_model=is_one_model(run.models), symmetric=self.symmetric)
