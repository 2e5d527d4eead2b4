"""Linear adapters."""

from __future__ import annotations

from torch import Tensor

from .adapter_kind import AdapterKind


class Linear(AdapterKind):
    """Linear map, $y = W h$."""

    name = "linear"
    is_affine = True
    has_bias = False

    @staticmethod
    def features(hidden: Tensor) -> Tensor:
        return hidden
