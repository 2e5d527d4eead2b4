"""Base class of the analyzers of summed cross-products, with their common options."""

# Annotations are objects here, not text: subclasses of other files, whose types are checked, lack names such as Literal.
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from torch import Tensor

from ..core.argument_checks import typed
from ..core.bounds import Limit, PermutationCount, Seed
from ..core.sums import Sums
from ..models.model_info import Model
from ..models.pools import Draws, PoolKernel, pool_rows
from ..models.view import Kernel
from ._covariances import check_sums_fit
from ._cross_products import cross_product_kernel, draw_exchanged, exchanged_sums
from ._sample_vectors import samples
from .base import Analyzer

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
