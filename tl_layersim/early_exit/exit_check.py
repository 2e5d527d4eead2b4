"""ExitCheck: evaluates an exit rule on the residuals that leave a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from ..models.unembed import Unembed
from .rules.base import CheckedTokens, ExitRule


class ExitCheck:
    """Evaluates an exit rule on many tokens, one layer after the other, and holds the rule's state of these tokens.

    Args:
        rule: the rule.
        unembed: the model's own final norm and head.
        count: number of tokens.
    """

    def __init__(self, rule: ExitRule, unembed: Unembed, count: int) -> None:
        self.rule, self.unembed = rule, unembed
        self.state = rule.new_state(count)
        self._shortlist_rows: tuple[Tensor, Tensor | None] | None = None

    def restart(self, count: int) -> None:
        """Discard the rule's state, and begin with `count` new tokens."""
        self.state = self.rule.new_state(count)

    def __call__(
        self, leaving: Tensor, entering: Tensor, index: Tensor, read: Tensor | None = None, needs_norm: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Which tokens exit at a layer.

        Args:
            leaving: `token d_model`, the residual that left the last block.
            entering: `token d_model`, the residual that entered it.
            index: `token`, the position of each token in the rule's state.
            read: `token width`, what the head is applied to; None for `leaving`.
            needs_norm: whether the head is to apply the final norm to it.

        Returns:
            `token`, bool; and logits `token vocabulary`, None where the check did not compute all of them.
        """
        logits = self._logits(leaving if read is None else read, needs_norm)
        exits = self.rule.exits(CheckedTokens(logits, entering, leaving, index), self.state)
        return exits.to(leaving.device), logits if self.rule.gives_logits else None

    def _logits(self, x: Tensor, needs_norm: bool) -> Tensor:
        """Input of the exit rule: logits `token vocabulary`, shortlist logits `token candidate`, or an empty `token 0`."""
        if not self.rule.reads_logits:
            return x.new_zeros(len(x), 0)
        if self.rule.shortlist is None:
            return self.unembed(x, needs_norm)
        return self._shortlist_logits(self.unembed.normed(x) if needs_norm else x, self.rule.shortlist)

    def _shortlist_logits(self, x: Tensor, shortlist: Tensor) -> Tensor:
        """Logits `token candidate` of normed residuals: a product with the rows of the head that belong to the shortlist."""
        linear = self.unembed.linear
        assert linear is not None
        if self._shortlist_rows is None:
            ids = shortlist.to(linear.weight.device)
            self._shortlist_rows = (linear.weight.detach()[ids], None if linear.bias is None else linear.bias.detach()[ids])
        weight, bias = self._shortlist_rows
        return self.unembed.finish(torch.nn.functional.linear(x.to(weight.dtype), weight, bias))
