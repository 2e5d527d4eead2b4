"""Cached decoding in which each row of a batch runs only as many blocks as its newest token needs.

A token that exits early has no keys and values in the blocks above its exit. They are not approximated: the residual that would
enter the next block is kept as pending, and the upper blocks run on it in the same forward pass as the first later token of its
row that runs deeper. The cache therefore holds what the full model would have put there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..sources.split_model import LocalSplitModel
from .cache import ColumnCache, Columns, grown
from .segments import Segments

# Called at the end of a segment with the number of blocks that have run, the rows that ran them, and `row d_model` of their
# newest tokens (leaving and entering the last of these blocks). Returns the rows that continue.
Decide = Callable[[int, list[int], Tensor, Tensor], list[int]]
# Columns that a cache has room for beyond the prompt at first.
ROOM = 256


class Decoding(Segments):
    """Decoding steps of a batch: `run` runs the newest token of all rows, and the pending tokens of those that run deeper.

    Args:
        split_model: the model.
        ends: as in `Segments`.
        tokens: `row column`, padded on the left.
        attended: `row column`, False at padding; None if no row is padded.
        room: expected number of columns.
        decide: chooses the rows that continue.
    """

    def __init__(
        self,
        split_model: LocalSplitModel,
        ends: tuple[int, ...],
        tokens: Tensor,
        attended: Tensor | None,
        room: int,
        decide: Decide,
    ) -> None:
        super().__init__(split_model, ends)
        self.tokens, self.attended, self.decide = tokens, attended, decide
        self.pads = None if attended is None else (~attended).sum(1)
        # For each segment and row, the number of columns that have run through it.
        self.columns_run = [[0] * len(tokens) for _ in ends]
        self.cache = ColumnCache(len(split_model.blocks), len(tokens), min(room, tokens.shape[1] + ROOM))
        # For each segment, the residuals `row column d_model` that enter it.
        self.pending: list[Tensor | None] = [None for _ in ends]
        parameters = inspect.signature(type(split_model.module).forward).parameters
        self.positions = "position_ids" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        # Of the current forward pass: its rows, the first column of each, and its part of the tables.
        self.rows: list[int] = []
        self.first_columns: list[int] = []
        self.columns = Columns(None, 0, 0)

    def run(self) -> None:
        self.rows = list(range(len(self.tokens)))
        super().run()

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

    def enter(self) -> tuple[dict[str, Any], Tensor | None] | None:
        if not self.rows:
            return None
        end = self.tokens.shape[1]
        self.first_columns = [self.columns_run[self.segment][row] for row in self.rows]
        start = min(self.first_columns)
        all_rows = len(self.rows) == len(self.tokens)
        ragged = self.first_columns if max(self.first_columns) > start else None
        self.columns = columns = Columns(None if all_rows else self.rows, start, end, ragged, self.tokens.device)
        self.cache.columns = columns
        options: dict[str, Any] = {
            "input_ids": columns.take(self.tokens, start),
            "past_key_values": self.cache,
            "use_cache": True,
        }
        if self.attended is not None and self.pads is not None:
            options["attention_mask"] = columns.take(self.attended).long()
            if self.positions:
                pads = self.pads if all_rows else self.pads[self.rows]
                numbers = torch.arange(start, end, device=pads.device)
                options["position_ids"] = (numbers - pads[:, None]).clamp(min=0)
        pending = self.pending[self.segment]
        return options, None if pending is None else columns.take(pending, start)

    def leave(self, number: int, entering: Tensor, hidden: Tensor) -> bool:
        columns = self.columns
        for row in self.rows:
            self.columns_run[number][row] = columns.end
        continuing = self.decide(self.ends[number], self.rows, hidden[:, -1], entering[:, -1])
        if number + 1 == len(self.ends):
            self.rows = []
            return False
        above = self.columns_run[number + 1]
        none_pending = all(above[row] == first for row, first in zip(self.rows, self.first_columns, strict=True))
        if len(continuing) == len(self.rows) and none_pending:
            # All rows continue with the tokens of this pass, so the pass itself goes on.
            return True
        pending = self.pending[number + 1]
        pending = self.cache.room_for(hidden) if pending is None else pending
        self.pending[number + 1] = pending = grown(pending, columns.end)
        columns.put(pending, hidden)
        self.rows = continuing
        return False
