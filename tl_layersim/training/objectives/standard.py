"""The cross-entropy of the last layer."""

from __future__ import annotations

from typing import Any

from .objective import Objective


class StandardObjective(Objective):
    r"""The cross-entropy of the last layer, $CE_L$, at every step."""

    name = "standard"

    @classmethod
    def is_standard(cls, settings: Any, step: int) -> bool:
        return True
