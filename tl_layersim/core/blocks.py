"""Blocks: the sums of 16 to 32 contiguous parts of the data, from which confidence intervals are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .sums import Sums

# So many blocks are held at most. Then neighbours are added, and half of them remain.
MOST_BLOCKS = 32


@dataclass(frozen=True)
class DataBlock:
    """Sums of consecutive batches.

    Attributes:
        batches: number of the batches on which the model ran.
        tokens: number of their counted positions.
        sums: by analyzer.
    """

    batches: int
    tokens: int
    sums: Mapping[str, Sums]

    def __add__(self, other: DataBlock) -> DataBlock:
        sums = {name: own + other.sums[name] for name, own in self.sums.items()}
        return DataBlock(self.batches + other.batches, self.tokens + other.tokens, sums)


def batches_in_block(index: int, first: int) -> int:
    """The number of batches in a block when the batch of this number comes; it doubles whenever there are `MOST_BLOCKS`.

    Args:
        index: number of the batch.
        first: number of batches in the first block at the start.

    Examples:
        >>> [batches_in_block(index, 1) for index in (0, 31, 32, 63, 64, 128)]
        [1, 1, 2, 2, 4, 8]
    """
    size = first
    while index >= MOST_BLOCKS * size:
        size *= 2
    return size


def first_block_size(batches: int | None) -> int:
    """The number of batches in a block of data with so many batches: a power of two that gives 16 to 32 blocks.

    Args:
        batches: number of batches in the data; None if it is not known, so that blocks begin with one batch.

    Examples:
        >>> [first_block_size(batches) for batches in (None, 10, 16, 31, 32, 1000)]
        [1, 1, 1, 1, 2, 32]
    """
    size = 1
    while batches is not None and 2 * size * (MOST_BLOCKS // 2) <= batches:
        size *= 2
    return size
