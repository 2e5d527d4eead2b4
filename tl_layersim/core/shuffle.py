"""Shuffle: the order of rows or batches in training, from the seed and the number of the epoch alone."""

from __future__ import annotations

import torch


class Shuffle:
    """All rows in a random order, in another one each epoch.

    The order is a function of the seed and the epoch, so that a resumed training needs nothing but the number of its step.

    Args:
        count: number of rows.
        seed: of the orders.

    Examples:
        >>> shuffle = Shuffle(3, seed=0)
        >>> [shuffle.row(place) for place in range(6)]
        [2, 0, 1, 1, 2, 0]
    """

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed
        self._epoch, self._order = -1, list[int]()

    def row(self, place: int) -> int:
        """Index of the row at a place in the sequence of all epochs; both are counted from 0."""
        epoch = place // self.count
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(self.count, generator=generator).tolist()
        return self._order[place % self.count]
