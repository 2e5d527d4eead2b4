"""Blocks: the sums of 16 to 32 groups of consecutive rows of the data, from which confidence intervals are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .sums import Sums

# So many blocks are held at most. Then neighbours are added, and half of them remain.
MOST_BLOCKS = 32


@dataclass(frozen=True)
class DataBlock:
    """Sums of consecutive rows.

    Attributes:
        rows: number of the rows; the last block of the data may count rows that are not there.
        tokens: number of their counted positions.
        sums: by analyzer.
    """

    rows: int
    tokens: int
    sums: Mapping[str, Sums]

    def __add__(self, other: DataBlock) -> DataBlock:
        sums = {name: own + other.sums[name] for name, own in self.sums.items()}
        return DataBlock(self.rows + other.rows, self.tokens + other.tokens, sums)


def rows_in_block(index: int, first: int) -> int:
    """The number of rows in a block when the row of this number comes; it doubles whenever there are `MOST_BLOCKS`.

    Args:
        index: number of the row.
        first: number of rows in a block at the start.

    Examples:
        >>> [rows_in_block(index, 1) for index in (0, 31, 32, 63, 64, 128)]
        [1, 1, 2, 2, 4, 8]
    """
    size = first
    while index >= MOST_BLOCKS * size:
        size *= 2
    return size


def first_block_size(rows: int | None) -> int:
    """The number of rows in a block of data with so many rows: a power of two that gives 16 to 32 blocks.

    Args:
        rows: number of rows in the data; None if it is not known, so that blocks begin with one row.

    Examples:
        >>> [first_block_size(rows) for rows in (None, 10, 16, 31, 32, 1000)]
        [1, 1, 1, 1, 2, 32]
    """
    size = 1
    while rows is not None and 2 * size * (MOST_BLOCKS // 2) <= rows:
        size *= 2
    return size
