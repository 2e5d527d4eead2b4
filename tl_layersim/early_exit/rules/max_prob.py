"""MaxProbRule: exit when the largest probability exceeds a threshold."""

from __future__ import annotations

from torch import Tensor

from ...models.cross_entropy import confidence
from .base import CheckedTokens, ExitRule, RuleState


class MaxProbRule(ExitRule):
    r"""A token exits when the largest probability of its layer's logits exceeds the threshold, $\max_v p_v > t$.

    Probabilities are computed in float64: float32 rounds both $1 - p$ and the threshold near 1.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), section 3.

    Examples:
        >>> import torch
        >>> logits = torch.tensor([[3.0, 0.0], [1.0, 0.0]])  # largest probabilities 0.95 and 0.73
        >>> MaxProbRule(0.9).exits(CheckedTokens(logits, logits, logits, torch.arange(2)), {})
        tensor([ True, False])
    """

    name = "max-prob"
    has_exit_curve = True

    def exits(self, tokens: CheckedTokens, state: RuleState) -> Tensor:
        return confidence(tokens.logits) > self.threshold
