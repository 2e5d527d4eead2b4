"""Forward passes with early exit, which run the blocks in segments. A segment ends at an exit check.

A segment is a run of consecutive blocks between two checks. Cached decoding (`Decoding`) and full-sequence forward passes
(`FullSequence`) are both runs of segments; they differ in what stops, and in what enters the next segment.

In decoding, a token that exits early has no keys and values in the blocks above its exit. They are not approximated: the
residual that would enter the next block is kept as pending, and the upper blocks run on it in the same forward pass as the
first later token of its row that runs deeper. The cache therefore holds what the full model would have put there.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..activations.block_call import first_tensor
from ..core.errors import LayersimError
from ..sources.hooks import ForwardRun, on_leave, temporary_hooks
from ..sources.partial_forward import LocalSplitModel
from .cache import ColumnCache, Columns
from .exit_decisions import ExitCheck


@contextmanager
def entered(split_model: LocalSplitModel, layer: int, x: Tensor) -> Iterator[None]:
    """Context in which every forward pass starts at a layer, with residuals `x`."""
    # Hooks of the block below have run already.
    below = vars(split_model.blocks[layer - 1])
    hooks = below["_forward_hooks"]
    below["_forward_hooks"] = OrderedDict()
    try:
        with split_model.entered(layer, lambda _: x):
            yield
    finally:
        below["_forward_hooks"] = hooks


class Segments(ABC):
    """Base class of forward passes with early exit, which run the blocks in segments.

    Some rows or positions stop after each segment.

    Args:
        split_model: the model.
        ends: for each segment, the number of blocks up to its end; the last is that of the highest block that runs.
        check: decides after each segment which rows or positions exit.

    Attributes:
        block_calls: block calls so far, whatever the number of tokens in each.
        block_tokens: number of computed (token, block) pairs.
        segment: index of the segment that runs.
    """

    def __init__(self, split_model: LocalSplitModel, ends: tuple[int, ...], check: ExitCheck) -> None:
        self.split_model = split_model
        self.ends = ends
        self.check = check
        self.block_calls = self.block_tokens = self.segment = 0
        self._stopped = False
        self._forward = ForwardRun()

    @abstractmethod
    def enter(self) -> tuple[dict[str, Any], Tensor | None] | None:
        """Arguments of the model for the next forward pass, and the residuals that enter its first segment. None if no row is
        left.
        """

    @abstractmethod
    def leave(self, number: int, entering: Tensor, hidden: Tensor) -> bool:
        """Decide which rows or positions stop after a segment. Returns whether the forward pass continues.

        Args:
            number: index of the segment.
            entering: `row pos d_model`, the residuals that entered its last block.
            hidden: `row pos d_model`, those that left it.
        """

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Put a hook on the last block of each segment. `run` needs these hooks."""
        with temporary_hooks() as handles:
            for number, end in enumerate(self.ends):
                block = self.split_model.blocks[end - 1]
                handles.append(on_leave(block, partial(self._leave_segment, number), with_kwargs=True))
            yield

    def run(self) -> None:
        """Run the segments from block 0 on, until no row is left to run."""
        self.segment = 0
        while (entry := self.enter()) is not None:
            options, x = entry
            self._stopped = False
            with ExitStack() as stack:
                if x is not None:
                    stack.enter_context(entered(self.split_model, self.ends[self.segment - 1], x))
                stack.enter_context(self._forward)
                self.split_model.module(**options)
            if not self._stopped:
                raise LayersimError(
                    f"The forward pass of {self.split_model.model.name} did not reach block {self.ends[self.segment] - 1}: "
                    "each block must run once, in order, as a module that is not compiled. open_model(model, layers=[...]) "
                    "names the blocks."
                )

    def _leave_segment(self, number: int, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Forward hook of the last block of a segment."""
        # Blocks below the entered layer only return their input.
        if number < self.segment:
            return
        entering = first_tensor((*args, *kwargs.values()))
        hidden = first_tensor(output)
        start = self.ends[number - 1] if number else 0
        blocks = self.ends[number] - start
        self.block_calls += blocks
        self.block_tokens += blocks * hidden.shape[0] * hidden.shape[1]
        self.segment = number + 1
        if not self.leave(number, entering, hidden):
            self._stopped = True
            self._forward.stop()


class Decoding(Segments):
    """Decoding of a batch with early exit and a key-value cache. Blocks above an exit run later, on several tokens at once.

    Args:
        split_model: the model.
        ends: as in `Segments`.
        check: decides after each segment which rows exit.
        tokens: `row column`, padded on the left.
        attended: `row column`, False at padding; None if no row is padded.
        room: largest number of columns.

    Attributes:
        numbers: index of each row among those that were given; `keep` drops rows.
        exited: of the last step, the logits `1 vocabulary` and the number of blocks at the exit of each row.
    """

    def __init__(
        self,
        split_model: LocalSplitModel,
        ends: tuple[int, ...],
        check: ExitCheck,
        tokens: Tensor,
        attended: Tensor | None,
        room: int,
    ) -> None:
        super().__init__(split_model, ends, check)
        self.tokens = tokens
        self.attended = attended
        self.numbers = list(range(len(tokens)))
        self.exited: dict[int, tuple[Tensor, int]] = {}
        self.pads = None if attended is None else (~attended).sum(1)
        # For each segment and row, the number of columns that have run through it.
        self.columns_run = [[0] * len(tokens) for _ in ends]
        self.cache = ColumnCache(len(split_model.blocks), len(tokens), room)
        # For each segment, the residuals `row column d_model` that enter it.
        self.pending: list[Tensor | None] = [None for _ in ends]
        parameters = inspect.signature(type(split_model.module).forward).parameters
        takes_any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self.takes_positions = "position_ids" in parameters or takes_any_name
        # Of the current forward pass: its rows, the first column of each, and its part of the tables.
        self.rows: list[int] = []
        self.first_columns: list[int] = []
        self.columns = Columns(None, 0, 0)

    def run(self) -> None:
        self.rows = list(range(len(self.tokens)))
        self.exited.clear()
        self.check.restart(self.numbers)
        super().run()

    def rows_without_padding(self) -> list[Tensor]:
        """The token ids of each row, `pos`."""
        pads = [0] * len(self.tokens) if self.pads is None else self.pads.tolist()
        return [row[pad:] for row, pad in zip(self.tokens, pads, strict=True)]

    def append(self, new_tokens: Tensor) -> None:
        column = new_tokens[:, None]
        self.tokens = torch.cat([self.tokens, column], 1)
        if self.attended is not None:
            self.attended = torch.cat([self.attended, torch.ones_like(column, dtype=torch.bool)], 1)

    def keep(self, rows: list[int]) -> None:
        index = torch.tensor(rows, device=self.tokens.device)
        self.tokens = self.tokens[index]
        self.numbers = [self.numbers[row] for row in rows]
        if self.attended is not None and self.pads is not None:
            self.attended = self.attended[index]
            self.pads = self.pads[index]
        for segment, columns in enumerate(self.columns_run):
            self.columns_run[segment] = [columns[row] for row in rows]
        self.cache.keep(index)
        self.pending = [None if x is None else x.index_select(0, index) for x in self.pending]

    def enter(self) -> tuple[dict[str, Any], Tensor | None] | None:
        if not self.rows:
            return None
        end = self.tokens.shape[1]
        self.first_columns = [self.columns_run[self.segment][row] for row in self.rows]
        start = min(self.first_columns)
        all_rows = len(self.rows) == len(self.tokens)
        starts = self.first_columns if max(self.first_columns) > start else None
        columns = Columns(None if all_rows else self.rows, start, end, starts, self.tokens.device)
        self.columns = columns
        self.cache.columns = columns
        options: dict[str, Any] = {
            "input_ids": columns.take(self.tokens, start),
            "past_key_values": self.cache,
            "use_cache": True,
        }
        if self.attended is not None and self.pads is not None:
            options["attention_mask"] = columns.take(self.attended).long()
            if self.takes_positions:
                pads = self.pads if all_rows else self.pads[self.rows]
                column_numbers = torch.arange(start, end, device=pads.device)
                # Padding has position 0, in place of negative ones.
                options["position_ids"] = (column_numbers - pads[:, None]).clamp(min=0)
        pending = self.pending[self.segment]
        hidden = None if pending is None else columns.take(pending, start)
        return options, hidden

    def leave(self, number: int, entering: Tensor, hidden: Tensor) -> bool:
        columns = self.columns
        for row in self.rows:
            self.columns_run[number][row] = columns.end
        layer = self.ends[number]
        last = number + 1 == len(self.ends)
        exits, logits = self.check(hidden[:, -1], entering[:, -1], torch.tensor(self.rows), layer, last)
        if logits is not None:
            exiting_rows = [row for row, exits_here in zip(self.rows, exits.tolist(), strict=True) if exits_here]
            for i, row in enumerate(exiting_rows):
                self.exited[row] = (logits[i : i + 1], layer)
        continuing = [row for row in self.rows if row not in self.exited]
        if last:
            self.rows = []
            return False
        columns_run_above = self.columns_run[number + 1]
        first_columns = zip(self.rows, self.first_columns, strict=True)
        none_pending = all(columns_run_above[row] == first_column for row, first_column in first_columns)
        if len(continuing) == len(self.rows) and none_pending:
            # All rows continue with the same tokens, so the forward pass goes on.
            return True
        pending = self.pending[number + 1]
        if pending is None:
            pending = hidden.new_zeros(self.cache.rows, self.cache.room, hidden.shape[-1])
        self.pending[number + 1] = pending
        columns.put(pending, hidden)
        self.rows = continuing
        return False


class FullSequence(Segments):
    """Forward pass over complete rows, with early exit of single positions.

    Args:
        split_model: the model.
        ends: as in `Segments`.
        check: decides which positions exit.
        inputs: arguments of the model's forward by name, each with one entry per row.
        positions: `row pos`, True where logits are computed; one position per row for a classifier of rows.
        causal: whether a position does not depend on later ones, so that rows may be shortened at the end.
        attended: `row pos`, False at padding, for heads that read rows; None without padding.

    Attributes:
        logits: `row pos vocabulary`, 0 where `positions` is False.
        exits: `row pos`, the number of blocks that had run at each exit, or 0.
        tokens: positions in a forward pass of the full model.
    """

    def __init__(
        self,
        split_model: LocalSplitModel,
        ends: tuple[int, ...],
        check: ExitCheck,
        inputs: dict[str, Tensor],
        positions: Tensor,
        causal: bool = False,
        attended: Tensor | None = None,
    ) -> None:
        super().__init__(split_model, ends, check)
        self.inputs = inputs
        self.causal = causal
        self.attended = attended
        self.tokens = 0
        self.running = positions.clone()
        self.exits = torch.zeros(positions.shape, dtype=torch.int64)
        self.logits = torch.empty(0)
        # The rows and the positions of the current forward pass, and the residuals that enter it.
        self.rows = torch.arange(len(positions), device=positions.device)
        self.length = positions.shape[1]
        self.hidden: Tensor | None = None

    def run(self) -> None:
        self.check.restart(list(range(self.running.numel())))
        with self.hooked():
            super().run()

    def enter(self) -> tuple[dict[str, Any], Tensor | None] | None:
        if not len(self.rows):
            return None
        shortened = self.causal and self.length < self.running.shape[1]
        inputs = {}
        for name, x in self.inputs.items():
            inputs[name] = x[self.rows, : self.length] if shortened else x[self.rows]
        return inputs | self.split_model.source.anatomy.without_cache, self.hidden

    def leave(self, number: int, entering: Tensor, hidden: Tensor) -> bool:
        if not self.tokens:
            # The first segment runs all rows in full length.
            self.tokens = hidden.shape[0] * hidden.shape[1]
        layer = self.ends[number]
        last = number + 1 == len(self.ends)
        running = self.running[self.rows, : self.length]
        index = torch.arange(self.running.numel(), device=self.running.device).reshape(self.running.shape)
        index = index[self.rows, : self.length][running]
        lens = self.check.lens
        if lens.unembed.pool is None:
            # Vision models have further positions, which are not classified.
            x_leaving = hidden[:, : self.length][running]
            x_entering = entering[:, : self.length][running]
            head_input = (x_leaving, True)
        else:
            all_positions = torch.ones_like(hidden[..., 0], dtype=torch.bool)
            attended = all_positions if self.attended is None else self.attended[self.rows]
            x_leaving = lens.unembed.pool(hidden, attended)
            x_entering = lens.unembed.pool(entering, attended)
            head_input = (lens.unembed.pooled(hidden, attended, lens.norms(layer)), False)
        exits, logits = self.check(x_leaving, x_entering, index, layer, last, head_input)
        if logits is not None:
            self._record_exits(layer, index[exits], logits)
        if last:
            self.rows = self.rows[:0]
            return False
        return self._narrow(hidden)

    def _record_exits(self, layer: int, index: Tensor, logits: Tensor) -> None:
        if not self.logits.numel():
            self.logits = logits.new_zeros(*self.running.shape, logits.shape[-1])
        self.logits.view(-1, logits.shape[-1])[index] = logits
        self.running.view(-1)[index] = False
        self.exits.view(-1)[index.cpu()] = layer

    def _narrow(self, hidden: Tensor) -> bool:
        """Drop rows and positions that need no further block.

        Returns:
            Whether no row and no position is dropped.
        """
        running = self.running[self.rows, : self.length]
        continuing = running.any(1)
        length = self.length
        if self.causal and bool(continuing.any()):
            length = int(running.any(0).nonzero().max()) + 1
        if bool(continuing.all()) and length == self.length:
            return True
        self.hidden = hidden[continuing, :length] if self.causal else hidden[continuing]
        self.rows = self.rows[continuing]
        self.length = length
        return False
