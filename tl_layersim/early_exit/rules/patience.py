"""Exit rule: consecutive checks have the same prediction."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.errors import LayersimError
from .exit_rule import CheckedTokens, ExitRule, RuleState


class PatienceRule(ExitRule):
    """A token exits when its prediction is the same at `threshold` checks in a row.

    Source:
        Zhou et al. 2020 (arXiv 2006.04152).

    Examples:
        >>> import torch
        >>> logits = torch.tensor([[3.0, 0.0]])
        >>> rule = PatienceRule(2)
        >>> state = rule.new_state(1)
        >>> [bool(rule.exits(CheckedTokens(logits, logits, logits, torch.arange(1)), state)) for _ in range(2)]
        [False, True]
    """

    name = "patience"
    lowest = 1
    # More checks than any model has layers.
    unreachable = 1_000_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold % 1:
            raise LayersimError(f"`threshold` of rule={self.name!r} is {self.threshold:g}; it must be a whole number.")

    def new_state(self, count: int) -> RuleState:
        return {"prediction": torch.full((count,), -1), "streak": torch.zeros(count, dtype=torch.int64)}

    def exits(self, tokens: CheckedTokens, state: RuleState) -> Tensor:
        prediction = tokens.logits.argmax(-1).cpu()
        index = tokens.index.cpu()
        streak = torch.where(prediction == state["prediction"][index], state["streak"][index] + 1, 1)
        state["prediction"][index] = prediction
        state["streak"][index] = streak
        return streak >= self.threshold
