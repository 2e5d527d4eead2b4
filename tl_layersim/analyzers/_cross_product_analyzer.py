"""Base class of the analyzers of summed cross-products, with their common options."""

# Annotations are objects here, not text: subclasses of other files, whose types are checked, lack names such as Literal.
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from ..core.argument_checks import typed
from ..core.sums import Sums
from ..models.model_info import Model
from ..models.view import Kernel
from ._covariances import check_sums_fit
from ._cross_products import cross_product_kernel
from ._permutation_null import check_permutations
from ._sample_vectors import samples
from .base import Analyzer


@typed
@dataclass(frozen=True, eq=False)
class CrossProductAnalyzer(Analyzer):
    """An analyzer whose sums are the cross-products between sites. Subclasses compute a result from them.

    Args:
        level: see `Procrustes`, as for all options.
        pool: see `Procrustes`.
        permutations: see `Procrustes`.
        seed: see `Procrustes`.
        max_memory_gb: see `Procrustes`.
    """

    compares: ClassVar[bool] = True
    symmetric: ClassVar[bool] = True

    level: Literal["token", "sequence"] = "token"
    pool: Literal["mean", "last", "first"] = "mean"
    permutations: int = 0
    seed: int = 0
    max_memory_gb: int | float = 4.0

    def __post_init__(self) -> None:
        check_permutations(self.permutations, type(self).__name__)

    @property
    def whole_rows(self) -> bool:
        return self.level == "sequence"

    @property
    def unit(self) -> str:
        """What a sample is, in words."""
        return "tokens" if self.level == "token" else "sequences"

    def check_sites(self, *models: Model) -> None:
        super().check_sites(*models)
        check_sums_fit(models, self, self.max_memory_gb, self.permutations)

    def kernel(self, first: Sums) -> Kernel:
        rows = partial(samples, level=self.level, pool=self.pool)
        return partial(cross_product_kernel, rows=rows, permutations=self.permutations, seed=self.seed)
