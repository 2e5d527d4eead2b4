"""Keys and values of rows that have run to different depths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class Columns:
    """Which part of a table of tokens a forward pass is about: some rows, and columns from one on.

    Rows stand so that each one's newest token is in the same column, as padding on the left puts them.

    Args:
        rows: numbers of the rows, None for all of them.
        start: the first column.
        end: one more than the last.
        starts: for each row the first column that counts, where they differ; what stands before it has run already.
        device: of the tables.
    """

    def __init__(
        self, rows: list[int] | None, start: int, end: int, starts: list[int] | None = None, device: torch.device | None = None
    ) -> None:
        self.start, self.end = start, end
        # Made once for all blocks of a pass.
        self.index = None if rows is None else torch.tensor(rows, device=device)
        self.places: list[Tensor] = []
        if starts is not None:
            numbers = range(len(starts)) if rows is None else rows
            pairs = [(i, row, column) for i, row in enumerate(numbers) for column in range(starts[i], end)]
            self.places = list(torch.tensor(pairs, device=device).unbind(1))

    def put(self, table: Tensor, part: Tensor) -> None:
        """Write `row column ...`, what the pass made, into the table of all."""
        if self.places:
            mine, row, column = self.places
            table[row, column] = part[mine, column - self.start]
        elif self.index is None:
            table[:, self.start : self.end] = part
        else:
            table[:, self.start : self.end].index_copy_(0, self.index, part)

    def take(self, table: Tensor, start: int = 0) -> Tensor:
        """`row column ...`: the pass's rows of the table of all, from a column on."""
        table = table[:, start : self.end]
        return table if self.index is None else table.index_select(0, self.index)


def grown(table: Tensor, columns: int) -> Tensor:
    """The table with room for at least that many columns."""
    if table.shape[1] >= columns:
        return table
    more = table.new_zeros(len(table), max(columns, 2 * table.shape[1]), *table.shape[2:])
    more[:, : table.shape[1]] = table
    return more


class ColumnLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types
    """One block's keys and values, in memory that is used again: `row column head d_head`, seen as `row head column d_head`."""

    is_sliding = False

    def __init__(self, cache: ColumnCache) -> None:
        super().__init__()
        self.cache = cache
        self.keys: Tensor
        self.values: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Room for all rows."""
        for name, x in (("keys", key_states), ("values", value_states)):
            setattr(self, name, x.new_zeros(self.cache.rows, self.cache.room, x.shape[1], x.shape[3]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep what is new, and give all columns up to it."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        part, found = self.cache.part, []
        for name, x in (("keys", key_states), ("values", value_states)):
            table = grown(getattr(self, name), part.end)
            setattr(self, name, table)
            part.put(table, x.transpose(1, 2))
            found.append(part.take(table).transpose(1, 2))
        return found[0], found[1]

    def keep(self, rows: Tensor) -> None:
        """Forget all other rows."""
        if self.is_initialized:
            self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many columns are seen, and from which on."""
        return self.cache.part.start + query_length, 0

    def get_seq_length(self) -> int:
        """The column at which the pass begins."""
        return self.cache.part.start

    def get_max_length(self) -> int:
        """None."""
        return -1


class ColumnCache(Cache):  # type: ignore[misc]  # transformers has no types
    """Keys and values of all blocks; a forward pass first says which columns of which rows it is about.

    The model makes its own masks from the sizes that this says: windows, chunks and padding are its own work.

    Args:
        blocks: how many.
        rows: how many.
        room: columns to begin with.
    """

    def __init__(self, blocks: int, rows: int, room: int) -> None:
        self.rows, self.room = rows, room
        self.part = Columns(None, 0, 0)
        super().__init__(layers=[ColumnLayer(self) for _ in range(blocks)])

    def keep(self, rows: Tensor) -> None:
        """Forget all other rows."""
        self.rows = len(rows)
        for layer in self.layers:
            layer.keep(rows)

    def room_for(self, x: Tensor) -> Tensor:
        """A table of zeros `row column d_model` beside the cache, for residuals such as `x`."""
        return torch.zeros(self.rows, self.room, x.shape[-1], dtype=x.dtype, device=x.device)
