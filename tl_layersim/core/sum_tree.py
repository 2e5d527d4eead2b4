"""SumTree: sums of consecutive rows, added in one order however rows are divided over requests, runs and machines."""

from __future__ import annotations

from dataclasses import dataclass, replace

from . import blocks
from .blocks import DataBlock, rows_in_block
from .pairwise_summation import fold, push


def most_nodes(leaves: int, intervals: bool) -> int:
    """The number of nodes that a run holds at most, the sums of a leaf that is to be added included.

    Args:
        leaves: number of leaves, the groups of rows whose sums are added.
        intervals: whether blocks are kept, at first of one leaf each. Runs on servers and shards count the rows beforehand,
            begin with larger blocks, and hold no more.

    Examples:
        >>> [most_nodes(leaves, False) for leaves in (1, 2, 3, 4, 1000)]
        [1, 2, 2, 3, 10]
        >>> [most_nodes(leaves, True) for leaves in (1, 2, 31, 32, 1000)]
        [1, 2, 31, 32, 36]
    """
    if not intervals:
        return leaves.bit_length()
    size = rows_in_block(leaves - 1, 1)
    whole, rest = divmod(leaves - 1, size)
    # Of the last block half the size, before blocks doubled.
    before = blocks.MOST_BLOCKS - 1 + (size // 2).bit_length() if size > 1 else 0
    return max(whole + (rest + 1).bit_length(), before)


@dataclass(frozen=True)
class SumTree:
    """Sums of consecutive rows as nodes of a binary tree over all rows of the data (`pairwise_summation`).

    A node holds the sums of `2 ** k` rows, of which the first has a number that `2 ** k` divides. Two nodes below one parent
    are added as soon as both are there. The sums of all data therefore depend on the number of rows alone: trees over parts
    of the data, joined in order, equal the tree of a single run to the last bit.

    Attributes:
        size: number of rows in a block whose sums are kept for intervals, a power of two. It doubles whenever there are
            `MOST_BLOCKS` blocks. None to keep no blocks: nodes are added as far as possible.
        start: number of rows of the data before these.
        nodes: in the order of the data.

    Examples:
        >>> def rows(*values, start=0):
        ...     tree = SumTree(start=start)
        ...     for value in values:
        ...         tree = tree.add(DataBlock(1, 10, {"a": Sums({"x": torch.tensor(value)})}))
        ...     return tree
        >>> import torch
        >>> from tl_layersim.core import Sums
        >>> [node.rows for node in rows(1, 2, 3, 4, 5).nodes], [node.rows for node in rows(4, 5, start=3).nodes]
        ([4, 1], [1, 1])
        >>> rows(1, 2, 3).join(rows(4, 5, start=3)).total().sums["a"]["x"]
        tensor(15)
    """

    size: int | None = None
    start: int = 0
    nodes: tuple[DataBlock, ...] = ()

    @property
    def rows(self) -> int:
        """Number of rows whose sums it holds."""
        return sum(node.rows for node in self.nodes)

    @property
    def end(self) -> int:
        """Number of rows of the data up to and including these."""
        return self.start + self.rows

    def add(self, more: DataBlock) -> SumTree:
        """The tree with the sums of the next rows.

        Args:
            more: sums of one row, or of a power of two of rows that were added in pairs and whose first has a number that
                this power divides; of one block at most.
        """
        stack = [(node.rows, node) for node in self.nodes]
        push(stack, more.rows, more, DataBlock.__add__, self.start, self.size)
        tree = replace(self, nodes=tuple(node for _, node in stack))
        if self.size is None or self.start or self.rows + more.rows < blocks.MOST_BLOCKS * self.size:
            return tree
        return tree.coarser(2 * self.size)

    def join(self, later: SumTree) -> SumTree:
        """The tree of these rows and of those that follow.

        Args:
            later: its first row follows the last of this tree; with or without blocks as this one.

        Raises:
            ValueError: it begins elsewhere.
        """
        if later.start != self.end or (self.size is None) != (later.size is None):
            raise ValueError(f"a tree that ends at row {self.end} cannot be joined with one that begins at {later.start}")
        tree = self if self.size is None or later.size is None else self.coarser(max(self.size, later.size))
        for node in later.nodes:
            tree = tree.add(node)
        return tree

    def coarser(self, size: int) -> SumTree:
        """The tree with blocks of a multiple of the size, a power of two; itself if its blocks are no smaller."""
        if self.size is None or self.size >= size:
            return self
        tree = SumTree(size, self.start)
        for node in self.nodes:
            stack = [(own.rows, own) for own in tree.nodes]
            push(stack, node.rows, node, DataBlock.__add__, self.start, size)
            tree = replace(tree, nodes=tuple(own for _, own in stack))
        return tree

    def blocks(self) -> tuple[DataBlock, ...]:
        """All blocks in the order of the data, the last one included where it is not complete; the tree begins at row 0."""
        whole = [node for node in self.nodes if node.rows == self.size]
        rest = [(node.rows, node) for node in self.nodes[len(whole) :]]
        return (*whole, fold(rest, DataBlock.__add__)) if rest else tuple(whole)

    def total(self) -> DataBlock:
        """The sums of all its rows; a block without sums if there is none."""
        stack: list[tuple[int, DataBlock]] = []
        for node in self.nodes:
            push(stack, node.rows, node, DataBlock.__add__, self.start)
        return fold(stack, DataBlock.__add__) if stack else DataBlock(0, 0, {})
