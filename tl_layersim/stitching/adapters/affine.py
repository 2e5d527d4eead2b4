"""Affine adapters."""

from __future__ import annotations

from torch import Tensor

from .adapter_kind import AdapterKind


class Affine(AdapterKind):
    """Affine map, $y = W h + b$.

    Source:
        Brown et al. 2023 (arXiv 2310.14993), section 3.
    """

    name = "affine"
    is_affine = True

    @staticmethod
    def features(hidden: Tensor) -> Tensor:
        return hidden
