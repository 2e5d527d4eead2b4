"""Full-sequence forward passes with early exit, without a cache: each position exits at the first check that it passes."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..activations.block_call import first_tensor
from ..sources.hooks import ForwardRun, on_leave
from ..split import LocalSplitModel
from .checks import ExitCheck, ExitLens
from .decoding import Counts, entered
from .rules.exit_rule import ExitRule
from .supported_models import no_cache, not_reached


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


class FullSequence:
    """A forward pass in which positions exit at checks, and rows are dropped or shortened when their positions have exited.

    Args:
        split_model: the model.
        lens: the predictions of its layers.
        ends: numbers of blocks after which positions may exit; the last is the number of all blocks.
        rule: the exit rule; None where `forced` gives all exits or `ends` has no check.
        forced: `row pos`, the index in `ends` at which each position exits, for verification.
    """

    def __init__(
        self,
        split_model: LocalSplitModel,
        lens: ExitLens,
        ends: tuple[int, ...],
        rule: ExitRule | None = None,
        forced: Tensor | None = None,
    ) -> None:
        self.split_model, self.lens, self.ends, self.rule, self.forced = split_model, lens, ends, rule, forced
        self.counts = Counts()
        self.forward = ForwardRun()

    def __call__(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Logits `row pos vocabulary` and exits `row pos` (number of blocks), both 0 where `rows.positions` is False."""
        self.inputs = rows
        self.running = rows.positions.clone()
        self.exits = torch.zeros(self.running.shape, dtype=torch.int64)
        self.logits: Tensor | None = None
        self.check = None if self.rule is None else ExitCheck(self.rule, self.lens, self.running.numel())
        self.first_tokens = 0
        self.rows, self.length = torch.arange(len(self.running), device=self.running.device), self.running.shape[1]
        self.segment, self.hidden = 0, torch.empty(0)
        while len(self.rows):
            self._forward()
        assert self.logits is not None
        return self.logits, self.exits

    def _forward(self) -> None:
        """One forward pass of the current rows from the current segment on."""
        self.stopped = False
        self.counts.passes += 1
        options: dict[str, Any] = {**self.inputs.part(self.rows, self.length), **no_cache(self.split_model)}
        with ExitStack() as stack:
            for number in range(self.segment, len(self.ends)):
                block = self.split_model.blocks[self.ends[number] - 1]
                handle = on_leave(block, self._hook(number), with_kwargs=True)
                stack.callback(handle.remove)
            if self.segment:
                x = self.hidden
                stack.enter_context(entered(self.split_model, self.ends[self.segment - 1], x))
            with self.forward:
                self.split_model.module(**options)
        if not self.stopped:
            raise not_reached(self.split_model, self.ends[self.segment])

    def _hook(self, number: int) -> Any:
        """The forward hook of the last block of a segment."""

        def reached(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._reached(number, first_tensor((*args, *kwargs.values())), first_tensor(output))

        return reached

    def _reached(self, number: int, entering: Tensor, hidden: Tensor) -> None:
        """Let positions exit at the end of a segment; stop the forward pass if rows can be dropped or shortened."""
        length = self.ends[number] - (self.ends[number - 1] if number else 0)
        self.counts.blocks += length
        if not self.first_tokens:
            self.first_tokens = hidden.shape[0] * hidden.shape[1]
        self.counts.tokens += length * hidden.shape[0] * hidden.shape[1]
        last = number + 1 == len(self.ends)
        running = self.running[self.rows, : self.length]
        x, before = (self._residuals(states, running) for states in (hidden, entering))
        index = torch.arange(self.running.numel(), device=self.running.device).reshape(self.running.shape)
        index = index[self.rows, : self.length][running]
        logits: Tensor | None = None
        if last:
            exits = torch.ones(len(x), dtype=torch.bool, device=x.device)
        else:
            self.counts.checks += len(x)
            exits, logits = self._decide(number, hidden, x, before, index)
        if logits is None:
            read, needs_norm = self._head_input(number, hidden, x)
            logits = self.lens(read[exits], self.ends[number], needs_norm)
        else:
            logits = logits[exits]
        self._exit(self.ends[number], index[exits], logits)
        if last:
            self.rows, self.stopped = self.rows[:0], True
            self.forward.stop()
        self._continue(number, hidden)

    def _residuals(self, hidden: Tensor, running: Tensor) -> Tensor:
        """Residuals `token d_model` of the running positions, or the pooled one of each row, from `row pos d_model`."""
        if self.lens.unembed.pool is not None:
            return self.lens.unembed.pool(hidden, self._attended(hidden))
        # Vision models run more positions than the one that is classified.
        return hidden[:, : self.length][running]

    def _head_input(self, number: int, hidden: Tensor, x: Tensor) -> tuple[Tensor, bool]:
        """The vectors from which the lens computes logits, and whether the final norm is still to be applied to them."""
        unembed = self.lens.unembed
        if unembed.pool is None:
            return x, True
        return unembed.pooled(hidden, self._attended(hidden), self.lens.norms(self.ends[number])), False

    def _attended(self, hidden: Tensor) -> Tensor:
        """The attended positions of the current rows, `row pos`."""
        attended = self.inputs.attended
        return torch.ones_like(hidden[..., 0], dtype=torch.bool) if attended is None else attended[self.rows]

    def _decide(self, number: int, hidden: Tensor, x: Tensor, before: Tensor, index: Tensor) -> tuple[Tensor, Tensor | None]:
        """Which tokens exit, and their logits where the check computed them."""
        if self.forced is not None:
            return (self.forced.flatten()[index] == number), None
        assert self.check is not None
        read = self._head_input(number, hidden, x) if self.check.rule.reads_logits else (x, True)
        return self.check(x, before, index, self.ends[number], *read)

    def _exit(self, layer: int, index: Tensor, logits: Tensor) -> None:
        """Store the logits and the exit of the positions that exit."""
        if self.logits is None:
            self.logits = logits.new_zeros(*self.running.shape, logits.shape[-1])
        self.logits.view(-1, logits.shape[-1])[index] = logits
        self.running.view(-1)[index] = False
        self.exits.view(-1)[index.cpu()] = layer

    def _continue(self, number: int, hidden: Tensor) -> None:
        """Drop rows in which every position has exited and, in a causal model, the positions after the last running one."""
        running = self.running[self.rows, : self.length]
        continuing = running.any(1)
        length = self.length
        if self.inputs.causal and bool(continuing.any()):
            length = int(running.any(0).nonzero().max()) + 1
        self.segment = number + 1
        if bool(continuing.all()) and length == self.length:
            return
        self.hidden = hidden[continuing, :length] if self.inputs.causal else hidden[continuing]
        self.rows, self.length, self.stopped = self.rows[continuing], length, True
        self.forward.stop()
