"""Checks: which tokens exit at a layer, by an exit rule or at given layers, and their logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
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
        heads: heads of the layers below the last; None for the model's own head at every layer.
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


# What the head is applied to, `token width`, and whether the final norm is still to be applied to it.
HeadInput = Callable[[], tuple[Tensor, bool]]


class ExitCheck(ABC):
    """Decides at each layer which tokens exit, and returns the logits of these tokens.

    Args:
        lens: the predictions of each layer.

    Attributes:
        checked: tokens evaluated so far, summed over layers.
    """

    def __init__(self, lens: ExitLens) -> None:
        self.lens, self.checked = lens, 0

    @abstractmethod
    def restart(self, rows: list[int]) -> None:
        """Begin with new tokens, those of some rows; forget all others."""

    @abstractmethod
    def evaluate(
        self, leaving: Tensor, entering: Tensor, index: Tensor, layer: int, read: HeadInput
    ) -> tuple[Tensor, Tensor | None]:
        """Which tokens exit, `token`, and logits `token vocabulary` of all tokens, None if they were not computed."""

    def __call__(
        self, leaving: Tensor, entering: Tensor, index: Tensor, layer: int, last: bool, read: HeadInput | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Which tokens exit at a layer.

        Args:
            leaving: `token d_model`, the residual that left the last block.
            entering: `token d_model`, the residual that entered it.
            index: `token`, the position of each token among those of `restart`.
            layer: number of blocks that have run.
            last: whether no block runs after these, so that all tokens exit.
            read: gives the input of the head; None for `leaving`.

        Returns:
            `token`, bool; and logits `token vocabulary` of the tokens that exit, None if there is none.
        """
        read = read or (lambda: (leaving, True))
        if last:
            x, needs_norm = read()
            return leaving.new_ones(len(leaving), dtype=torch.bool), self.lens(x, layer, needs_norm)
        self.checked += len(leaving)
        exits, logits = self.evaluate(leaving, entering, index, layer, read)
        exits = exits.to(leaving.device)
        if not bool(exits.any()):
            return exits, None
        if logits is not None:
            return exits, logits[exits]
        x, needs_norm = read()
        return exits, self.lens(x[exits], layer, needs_norm)


class FixedCheck(ExitCheck):
    """Tokens exit at given layers.

    Args:
        lens: the predictions of each layer.
        layers: `row`, the number of blocks after which the tokens of each row exit.
    """

    def __init__(self, lens: ExitLens, layers: Tensor) -> None:
        super().__init__(lens)
        self.layers = self.current = layers

    def restart(self, rows: list[int]) -> None:
        self.current = self.layers[rows]

    def evaluate(
        self, leaving: Tensor, entering: Tensor, index: Tensor, layer: int, read: HeadInput
    ) -> tuple[Tensor, Tensor | None]:
        return self.current[index.cpu()] == layer, None


class RuleCheck(ExitCheck):
    """Tokens exit by an exit rule.

    Args:
        lens: the predictions of each layer.
        rule: the rule.
    """

    def __init__(self, lens: ExitLens, rule: ExitRule) -> None:
        super().__init__(lens)
        self.rule, self.state = rule, rule.new_state(0)
        # By layer, where layers have heads of their own; else one entry.
        self._shortlist_rows: dict[int, tuple[Tensor, Tensor | None]] = {}

    def restart(self, rows: list[int]) -> None:
        self.state = self.rule.new_state(len(rows))

    def evaluate(
        self, leaving: Tensor, entering: Tensor, index: Tensor, layer: int, read: HeadInput
    ) -> tuple[Tensor, Tensor | None]:
        logits = self._logits(layer, *read()) if self.rule.reads_logits else leaving.new_zeros(len(leaving), 0)
        exits = self.rule.exits(CheckedTokens(logits, entering, leaving, index), self.state)
        return exits, logits if self.rule.gives_logits else None

    def _logits(self, layer: int, x: Tensor, needs_norm: bool) -> Tensor:
        """Logits `token vocabulary`, or `token candidate` of a shortlist."""
        if self.rule.shortlist is None:
            return self.lens(x, layer, needs_norm)
        key = 0 if self.lens.heads is None else layer
        if key not in self._shortlist_rows:
            self._shortlist_rows[key] = self.lens.rows(layer, self.rule.shortlist)
        return self.lens.logits_of_rows(x, *self._shortlist_rows[key], needs_norm)
