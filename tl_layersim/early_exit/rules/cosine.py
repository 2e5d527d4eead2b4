"""CosineRule: exit when the block hardly changes the direction of the residual."""

from __future__ import annotations

import torch
from torch import Tensor

from ...models.cross_entropy import on_float64_device
from .base import CheckedTokens, ExitRule, RuleState


class CosineRule(ExitRule):
    """A token exits when the cosine similarity of the residuals that enter and leave the block exceeds the threshold.

    The rule reads no logits: a check costs no unembedding, and only tokens that exit are unembedded.

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
        leaving, entering = (on_float64_device(x).double() for x in (tokens.leaving, tokens.entering))
        return torch.cosine_similarity(leaving, entering, dim=-1) > self.threshold
