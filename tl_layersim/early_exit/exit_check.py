"""ExitCheck: evaluates an exit rule on the residuals that leave a layer."""

from __future__ import annotations

from torch import Tensor

from .exit_lens import ExitLens
from .rules.base import CheckedTokens, ExitRule


class ExitCheck:
    """Evaluates an exit rule on many tokens, one layer after the other, and holds the rule's state of these tokens.

    Args:
        rule: the rule.
        lens: the predictions of each layer.
        count: number of tokens.
    """

    def __init__(self, rule: ExitRule, lens: ExitLens, count: int) -> None:
        self.rule, self.lens = rule, lens
        self.state = rule.new_state(count)
        # By layer, where layers have heads of their own; else one entry.
        self._shortlist_rows: dict[int, tuple[Tensor, Tensor | None]] = {}

    def restart(self, count: int) -> None:
        """Discard the rule's state, and begin with `count` new tokens."""
        self.state = self.rule.new_state(count)

    def __call__(
        self, leaving: Tensor, entering: Tensor, index: Tensor, layer: int, read: Tensor | None = None, needs_norm: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Which tokens exit at a layer.

        Args:
            leaving: `token d_model`, the residual that left the last block.
            entering: `token d_model`, the residual that entered it.
            index: `token`, the position of each token in the rule's state.
            layer: number of blocks that have run.
            read: `token width`, what the head is applied to; None for `leaving`.
            needs_norm: whether the final norm is still to be applied to it.

        Returns:
            `token`, bool; and logits `token vocabulary`, None where the check did not compute all of them.
        """
        logits = self._logits(layer, leaving if read is None else read, needs_norm)
        exits = self.rule.exits(CheckedTokens(logits, entering, leaving, index), self.state)
        return exits.to(leaving.device), logits if self.rule.gives_logits else None

    def _logits(self, layer: int, x: Tensor, needs_norm: bool) -> Tensor:
        """Input of the exit rule: logits `token vocabulary`, shortlist logits `token candidate`, or an empty `token 0`."""
        if not self.rule.reads_logits:
            return x.new_zeros(len(x), 0)
        if self.rule.shortlist is None:
            return self.lens(x, layer, needs_norm)
        return self._shortlist_logits(layer, x, self.rule.shortlist, needs_norm)

    def _shortlist_logits(self, layer: int, x: Tensor, shortlist: Tensor, needs_norm: bool) -> Tensor:
        """Logits `token candidate`: the final norm, and a product with the rows of the head that belong to the shortlist."""
        key = 0 if self.lens.heads is None else layer
        if key not in self._shortlist_rows:
            self._shortlist_rows[key] = self.lens.rows(layer, shortlist)
        return self.lens.logits_of_rows(x, *self._shortlist_rows[key], needs_norm)
