"""Exit rule: the residual hardly changes in a block."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.cross_entropy import on_float64_device
from .exit_rule import CheckedTokens, ExitRule, RuleState


class CosineRule(ExitRule):
    """A token exits when the residuals before and after the block have a cosine above the threshold.

    The rule does not read logits, so only tokens that exit are unembedded.

    Source:
        Schuster et al. 2022 (arXiv 2207.07061), section 3.5, "hidden-state saturation".

    Examples:
        >>> import torch
        >>> x, y = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[1.0, 0.1], [0.0, 1.0]])
        >>> CosineRule(0.9).exits(CheckedTokens(torch.zeros(2, 0), x, y, torch.arange(2)), {})
        tensor([ True, False])
    """

    name = "cosine"
    reads_logits = False
    lowest = -1.0

    def exits(self, tokens: CheckedTokens, state: RuleState) -> Tensor:
        leaving = on_float64_device(tokens.leaving).double()
        entering = on_float64_device(tokens.entering).double()
        return torch.cosine_similarity(leaving, entering, dim=-1) > self.threshold
