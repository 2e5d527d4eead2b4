"""Exit rule: the largest probability is high."""

from __future__ import annotations

from torch import Tensor

from ...core.cross_entropy import confidence
from .exit_rule import CheckedTokens, ExitRule, RuleState


class MaxProbRule(ExitRule):
    r"""A token exits when its largest probability exceeds the threshold.

    Probabilities are computed in float64, because float32 rounds $1 - p$ and thresholds near 1.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), section 3.

    Examples:
        >>> import torch
        >>> logits = torch.tensor([[3.0, 0.0], [1.0, 0.0]])  # largest probabilities 0.95 and 0.73
        >>> MaxProbRule(0.9).exits(CheckedTokens(logits, logits, logits, torch.arange(2)), {})
        tensor([ True, False])
    """

    name = "max-prob"

    def exits(self, tokens: CheckedTokens, state: RuleState) -> Tensor:
        return confidence(tokens.logits) > self.threshold
