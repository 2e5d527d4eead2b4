"""Base class of measures within minibatches: options, kernels, cross-model statistics and checks of CKA, RSA and MutualKNN."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from ..core.argument_checks import typed
from ..core.errors import LayersimError
from ..core.sums import Sums
from ..models.model_info import Model
from ..models.view import Kernel
from ._minibatch_pairs import (
    Matrix,
    Prepare,
    Relate,
    minibatch_kernel,
    pair_kernel,
    products,
    relations,
    relations_of_pairs,
)
from ._permutation_null import CalibratedMatrix, check_null_memory, check_permutations
from ._sample_vectors import samples
from .base import Analyzer, Exchange, Run


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MinibatchMatrix(CalibratedMatrix):
    """A similarity for each pair of layers from minibatches of samples, with its permutation null.

    Attributes:
        samples: number of tokens (or sequences).
        minibatches: number of minibatches.
    """

    samples: int
    minibatches: int

    @property
    def mean_minibatch(self) -> float:
        """Mean number of samples in a minibatch."""
        return self.samples / self.minibatches


class MinibatchAnalyzer(Analyzer):
    """An analyzer that relates the samples of a minibatch at each layer, and multiplies the relations of two layers."""

    compares: ClassVar[bool] = True
    symmetric: ClassVar[bool] = True

    minibatch: int
    level: Literal["token", "sequence"]
    pool: Literal["mean", "last", "first"]
    seed: int
    permutations: int
    max_memory_gb: int | float

    @property
    @abstractmethod
    def matrix(self) -> Matrix:
        """The function that gives the matrix of each layer; see `minibatch_kernel`."""

    @property
    @abstractmethod
    def relate(self) -> Relate:
        """The function that gives the relations of each layer."""

    @property
    def symmetric_relations(self) -> bool:
        """Whether the relation of sample i to sample j is that of j to i."""
        return True

    @property
    def least(self) -> int:
        """Smallest number of samples in a minibatch."""
        return 4

    @property
    def whole_rows(self) -> bool:
        return self.level == "sequence"

    @property
    def unit(self) -> str:
        """What samples are, in words."""
        return "tokens" if self.level == "token" else "sequences"

    def __post_init__(self) -> None:
        check_permutations(self.permutations, type(self).__name__)

    def check_sites(self, *models: Model) -> None:
        super().check_sites(*models)
        check_null_memory(self.permutations, models, self.max_memory_gb, type(self).__name__)

    def kernel(self, first: Sums) -> Kernel:
        return partial(minibatch_kernel, matrix=self.matrix, prepare=self._prepare(), **self._drawing())

    def exchange(self) -> Exchange | None:
        kernel = partial(pair_kernel, matrix=self.matrix, **self._drawing())
        return Exchange(kernel, products, self._crossing, partial(relations_of_pairs, prepare=self._prepare()))

    def _prepare(self) -> Prepare:
        return partial(
            relations,
            relate=self.relate,
            least=self.least,
            permutations=self.permutations,
            symmetric=self.symmetric_relations,
        )

    def _drawing(self) -> dict[str, Any]:
        rows = partial(samples, level=self.level, pool=self.pool)
        return {"rows": rows, "size": self.minibatch, "seed": self.seed, "least": self.least}

    def _crossing(self, tokens: int, rows: int, layers: int) -> int:
        count = tokens if self.level == "token" else rows
        n = min(self.minibatch, count)
        # The upper triangle of each matrix in float32, and the key of the permutations.
        return (count // n) * (4 * layers * n * (n + 1) // 2 + 8) if n >= self.least else 0

    def need_minibatch(self, sums: Sums, run: Run) -> None:
        """Refuse a run without a minibatch.

        Args:
            sums: of all batches.
            run: the finished run.

        Raises:
            LayersimError: no batch had enough samples.
        """
        if int(sums["samples"]) == 0:
            raise LayersimError(
                f"{type(self).__name__} needs {self.least} samples in one forward batch, and no batch had that many.",
                given=f"{run.provenance.tokens} tokens in {run.provenance.batches} batches, level={self.level!r}",
                expected=f"at least {self.least} {self.unit} in one batch",
                do="pass more data, or a larger batch_size=",
            )
