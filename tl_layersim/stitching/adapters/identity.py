"""Adapters that change nothing."""

from __future__ import annotations

from torch import Tensor

from .adapter_kind import AdapterKind


class Identity(AdapterKind):
    """Identity map, $y = h$, for models whose residual streams have the same basis."""

    name = "identity"
    is_affine = True
    has_weight = False
    has_bias = False

    @staticmethod
    def features(hidden: Tensor) -> Tensor:
        return hidden
