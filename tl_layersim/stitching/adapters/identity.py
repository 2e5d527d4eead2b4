"""The identity adapter, which passes the front's residual stream on unchanged."""

from __future__ import annotations

from torch import Tensor

from .base import AdapterKind


class Identity(AdapterKind):
    """Identity map, $y = h$, for models whose residual streams share their coordinates."""

    name = "identity"
    has_weight = False
    has_bias = False
    needs_equal_widths = True

    @staticmethod
    def features(hidden: Tensor) -> Tensor:
        return hidden
