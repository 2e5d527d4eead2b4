"""Whole rows at once, without a cache: each position leaves at the first check that is sure of it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import LayersimError
from ..models.block_call import first_tensor
from ..models.hooks import ForwardRun, on_leave
from ..models.split_model import LocalSplitModel
from ..models.unembed import Unembed
from .generation import Counts, entered
from .rules import ConfidenceCheck, Rule
from .supported_models import no_cache


@dataclass(frozen=True)
class Rows:
    """What a model is given.

    Attributes:
        inputs: arguments of its forward by name, each with one entry for each row.
        asked: `row pos`, which positions are read; a classifier of rows reads one of each.
        causal: whether positions know nothing of those behind them, so that rows may be cut there.
    """

    inputs: dict[str, Tensor]
    asked: Tensor
    causal: bool

    def part(self, rows: Tensor, length: int) -> dict[str, Tensor]:
        """The arguments for some rows, up to a position."""
        cut = self.causal and length < self.asked.shape[1]
        return {name: x[rows, :length] if cut else x[rows] for name, x in self.inputs.items()}


class FullSequence:
    """A forward pass from which rows and positions leave.

    Args:
        half: the model.
        unembed: the lens.
        ends: counts of blocks after which is asked; the last is all blocks.
        rule: what is asked.
        forced: `row pos`, at which of these checks (counted from 0) a position leaves whatever the rule says; for a self-check.
    """

    def __init__(
        self, half: LocalSplitModel, unembed: Unembed, ends: tuple[int, ...], rule: Rule, forced: Tensor | None = None
    ) -> None:
        self.half, self.unembed, self.ends, self.rule, self.forced = half, unembed, ends, rule, forced
        self.counts = Counts()
        self.forward = ForwardRun()

    def __call__(self, given: Rows) -> tuple[Tensor, Tensor]:
        """Logits `row pos vocabulary` and exits `row pos`, both 0 where nothing was asked."""
        self.given = given
        self.left = given.asked.clone()
        self.exits = torch.zeros(self.left.shape, dtype=torch.int64)
        self.logits: Tensor | None = None
        self.judge = ConfidenceCheck(self.rule, self.unembed, self.left.numel())
        self.first_tokens = 0
        self.rows, self.length = torch.arange(len(self.left), device=self.left.device), self.left.shape[1]
        self.stage, self.hidden = 0, torch.empty(0)
        while len(self.rows):
            self._run()
        assert self.logits is not None
        return self.logits, self.exits

    def _run(self) -> None:
        self.stopped = False
        self.counts.passes += 1
        options: dict[str, Any] = {**self.given.part(self.rows, self.length), **no_cache(self.half)}
        with ExitStack() as stack:
            for number in range(self.stage, len(self.ends)):
                handle = on_leave(self.half.blocks[self.ends[number] - 1], self._hook(number), with_kwargs=True)
                stack.callback(handle.remove)
            if self.stage:
                x = self.hidden
                stack.enter_context(entered(self.half, self.ends[self.stage - 1], x))
            with self.forward:
                self.half.module(**options)
        if not self.stopped:
            raise LayersimError(
                f"The forward pass of {self.half.model.name} did not come to block {self.ends[self.stage] - 1}.",
                given=type(self.half.module).__name__,
                expected="each block to run once, in order, as a module of its own",
                do="layers=[...] names the right blocks",
            )

    def _hook(self, number: int) -> Any:
        def reached(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._reached(number, first_tensor((*args, *kwargs.values())), first_tensor(output))

        return reached

    def _reached(self, number: int, entered: Tensor, hidden: Tensor) -> None:
        length = self.ends[number] - (self.ends[number - 1] if number else 0)
        self.counts.blocks += length
        if not self.first_tokens:
            self.first_tokens = hidden.shape[0] * hidden.shape[1]
        self.counts.tokens += length * hidden.shape[0] * hidden.shape[1]
        last = number + 1 == len(self.ends)
        open_now = self.left[self.rows, : self.length]
        # Vision models run more positions than the one that is read.
        hidden, all_of_it = hidden[:, : self.length], hidden
        x = hidden[open_now]
        which = torch.arange(self.left.numel(), device=self.left.device).reshape(self.left.shape)
        which = which[self.rows, : self.length][open_now]
        logits: Tensor | None = None
        if last:
            sure = torch.ones(len(x), dtype=torch.bool, device=x.device)
        else:
            self.counts.checks += len(x)
            sure, logits = self._ask(number, x, entered[:, : self.length][open_now], which)
        self._leave(self.ends[number], which[sure], self.unembed(x[sure]) if logits is None else logits[sure])
        if last:
            self.rows, self.stopped = self.rows[:0], True
            self.forward.stop()
        self._go_on(number, all_of_it)

    def _ask(self, number: int, x: Tensor, entering: Tensor, which: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.forced is not None:
            return (self.forced.flatten()[which] == number), None
        return self.judge(x, entering, which)

    def _leave(self, layer: int, which: Tensor, logits: Tensor) -> None:
        if self.logits is None:
            self.logits = logits.new_zeros(*self.left.shape, logits.shape[-1])
        self.logits.view(-1, logits.shape[-1])[which] = logits
        self.left.view(-1)[which] = False
        self.exits.view(-1)[which.cpu()] = layer

    def _go_on(self, number: int, hidden: Tensor) -> None:
        """Drop rows that have nothing left, and what stands behind the last position that has."""
        left = self.left[self.rows, : self.length]
        on = left.any(1)
        length = self.length
        if self.given.causal and bool(on.any()):
            length = int(left.any(0).nonzero().max()) + 1
        self.stage = number + 1
        if bool(on.all()) and length == self.length:
            return
        self.hidden = hidden[on, :length] if self.given.causal else hidden[on]
        self.rows, self.length, self.stopped = self.rows[on], length, True
        self.forward.stop()
