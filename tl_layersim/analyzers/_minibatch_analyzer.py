"""Base class of `CKA`, `RSA` and `MutualKNN`: their common options, kernels, statistics of two models, and checks."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..activations.row_pools import AnyKernel, PoolKernel, pool_rows
from ..core.arguments import Limit, PermutationCount, PositiveInt, Seed, typed
from ..core.errors import LayersimError, warn
from ..core.results import LayerMatrix
from ..core.sums import Sums
from ..core.wording import amount
from ..sources.model import Model
from ._pair_kernels import Matrix, Relate, draw_pool, pair_statistics, pool_sums, products_of_pairs, relations_of_pairs
from ._permutation_null import CalibratedMatrix, is_one_model, null_fields
from .analyzer import Exchange, Run, SampleAnalyzer, compared


def arccos_distance(result: LayerMatrix) -> float:
    """Root of the sum over equal layers of arccos(similarity)^2; layers are outputs of blocks, or other sites.

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
            f"The arccos distance is defined for models of equal depth; these have {rows} and {columns} blocks, or other sites."
        )
    equal: Tensor = result.values.diagonal()[-rows:]
    return float(equal.clamp(-1, 1).arccos().square().sum().sqrt())


# The input of the first block.
EMBEDDING = "blocks.0.hook_resid_pre"
# A minibatch of fewer different rows has few pairs of independent samples.
FEW_ROWS = 8


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MinibatchMatrix(CalibratedMatrix):
    """A similarity for each pair of layers, computed from minibatches of samples, with its permutation null.

    Attributes:
        samples: number of tokens (or sequences) in all minibatches.
        minibatches: number of minibatches.
        rows: number of different rows in a minibatch, averaged over minibatches.
    """

    file_kind: ClassVar[str] = "minibatch_matrix"
    samples: int
    minibatches: int
    rows: float


def without_inputs(values: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Partial correlations: similarities after the similarity with the inputs is regressed out of both sides.

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
    """Base class of analyzers that compare layers by matrices over the samples of a minibatch, such as Gram matrices.

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
    unit: Literal["row", "token"] = "row"
    seed: Seed = 0
    max_memory_gb: Limit = 4.0
    permutations: PermutationCount = 0

    @property
    @abstractmethod
    def matrix(self) -> Matrix:
        """The function that computes the matrix of each layer; see `pool_sums`."""

    @property
    @abstractmethod
    def relate(self) -> Relate:
        """The function that turns the matrices into relations; see `pool_sums`."""

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
                    f"`deconfound` needs the embedding as the first site, {EMBEDDING}; the first is {model.layers[0]}."
                )

    def sum_numbers(self, *models: Model) -> float:
        return self.permutations * sum(len(a.layers) * len(b.layers) for a, b in compared(models))

    def pool_need(self, density: float) -> int:
        return pool_rows(self.minibatch, 1 if self.whole_rows else density)

    def kernel(self, first: Sums) -> AnyKernel:
        return self._pools(
            partial(
                pool_sums,
                matrix=self.matrix,
                relate=self.relate,
                by_row=self.unit == "row",
                permutations=self.permutations,
                seed=self.seed,
            )
        )

    def exchange(self) -> Exchange | None:
        statistics = partial(pair_statistics, matrix=self.matrix, by_row=self.unit == "row", seed=self.seed)
        return Exchange(
            self._pools(statistics),
            partial(products_of_pairs, permutations=self.permutations),
            self._crossing,
            partial(relations_of_pairs, relate=self.relate),
        )

    def _pools(self, sums: Any) -> PoolKernel:
        draw = partial(
            draw_pool,
            size=self.minibatch,
            seed=self.seed,
            least=self.least,
            by_row=self.unit == "row",
            permuted=self.permutations > 0,
        )
        return PoolKernel(self.read, self.whole_rows, self.minibatch, draw, sums)

    def _crossing(self, rows: int, density: float, layers: int) -> int:
        pools = -(-rows // self.pool_need(density))
        kernel = self._pools(None)
        drawn = kernel.samples_in(rows // pools, density)
        n = min(self.minibatch, drawn)
        if n < self.least:
            return 0
        # Upper triangles in float32; the row of each sample and their number, of each minibatch, and the number of rows.
        triangles = 4 * layers * n * (n + 1) // 2
        null = triangles + 16 if self.permutations else 0
        return pools * (drawn // n * (triangles + 8 * n + 8) + 8 + null)

    def similarities(
        self, sums: Sums, run: Run, values: Tensor, null_scale: Tensor, inputs: tuple[Tensor, Tensor] | None = None
    ) -> dict[str, Any]:
        """The fields that the results of all minibatch measures share. Warns if minibatches have few rows.

        Args:
            sums: sums over all pools.
            run: the finished run.
            values: the similarities.
            null_scale: divisor of the null's summed products.
            inputs: similarity of each layer with the embedding, for the rows and for the columns, to be regressed out; None not
                to.
        """
        minibatches, rows = int(sums["minibatches"]), float(sums["rows"])
        each = rows / minibatches
        if self.unit == "row" and each < FEW_ROWS:
            warn(
                f"Minibatches of {type(self).__name__} have {each:.3g} different rows on average, and pairs from one "
                f"row are left out. With fewer than {FEW_ROWS} rows, values scatter widely. Pass more rows of data, "
                "shorter ones (seq_len=), or a larger minibatch=."
            )
        if inputs is not None:
            values = without_inputs(values, *inputs)
        fields = self.common_fields(run, values, int(sums["samples"]), minibatches, each)
        if self.permutations and "null xy" not in sums.fields:
            warn(f"{type(self).__name__} has no null: no pool had four rows with enough tokens to exchange.")
        if "null xy" not in sums.fields:
            return fields
        observed, null = sums["null xy"] / null_scale, sums["null permuted"] / null_scale
        if inputs is not None:
            observed, null = without_inputs(observed, *inputs), without_inputs(null, *inputs)
        observed = observed.where(~values.isnan(), float("nan"))
        return fields | null_fields(observed, null, one_model=is_one_model(run.models))

    def common_fields(self, run: Run, values: Tensor, samples: int, minibatches: int, rows: float) -> dict[str, Any]:
        """The fields of a `MinibatchMatrix` without a null; for the arguments see there."""
        return {
            "values": values,
            "samples": samples,
            "minibatches": minibatches,
            "rows": rows,
            "layers": run.layers,
            "column_layers": run.column_layers,
            "provenance": run.provenance,
        }

    def need_minibatch(self, sums: Sums, run: Run) -> None:
        """Raise an error if no pool had enough samples for a minibatch.

        Raises:
            LayersimError: no pool had enough samples.
        """
        if "samples" not in sums.fields:
            raise self.too_few_rows(run)

    def too_few_rows(self, run: Run) -> LayersimError:
        """The error for data with too few rows."""
        rows = " from 4 rows, because pairs of tokens from one row are left out" if self.unit == "row" else ""
        tokens, given = amount(run.provenance.tokens, "token"), amount(run.provenance.sequences, "row")
        return LayersimError(
            f"{type(self).__name__} needs {self.least} {self.samples_in_words}{rows}; the data has {tokens} in {given}."
            + (' With unit="token", tokens of one row count as independent.' if rows else "")
        )
