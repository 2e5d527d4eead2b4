"""Tally: the progress of one pass over the data, and the sums of its batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .sum_tree import SumTree
from .sums import Sums


@dataclass(frozen=True)
class Tally:
    """The progress of one pass over the data, and the sums of its batches.

    Attributes:
        batches: number of batches read, those of other ranks and shards included.
        sequences: rows in them.
        tokens: counted positions in them.
        digest: SHA-256 of their rows.
        seconds: wall time.
        done: whether the data ended.
        tree: the sums of the batches on which the model of this process ran.
    """

    batches: int = 0
    sequences: int = 0
    tokens: int = 0
    digest: str = ""
    seconds: float = 0.0
    done: bool = False
    tree: SumTree = SumTree()

    def sums(self, names: Iterable[str]) -> dict[str, Sums]:
        """The sums of all rows, by name of the kernel.

        Args:
            names: of the kernels.
        """
        total = self.tree.total().sums
        return {name: total.get(name, Sums()) for name in names}
