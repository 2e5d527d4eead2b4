"""Checks of an exit rule on the residuals that leave a layer, with the lens that the rule reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..architectures.unembed import LayerHeads, Unembed
from .rules.exit_rule import CheckedTokens, ExitRule


@dataclass(frozen=True, eq=False)
class ExitLens:
    """The predictions of each layer of a model, from its residual.

    Attributes:
        unembed: the model's own final norm and head.
        blocks: number of blocks of the model.
        heads: of the layers below the last; None for the model's own head at every layer.
        normed: whether `heads` read the output of the final norm.
    """

    unembed: Unembed
    blocks: int
    heads: LayerHeads | None = None
    normed: bool = True

    def norms(self, layer: int) -> bool:
        """Whether the head of a layer, counted from 1, reads the output of the final norm."""
        return self.heads is None or self.normed or layer == self.blocks

    def __call__(self, x: Tensor, layer: int, needs_norm: bool = True) -> Tensor:
        """Logits `token vocabulary` after block number `layer`, counted from 1.

        Args:
            x: `token d_model`, residuals that leave the block, or what a head that reads rows pools of them.
            layer: number of the block.
            needs_norm: whether the final norm is still to be applied where the head reads its output.
        """
        if self.heads is None:
            return self.unembed(x, needs_norm)
        own = layer == self.blocks
        normed = needs_norm and self.norms(layer)
        logits = self.unembed(x, normed) if own else self.heads.logits(self.unembed, x, layer - 1, normed)
        # The logits of all layers are one tensor.
        return logits.to(torch.promote_types(self.heads.weight.dtype, self.unembed.dtype or logits.dtype))

    def rows(self, layer: int, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """The rows of a layer's head, weight `candidate d_model` and bias `candidate`, that belong to some token ids."""
        if self.heads is not None:
            return self.heads.rows(layer - 1, ids)
        linear = self.unembed.linear
        assert linear is not None
        ids = ids.to(linear.weight.device)
        return linear.weight.detach()[ids], None if linear.bias is None else linear.bias.detach()[ids]

    def logits_of_rows(self, x: Tensor, weight: Tensor, bias: Tensor | None, needs_norm: bool) -> Tensor:
        """Logits `token candidate` of rows of a head; `x` and `needs_norm` as in a call."""
        read = self.unembed.features(x, needs_norm and (self.heads is None or self.normed)).to(weight.dtype)
        return self.unembed.finish(torch.nn.functional.linear(read, weight, bias))


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
