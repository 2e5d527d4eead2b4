"""Exit rule: the two largest probabilities differ much."""

from __future__ import annotations

from torch import Tensor

from ...core.cross_entropy import confidence
from .exit_rule import CheckedTokens, ExitRule, RuleState


class MarginRule(ExitRule):
    r"""A token exits when its two largest probabilities differ by more than the threshold.

    Probabilities are computed in float64, because float32 rounds $1 - p$ and thresholds near 1.

    Source:
        Schuster et al. 2022 (arXiv 2207.07061), section 3.5, "softmax response".

    Examples:
        >>> import torch
        >>> logits = torch.tensor([[3.0, 0.0], [2.0, 0.0]])  # probabilities 0.95 and 0.05, 0.88 and 0.12
        >>> MarginRule(0.8).exits(CheckedTokens(logits, logits, logits, torch.arange(2)), {})
        tensor([ True, False])
    """

    name = "margin"

    def exits(self, tokens: CheckedTokens, state: RuleState) -> Tensor:
        return confidence(tokens.logits, margin=True) > self.threshold
