"""Full-sequence forward passes with early exit, without a cache: each position exits at the first check that it passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..sources.inputs import no_cache
from ..sources.split_model import LocalSplitModel
from .exit_checks import ExitCheck
from .segments import Segments


@dataclass(frozen=True)
class Rows:
    """The inputs of a full-sequence forward pass.

    Attributes:
        inputs: arguments of the model's forward by name, each with one entry per row.
        positions: `row pos`, True where logits are computed; one position per row for a classifier of rows.
        causal: whether a position does not depend on later ones, so that rows may be shortened at the end.
        attended: `row pos`, False at padding, for heads that read rows; None without padding.
    """

    inputs: dict[str, Tensor]
    positions: Tensor
    causal: bool
    attended: Tensor | None = None

    def part(self, rows: Tensor, length: int) -> dict[str, Tensor]:
        """The model's arguments for some rows, cut to `length` positions in a causal model."""
        cut = self.causal and length < self.positions.shape[1]
        return {name: x[rows, :length] if cut else x[rows] for name, x in self.inputs.items()}


class FullSequence(Segments):
    """A forward pass in which positions exit at checks, and rows are dropped or shortened when their positions have exited.

    Args:
        split_model: the model.
        ends: as in `Segments`.
        check: decides which positions exit.
        inputs: inputs of the forward pass.

    Attributes:
        logits: `row pos vocabulary`, 0 where `inputs.positions` is False.
        exits: `row pos`, the number of blocks that had run at each exit, or 0.
        tokens: positions in a forward pass of the full model.
    """

    def __init__(self, split_model: LocalSplitModel, ends: tuple[int, ...], check: ExitCheck, inputs: Rows) -> None:
        super().__init__(split_model, ends)
        self.check, self.inputs, self.tokens = check, inputs, 0
        self.running = inputs.positions.clone()
        self.exits = torch.zeros(self.running.shape, dtype=torch.int64)
        self.logits = torch.empty(0)
        # The rows and the positions of the current forward pass, and the residuals that enter it.
        self.rows, self.length = torch.arange(len(self.running), device=self.running.device), self.running.shape[1]
        self.hidden: Tensor | None = None

    def run(self) -> None:
        self.check.restart(list(range(self.running.numel())))
        with self.hooked():
            super().run()

    def enter(self) -> tuple[dict[str, Any], Tensor | None] | None:
        if not len(self.rows):
            return None
        return self.inputs.part(self.rows, self.length) | no_cache(self.split_model.module), self.hidden

    def leave(self, number: int, entering: Tensor, hidden: Tensor) -> bool:
        self.tokens = self.tokens or hidden.shape[0] * hidden.shape[1]
        layer, last = self.ends[number], number + 1 == len(self.ends)
        running = self.running[self.rows, : self.length]
        x, before = (self._residuals(states, running) for states in (hidden, entering))
        index = torch.arange(self.running.numel(), device=self.running.device).reshape(self.running.shape)
        index = index[self.rows, : self.length][running]
        exits, logits = self.check(x, before, index, layer, last, lambda: self._head_input(layer, hidden, x))
        if logits is not None:
            self._exit(layer, index[exits], logits)
        if last:
            self.rows = self.rows[:0]
            return False
        return self._continue(hidden)

    def _residuals(self, hidden: Tensor, running: Tensor) -> Tensor:
        """Residuals `token d_model` of the running positions, or the pooled one of each row, from `row pos d_model`."""
        pool = self.check.lens.unembed.pool
        # Vision models run more positions than the one that is classified.
        return hidden[:, : self.length][running] if pool is None else pool(hidden, self._attended(hidden))

    def _head_input(self, layer: int, hidden: Tensor, x: Tensor) -> tuple[Tensor, bool]:
        """The vectors from which the lens computes logits, and whether the final norm is still to be applied to them."""
        lens = self.check.lens
        if lens.unembed.pool is None:
            return x, True
        return lens.unembed.pooled(hidden, self._attended(hidden), lens.norms(layer)), False

    def _attended(self, hidden: Tensor) -> Tensor:
        """The attended positions of the current rows, `row pos`."""
        attended = self.inputs.attended
        return torch.ones_like(hidden[..., 0], dtype=torch.bool) if attended is None else attended[self.rows]

    def _exit(self, layer: int, index: Tensor, logits: Tensor) -> None:
        """Store the logits and the exit of the positions that exit."""
        if not self.logits.numel():
            self.logits = logits.new_zeros(*self.running.shape, logits.shape[-1])
        self.logits.view(-1, logits.shape[-1])[index] = logits
        self.running.view(-1)[index] = False
        self.exits.view(-1)[index.cpu()] = layer

    def _continue(self, hidden: Tensor) -> bool:
        """Drop rows in which every position has exited and, in a causal model, the positions after the last running one.

        Returns:
            Whether there are none of these.
        """
        running = self.running[self.rows, : self.length]
        continuing = running.any(1)
        length = self.length
        if self.inputs.causal and bool(continuing.any()):
            length = int(running.any(0).nonzero().max()) + 1
        if bool(continuing.all()) and length == self.length:
            return True
        self.hidden = hidden[continuing, :length] if self.inputs.causal else hidden[continuing]
        self.rows, self.length = self.rows[continuing], length
        return False
