"""Key-value cache for a batch in which rows run to different depths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class Columns:
    """Part of the key-value cache that one forward pass uses: rows and columns. A column is a position, padding included.

    Rows are padded on the left, so the newest token of every row is in the same column.

    Args:
        rows: indices of the rows, None for all of them.
        start: the first column.
        end: one more than the last column.
        starts: the first new column of each row, if rows differ; columns before it have been written by earlier passes.
        device: device of the tables.
    """

    def __init__(
        self, rows: list[int] | None, start: int, end: int, starts: list[int] | None = None, device: torch.device | None = None
    ) -> None:
        self.start = start
        self.end = end
        # Built once for all blocks of a forward pass.
        self.index = None if rows is None else torch.tensor(rows, device=device)
        # If rows start at different columns: row of the forward pass, row of the tables and column of each new entry.
        self.places: list[Tensor] = []
        if starts is not None:
            table_rows = range(len(starts)) if rows is None else rows
            places = []
            for i, row in enumerate(table_rows):
                places += [(i, row, column) for column in range(starts[i], end)]
            self.places = list(torch.tensor(places, device=device).unbind(1))

    def put(self, table: Tensor, part: Tensor, axis: int = 1) -> None:
        """Write keys, values or residuals into `table`, which holds all rows. Columns are along `axis` of both."""
        if self.places:
            part_row, table_row, column = self.places
            table.transpose(1, axis)[table_row, column] = part.transpose(1, axis)[part_row, column - self.start]
            return
        columns = table.narrow(axis, self.start, self.end - self.start)
        if self.index is None:
            columns.copy_(part)
        else:
            columns.index_copy_(0, self.index, part)

    def take(self, table: Tensor, start: int = 0, axis: int = 1) -> Tensor:
        """Slice of `table` for the rows of this forward pass, from column `start` up to `self.end` of `axis`."""
        table = table.narrow(axis, start, self.end - start)
        return table if self.index is None else table.index_select(0, self.index)


class ColumnLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types
    """Cached keys and values of one block (`row head column d_head`)."""

    is_sliding = False

    def __init__(self, cache: ColumnCache) -> None:
        super().__init__()
        self.cache = cache
        self.keys: Tensor
        self.values: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows = self.cache.rows
        room = self.cache.room
        # Values may have another width than keys.
        self.keys = key_states.new_zeros(rows, key_states.shape[1], room, key_states.shape[3])
        self.values = value_states.new_zeros(rows, value_states.shape[1], room, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the keys and values of this forward pass. Returns all cached keys and values of its rows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        columns = self.cache.columns
        columns.put(self.keys, key_states, 2)
        columns.put(self.values, value_states, 2)
        return columns.take(self.keys, axis=2), columns.take(self.values, axis=2)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_initialized:
            self.keys = self.keys.index_select(0, indices)
            self.values = self.values.index_select(0, indices)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.columns.start + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.columns.start

    def get_max_length(self) -> int:
        """-1, which means no maximum in transformers."""
        return -1

    # The name in transformers 5.9.
    get_max_cache_shape = get_max_length


class ColumnCache(Cache):  # type: ignore[misc]  # transformers has no types
    """Key-value cache of all blocks.

    The model builds its own masks from the sizes that the cache reports, so windows, chunks and padding stay the model's work.

    Args:
        blocks: number of blocks.
        rows: number of rows.
        room: number of columns.
    """

    def __init__(self, blocks: int, rows: int, room: int) -> None:
        self.rows = rows
        self.room = room
        self.columns = Columns(None, 0, 0)
        super().__init__(layers=[ColumnLayer(self) for _ in range(blocks)])

    def keep(self, rows: Tensor) -> None:
        self.rows = len(rows)
        self.batch_select_indices(rows)
