"""The adapter that hands the front's residual stream on as it is."""

from __future__ import annotations

from torch import Tensor

from .base import AdapterKind


class Identity(AdapterKind):
    """$y = h$: both models are taken to write in the same coordinates."""

    name = "identity"
    has_weight = False
    has_bias = False
    needs_equal_widths = True

    @staticmethod
    def features(hidden: Tensor) -> Tensor:
        return hidden
