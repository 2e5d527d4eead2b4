"""Rows of data that stand for vectors: each has an index and positions, but neither tokens nor other inputs of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .row import Row

# Name of the index of each vector among the inputs of a row.
VECTORS = "vectors"


@dataclass(frozen=True, eq=False)
class VectorRows:
    """Data whose rows stand for vectors, as a source of `Data`.

    Attributes:
        count: number of rows.
        positions: number of positions of each row.
        mask: `row pos`, bool, the positions that have a vector; None if all have one.
        labels: `row` or `row pos`, integers; None without labels.
    """

    count: int
    positions: int
    mask: Tensor | None = None
    labels: Tensor | None = None

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Row]:
        places = torch.arange(self.positions)
        no_tokens = torch.zeros_like(places)
        everywhere = torch.ones(self.positions, dtype=torch.bool)
        for number in range(self.count):
            labels = None
            if self.labels is not None:
                # One label of a row is repeated at its positions.
                labels = self.labels[number].expand(self.positions)
            yield Row(
                no_tokens,
                everywhere if self.mask is None else self.mask[number],
                labels,
                inputs={VECTORS: places + number * self.positions},
                positional=frozenset({VECTORS}),
                has_tokens=False,
            )
