"""Cached decoding in which each row of a batch runs only as many blocks as its newest token needs.

A token that exits early has no keys and values in the blocks above its exit. They are not approximated: the residual that would
enter the next block is kept as pending, and the upper blocks run on it in the same forward pass as the first later token of its
row that runs deeper. The cache therefore holds what the full model would have put there.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..activations.block_call import first_tensor
from ..sources.hooks import ForwardRun, on_leave
from ..split import LocalSplitModel
from .cache import ColumnCache, Columns, grown
from .supported_models import not_reached

# Called at the end of a segment with the number of blocks that have run, the rows that ran them, and `row d_model` of their
# newest tokens (leaving and entering the last of these blocks). Returns the rows that continue.
Decide = Callable[[int, list[int], Tensor, Tensor], list[int]]
# Columns that a cache has room for beyond the prompt at first.
ROOM = 256


@contextmanager
def entered(split_model: LocalSplitModel, layer: int, x: Tensor) -> Iterator[None]:
    """Enter the model at a layer with residuals `x`, without the forward hooks of the block below, which already ran on `x`."""
    below = vars(split_model.blocks[layer - 1])
    hooks = below["_forward_hooks"]
    below["_forward_hooks"] = OrderedDict()
    try:
        with split_model.entered(layer, lambda _: x):
            yield
    finally:
        below["_forward_hooks"] = hooks


class Counts:
    """Numbers of block calls, tokens, forward passes and checks of one run.

    Attributes:
        blocks: block calls, whatever the number of tokens in each.
        tokens: tokens run through blocks, summed over blocks.
        passes: forward passes started.
        checks: tokens evaluated at checks.
    """

    def __init__(self) -> None:
        self.blocks = self.tokens = self.passes = self.checks = 0


class Decoding:
    """The state of the rows of a batch: their tokens, the depth that each token has reached, the cache and pending residuals.

    A segment is a run of consecutive blocks between two checks.

    Args:
        split_model: the model.
        ends: for each segment, the number of blocks up to its end; the last is the number of all blocks.
        tokens: `row column`, padded on the left.
        attended: `row column`, False at padding; None where no row is padded.
        room: expected number of columns.

    Attributes:
        counts: numbers of block calls, tokens and passes so far.
    """

    def __init__(
        self,
        split_model: LocalSplitModel,
        ends: tuple[int, ...],
        tokens: Tensor,
        attended: Tensor | None,
        room: int,
    ) -> None:
        self.split_model, self.ends, self.counts = split_model, ends, Counts()
        self.tokens, self.attended = tokens, attended
        self.pads = None if attended is None else (~attended).sum(1)
        # For each segment and row, the number of columns that have run through it.
        self.columns_run = [[0] * len(tokens) for _ in ends]
        self.cache = ColumnCache(len(split_model.blocks), len(tokens), min(room, tokens.shape[1] + ROOM))
        # For each segment, the residuals `row column d_model` that enter it.
        self.pending: list[Tensor | None] = [None for _ in ends]
        parameters = inspect.signature(type(split_model.module).forward).parameters
        self.positions = "position_ids" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def append(self, new: Tensor) -> None:
        """Append one token to each row; `new` is `row`."""
        self.tokens = torch.cat([self.tokens, new[:, None]], 1)
        if self.attended is not None:
            self.attended = torch.cat([self.attended, torch.ones_like(new[:, None], dtype=torch.bool)], 1)

    def keep(self, rows: list[int]) -> None:
        """Keep these rows and drop all others."""
        index = torch.tensor(rows, device=self.tokens.device)
        self.tokens = self.tokens[index]
        if self.attended is not None and self.pads is not None:
            self.attended, self.pads = self.attended[index], self.pads[index]
        self.columns_run = [[columns[row] for row in rows] for columns in self.columns_run]
        self.cache.keep(index)
        self.pending = [None if x is None else x.index_select(0, index) for x in self.pending]

    @contextmanager
    def watched(self, decide: Decide) -> Iterator[Callable[[], None]]:
        """Register forward hooks on the last block of each segment; the yielded function runs the newest token of all rows."""
        step = _Step(self, decide)
        handles = [
            on_leave(self.split_model.blocks[end - 1], step.hook(number), with_kwargs=True)
            for number, end in enumerate(self.ends)
        ]
        try:
            yield step.run
        finally:
            for handle in handles:
                handle.remove()


class _Step:
    """The forward passes of one decoding step: each starts at a segment and runs until some rows stop."""

    def __init__(self, state: Decoding, decide: Decide) -> None:
        self.state, self.decide = state, decide
        self.rows: list[int] = []
        self.segment = 0
        self.first_columns: list[int] = []
        self.columns = Columns(None, 0, 0)
        self.stopped, self.forward = False, ForwardRun()

    def run(self) -> None:
        """Run the newest token of all rows, and the pending tokens of those that run deeper."""
        self.rows, self.segment = list(range(len(self.state.tokens))), 0
        while self.rows:
            self._forward()

    def _forward(self) -> None:
        """One forward pass of the current rows from the current segment on."""
        state = self.state
        end = state.tokens.shape[1]
        self.first_columns = [state.columns_run[self.segment][row] for row in self.rows]
        start = min(self.first_columns)
        all_rows = len(self.rows) == len(state.tokens)
        ragged = self.first_columns if max(self.first_columns) > start else None
        self.columns = columns = Columns(None if all_rows else self.rows, start, end, ragged, state.tokens.device)
        state.cache.columns = columns
        options: dict[str, Any] = {"past_key_values": state.cache, "use_cache": True}
        if state.attended is not None and state.pads is not None:
            options["attention_mask"] = columns.take(state.attended).long()
            if state.positions:
                pads = state.pads if all_rows else state.pads[self.rows]
                numbers = torch.arange(start, end, device=pads.device)
                options["position_ids"] = (numbers - pads[:, None]).clamp(min=0)
        self.stopped = False
        state.counts.passes += 1
        ids = columns.take(state.tokens, start)
        with self.forward:
            if self.segment == 0:
                state.split_model.module(input_ids=ids, **options)
            else:
                pending = state.pending[self.segment]
                assert pending is not None
                x = columns.take(pending, start)
                with entered(state.split_model, state.ends[self.segment - 1], x):
                    state.split_model.module(input_ids=ids, **options)
        if not self.stopped:
            raise not_reached(state.split_model, state.ends[self.segment])

    def hook(self, number: int) -> Callable[[nn.Module, Any, Any, Any], None]:
        """The forward hook of the last block of a segment."""

        def reached(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            # Blocks below the entered layer are called too, and return their input.
            if number < self.segment:
                return
            self._reached(number, first_tensor((*args, *kwargs.values())), first_tensor(output))

        return reached

    def _reached(self, number: int, entering: Tensor, hidden: Tensor) -> None:
        """Decide at the end of a segment which rows continue; stop the forward pass unless all of them can."""
        state, columns = self.state, self.columns
        for row in self.rows:
            state.columns_run[number][row] = columns.end
        length = state.ends[number] - (state.ends[number - 1] if number else 0)
        state.counts.blocks += length
        state.counts.tokens += length * hidden.shape[0] * hidden.shape[1]
        continuing = self.decide(state.ends[number], self.rows, hidden[:, -1], entering[:, -1])
        if number + 1 == len(state.ends):
            self.rows, self.stopped = [], True
            self.forward.stop()
        self.segment = number + 1
        above = state.columns_run[self.segment]
        none_pending = all(above[row] == first for row, first in zip(self.rows, self.first_columns, strict=True))
        if len(continuing) == len(self.rows) and none_pending:
            # All rows continue with the tokens of this pass, so the pass itself goes on.
            return
        pending = state.pending[self.segment]
        pending = state.cache.room_for(hidden) if pending is None else pending
        state.pending[self.segment] = pending = grown(pending, columns.end)
        columns.put(pending, hidden)
        self.rows, self.stopped = continuing, True
        self.forward.stop()
