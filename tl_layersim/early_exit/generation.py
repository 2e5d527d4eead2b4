"""Rows of tokens that grow, each run as deep as it has to be.

A token that exits has no keys and values above. They are not made up: what would have entered the next block is kept, and the
upper blocks run on it when a later token of that row goes deeper, in one pass with that token. So what is in the cache is what
the whole model would have put there.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import LayersimError
from ..models.block_call import first_tensor
from ..models.hooks import ForwardRun, on_leave
from ..models.split_model import LocalSplitModel
from .cache import ColumnCache, Columns, grown

# From a layer, the numbers of the rows that ran up to it, and `row d_model` of their newest tokens (what left its last block
# and what entered it), to the numbers of those that go on.
Decide = Callable[[int, list[int], Tensor, Tensor], list[int]]
ROOM = 256


@contextmanager
def entered(half: LocalSplitModel, layer: int, x: Tensor) -> Iterator[None]:
    """`LocalSplitModel.entered`, where others' hooks on the block below have seen, and perhaps changed, `x` before."""
    below = vars(half.blocks[layer - 1])
    hooks = below["_forward_hooks"]
    below["_forward_hooks"] = OrderedDict()
    try:
        with half.entered(layer, lambda _: x):
            yield
    finally:
        below["_forward_hooks"] = hooks


class Counts:
    """What really ran.

    Attributes:
        blocks: calls of blocks, whatever they were given.
        tokens: tokens run through blocks, summed over blocks.
        passes: forward passes that were started.
        checks: tokens asked at checks.
    """

    def __init__(self) -> None:
        self.blocks = self.tokens = self.passes = self.checks = 0


class Decoding:
    """The state of some rows: their tokens, how far each has run at each depth, keys, values, and what waits between.

    Args:
        half: the model.
        ends: counts of blocks after which is decided who goes on; the last is all blocks.
        tokens: `row column`, padded on the left.
        attended: `row column`, which of them are no padding; None if all are.
        room: how many columns are to be expected.
    """

    def __init__(
        self, half: LocalSplitModel, ends: tuple[int, ...], tokens: Tensor, attended: Tensor | None, room: int, counts: Counts
    ) -> None:
        self.half, self.ends, self.counts = half, ends, counts
        self.tokens, self.attended = tokens, attended
        self.pads = None if attended is None else (~attended).sum(1)
        self.ran = [[0] * len(tokens) for _ in ends]
        self.cache = ColumnCache(len(half.blocks), len(tokens), min(room, tokens.shape[1] + ROOM))
        self.waiting: list[Tensor | None] = [None for _ in ends]
        parameters = inspect.signature(type(half.module).forward).parameters
        self.positions = "position_ids" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def append(self, new: Tensor) -> None:
        """One more token `row` in each row."""
        self.tokens = torch.cat([self.tokens, new[:, None]], 1)
        if self.attended is not None:
            self.attended = torch.cat([self.attended, torch.ones_like(new[:, None], dtype=torch.bool)], 1)

    def keep(self, rows: list[int]) -> None:
        """Forget all other rows."""
        index = torch.tensor(rows, device=self.tokens.device)
        self.tokens = self.tokens[index]
        if self.attended is not None and self.pads is not None:
            self.attended, self.pads = self.attended[index], self.pads[index]
        self.ran = [[ran[row] for row in rows] for ran in self.ran]
        self.cache.keep(index)
        self.waiting = [None if x is None else x.index_select(0, index) for x in self.waiting]

    @contextmanager
    def watched(self, decide: Decide) -> Iterator[Callable[[], None]]:
        """Hooks on the last blocks of all stretches; what is yielded runs the newest tokens of all rows."""
        stretch = _Stretch(self, decide)
        handles = [
            on_leave(self.half.blocks[end - 1], stretch.hook(number), with_kwargs=True) for number, end in enumerate(self.ends)
        ]
        try:
            yield stretch.step
        finally:
            for handle in handles:
                handle.remove()


class _Stretch:
    """Forward passes over a `Decoding`: each begins at one end and goes on until some rows stop."""

    def __init__(self, state: Decoding, decide: Decide) -> None:
        self.state, self.decide = state, decide
        self.rows: list[int] = []
        self.stage = 0
        self.before: list[int] = []
        self.part = Columns(None, 0, 0)
        self.stopped, self.forward = False, ForwardRun()

    def step(self) -> None:
        """Run the newest token of all rows, and what waits for it."""
        self.rows, self.stage = list(range(len(self.state.tokens))), 0
        while self.rows:
            self._run()

    def _run(self) -> None:
        state = self.state
        end = state.tokens.shape[1]
        self.before = [state.ran[self.stage][row] for row in self.rows]
        start = min(self.before)
        whole = len(self.rows) == len(state.tokens)
        ragged = self.before if max(self.before) > start else None
        self.part = part = Columns(None if whole else self.rows, start, end, ragged, state.tokens.device)
        state.cache.part = part
        options: dict[str, Any] = {"past_key_values": state.cache, "use_cache": True}
        if state.attended is not None and state.pads is not None:
            options["attention_mask"] = part.take(state.attended).long()
            if state.positions:
                pads = state.pads if whole else state.pads[self.rows]
                columns = torch.arange(start, end, device=pads.device)
                options["position_ids"] = (columns - pads[:, None]).clamp(min=0)
        self.stopped = False
        state.counts.passes += 1
        ids = part.take(state.tokens, start)
        with self.forward:
            if self.stage == 0:
                state.half.module(input_ids=ids, **options)
            else:
                waiting = state.waiting[self.stage]
                assert waiting is not None
                x = part.take(waiting, start)
                with entered(state.half, state.ends[self.stage - 1], x):
                    state.half.module(input_ids=ids, **options)
        if not self.stopped:
            raise LayersimError(
                f"The forward pass of {state.half.model.name} did not come to block {state.ends[self.stage] - 1}.",
                given=type(state.half.module).__name__,
                expected="each block to run once, in order, as a module of its own; a compiled graph runs past their hooks",
                do="the model before torch.compile; layers=[...] names the right blocks",
            )

    def hook(self, number: int) -> Callable[[nn.Module, Any, Any, Any], None]:
        """What is done when the last block of a stretch has run."""

        def reached(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            # Blocks that only hand on are called too.
            if number < self.stage:
                return
            self._reached(number, first_tensor((*args, *kwargs.values())), first_tensor(output))

        return reached

    def _reached(self, number: int, entered: Tensor, hidden: Tensor) -> None:
        state, part = self.state, self.part
        ran = state.ran[number]
        for row in self.rows:
            ran[row] = part.end
        length = state.ends[number] - (state.ends[number - 1] if number else 0)
        state.counts.blocks += length
        state.counts.tokens += length * hidden.shape[0] * hidden.shape[1]
        on = self.decide(state.ends[number], self.rows, hidden[:, -1], entered[:, -1])
        if number + 1 == len(state.ends):
            self.rows, self.stopped = [], True
            self.forward.stop()
        self.stage = number + 1
        above = state.ran[self.stage]
        if len(on) == len(self.rows) and all(above[row] == first for row, first in zip(self.rows, self.before, strict=True)):
            # All go on and nothing waits here: so does this pass.
            return
        waiting = state.waiting[self.stage]
        waiting = state.cache.room_for(hidden) if waiting is None else waiting
        state.waiting[self.stage] = waiting = grown(waiting, part.end)
        part.put(waiting, hidden)
        self.rows, self.stopped = on, True
        self.forward.stop()
