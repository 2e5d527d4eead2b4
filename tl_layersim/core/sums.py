"""Sums over batches. A run has no other state. Addition is reproducible, and blocks of texts are kept for intervals.

A request to a server may sum 1 or 64 batches, an interrupted run continues in the middle, and a shard may begin at any batch.
Floating-point sums are equal to the last bit only if the same terms are added in the same order. Terms are therefore added as
in a binary counter: the first to the second, the third to the fourth, then these two sums, and so on.

The functions of pairwise summation are serialised by value and run on servers too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from .errors import LayersimError

# Prefix of a kernel's name: its sums are over pools of rows.
POOL = "pools of "
# Prefix of a kernel's name: its sums are sizes of the activations that the analyzer reads.
SIZES = "sizes of "
# Name of the kernel that compares texts that follow each other.
TEXT_ORDER = "order of texts"


def analyzer_of(name: str) -> str:
    """Name of a kernel's analyzer: the name of the kernel without the prefix `POOL` or `SIZES`.

    Args:
        name: name of the kernel: the name of the analyzer, possibly after `POOL` or `SIZES`.
    """
    return name.removeprefix(POOL).removeprefix(SIZES)


def as_sum(value: Tensor) -> Tensor:
    """A tensor in the type in which sums are added: int64 or float64.

    Args:
        value: a tensor that a kernel returned.
    """
    return value.to(torch.float64 if value.is_floating_point() else torch.int64)


def added(a: Mapping[str, Tensor], b: Mapping[str, Tensor], kernel: str = "") -> dict[str, Tensor]:
    """Add two outputs of a kernel field by field, as int64 or float64. A field that only one of them has is kept.

    A plain function: it is serialised by value and also runs on a server.

    Args:
        a: the output on some rows.
        b: the output on other rows.
        kernel: name of the kernel, for the message.

    Raises:
        LayersimError: a field has two shapes, which broadcasting would hide.

    Examples:
        >>> import torch
        >>> added({"x": torch.tensor(1)}, {"x": torch.tensor(2), "y": torch.tensor(0.5)})
        {'x': tensor(3), 'y': tensor(0.5000)}
    """
    total = {**a, **b}
    for name in a.keys() & b.keys():
        if a[name].shape != b[name].shape:
            owner = f"The kernel of {kernel!r}" if kernel else "A kernel"
            raise LayersimError(
                f"{owner} returned {name!r} of shape {tuple(a[name].shape)} for some rows and {tuple(b[name].shape)} for "
                "others; the shapes must be equal. Sum over the token axis inside the kernel."
            )
        total[name] = as_sum(a[name]) + as_sum(b[name])
    return total


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums over rows: named CPU tensors that are added field by field. Integers become int64 and other numbers float64.

    `Sums()` is zero, and a field that only one of two sums has is kept. Batches, machines, ranks and resumed runs are all
    merged by `a + b`.

    Examples:
        >>> a = Sums.of({"count": torch.tensor(2), "total": torch.tensor([1.0, 2.0])})
        >>> (a + a + Sums())["total"]
        tensor([2., 4.], dtype=torch.float64)
    """

    fields: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", MappingProxyType(dict(self.fields)))

    @staticmethod
    def of(output: Mapping[str, Tensor]) -> Sums:
        """Convert the tensors that a kernel returned for one batch to `Sums`.

        Args:
            output: tensors that a kernel returned; they are moved to the CPU and converted to int64 or float64.
        """
        return Sums({name: as_sum(value.detach().cpu()) for name, value in output.items()})

    def __add__(self, other: Sums) -> Sums:
        if not self.fields:
            return other
        if not other.fields:
            return self
        return Sums(added(self.fields, other.fields))

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]

    def __bool__(self) -> bool:
        return bool(self.fields)


def with_pools(sums: Mapping[str, Sums], name: str) -> Sums:
    """All sums of an analyzer: those over single rows, and those over pools of rows.

    A pool is a group of rows from which samples are drawn and compared in pairs.

    Args:
        sums: sums by analyzer.
        name: name of the analyzer.
    """
    pools = sums.get(POOL + name, Sums())
    return Sums({**sums.get(name, Sums()).fields, **pools.fields})


# Largest number of blocks. With more, neighbours are added and half of them remain.
MOST_BLOCKS = 32


@dataclass(frozen=True)
class DataBlock:
    """Sums over a block of consecutive texts of the data, with all their rows.

    Attributes:
        texts: number of texts; the last block of the data may count texts that do not exist.
        tokens: number of their counted positions.
        sums: sums by analyzer.
    """

    texts: int
    tokens: int
    sums: Mapping[str, Sums]

    def __add__(self, other: DataBlock) -> DataBlock:
        sums = {}
        for name, sums_of_kernel in self.sums.items():
            sums[name] = Sums(added(sums_of_kernel.fields, other.sums[name].fields, name))
        return DataBlock(self.texts + other.texts, self.tokens + other.tokens, sums)


def texts_in_block(index: int, first: int) -> int:
    """Number of texts per block when text `index` is about to be added. It doubles whenever there are `MOST_BLOCKS` blocks.

    Args:
        index: index of the text.
        first: number of texts per block at the start.

    Examples:
        >>> [texts_in_block(index, 1) for index in (0, 31, 32, 63, 64, 128)]
        [1, 1, 2, 2, 4, 8]
    """
    size = first
    while index >= MOST_BLOCKS * size:
        size *= 2
    return size


def first_block_size(texts: int | None) -> int:
    """Number of texts per block for data of a known size. It is a power of two that gives 16 to 32 blocks.

    Args:
        texts: number of texts in the data; None if unknown, which gives 1.

    Examples:
        >>> [first_block_size(texts) for texts in (None, 10, 16, 31, 32, 1000)]
        [1, 1, 1, 1, 2, 32]
    """
    size = 1
    while texts is not None and 2 * size * (MOST_BLOCKS // 2) <= texts:
        size *= 2
    return size


Term = TypeVar("Term")


def push(
    stack: list[tuple[int, Term]],
    count: int,
    value: Term,
    add: Callable[[Term, Term], Term],
    start: int = 0,
    most: int | None = None,
) -> None:
    """Push a sum of terms onto a stack of partial sums, for pairwise summation.

    Two sums are added if, and only if, they are siblings in the binary tree of all terms.

    Args:
        stack: number of terms and sum of each group so far, changed in place.
        count: number of terms in `value`, a power of two.
        value: their sum.
        add: adds two sums.
        start: number of terms before the stack; the index of the first term in `value` must be divisible by `count`.
        most: largest number of terms in a group, a power of two; None for no limit.

    Examples:
        >>> stack = []
        >>> for term in "abcde":
        ...     push(stack, 1, term, lambda a, b: f"({a}{b})")
        >>> stack
        [(4, '((ab)(cd))'), (1, 'e')]
        >>> later = []
        >>> for term in "defgh":
        ...     push(later, 1, term, lambda a, b: f"({a}{b})", start=3)
        >>> later
        [(1, 'd'), (4, '((ef)(gh))')]
    """
    stack.append((count, value))
    end = start + sum(number for number, _ in stack)
    while len(stack) > 1 and stack[-1][0] == stack[-2][0]:
        number, right = stack[-1]
        if end % (2 * number) or (most is not None and 2 * number > most):
            return
        stack.pop()
        stack[-1] = (2 * number, add(stack[-1][1], right))


def fold(stack: list[tuple[int, Term]], add: Callable[[Term, Term], Term]) -> Term:
    """Total of the partial sums on a stack, added from the last to the first.

    Args:
        stack: a stack that `push` has filled.
        add: adds two sums.

    Examples:
        >>> fold([(4, "x"), (2, "y"), (1, "z")], lambda a, b: f"({a}{b})")
        '(x(yz))'
    """
    total = stack[-1][1]
    for _, value in reversed(stack[:-1]):
        total = add(value, total)
    return total


def next_size(index: int, most: int) -> int:
    """Number of batches in the next request to a server: a power of two that divides the number of batches before it.

    It is the largest such number up to `most`. Such requests do not change the order of additions.

    Args:
        index: number of batches before the request.
        most: upper limit.

    Examples:
        >>> [next_size(index, 8) for index in (0, 1, 2, 4, 6, 8)]
        [8, 1, 2, 4, 2, 8]
    """
    size = 1
    while size * 2 <= most and index % (size * 2) == 0:
        size *= 2
    return size


def most_nodes(leaves: int, intervals: bool) -> int:
    """Largest number of `SumTree` nodes that a run holds. The node that is added next is included.

    Args:
        leaves: number of leaves, the groups of texts whose sums are added.
        intervals: whether blocks are kept, at first of one leaf each. Runs on servers and shards count the texts beforehand and
            begin with larger blocks, but hold no more nodes.

    Examples:
        >>> [most_nodes(leaves, False) for leaves in (1, 2, 3, 4, 1000)]
        [1, 2, 2, 3, 10]
        >>> [most_nodes(leaves, True) for leaves in (1, 2, 31, 32, 1000)]
        [1, 2, 31, 32, 36]
    """
    if not intervals:
        return leaves.bit_length()
    size = texts_in_block(leaves - 1, 1)
    whole_blocks, remaining_leaves = divmod(leaves - 1, size)
    nodes = whole_blocks + (remaining_leaves + 1).bit_length()
    # Number of nodes just before blocks doubled.
    nodes_before = MOST_BLOCKS - 1 + (size // 2).bit_length() if size > 1 else 0
    return max(nodes, nodes_before)


# Copies of the sums that are held beside the nodes of the tree while two nodes are added.
ADDED = 2


def most_copies(leaves: int, intervals: bool, at_once: int = 1) -> int:
    """Largest number of copies of its sums that a run holds at once.

    Args:
        leaves: see `most_nodes`.
        intervals: see `most_nodes`.
        at_once: number of leaves that one batch returns.

    Examples:
        >>> [most_copies(leaves, False) for leaves in (1, 1000)], [most_copies(leaves, True) for leaves in (16, 64)]
        ([3, 12], [28, 51])
    """
    nodes = most_nodes(leaves, intervals)
    if not intervals:
        return nodes + at_once - 1 + ADDED
    # While blocks double, those of both sizes are held.
    doubled = MOST_BLOCKS // 2 if leaves >= MOST_BLOCKS else 0
    # Sums without a block are built from those of halves, quarters and so on, before and after it.
    halves = 2 * min(leaves, MOST_BLOCKS).bit_length()
    return max(nodes, at_once) + max(doubled, halves) + ADDED


@dataclass(frozen=True)
class SumTree:
    """Binary tree whose nodes are sums over consecutive texts. See `push` for the order of additions.

    A node holds the sums of `2 ** k` texts, with all their rows; the index of the first is a multiple of `2 ** k`. Two nodes
    with a common parent are added as soon as both exist. The sums of all data therefore depend on the number of texts alone:
    trees over parts of the data, joined in order, equal the tree of a single run to the last bit.

    Attributes:
        size: number of texts in a block whose sums are kept for intervals, a power of two. It doubles whenever there are
            `MOST_BLOCKS` blocks. None to keep no blocks: nodes are added as far as possible.
        start: number of texts of the data before this tree.
        nodes: the nodes, in the order of the data.

    Examples:
        >>> def texts(*values, start=0):
        ...     tree = SumTree(start=start)
        ...     for value in values:
        ...         tree = tree.add(DataBlock(1, 10, {"a": Sums({"x": torch.tensor(value)})}))
        ...     return tree
        >>> import torch
        >>> from tl_layersim.core import Sums
        >>> [node.texts for node in texts(1, 2, 3, 4, 5).nodes], [node.texts for node in texts(4, 5, start=3).nodes]
        ([4, 1], [1, 1])
        >>> texts(1, 2, 3).join(texts(4, 5, start=3)).total().sums["a"]["x"]
        tensor(15)
    """

    size: int | None = None
    start: int = 0
    nodes: tuple[DataBlock, ...] = ()

    @property
    def texts(self) -> int:
        """Number of texts in the tree."""
        return sum(node.texts for node in self.nodes)

    @property
    def end(self) -> int:
        """Index of the text after the last one in the tree."""
        return self.start + self.texts

    def add(self, block: DataBlock) -> SumTree:
        """This tree with the sums of the next texts added.

        Args:
            block: sums of 2^k texts that were added in pairs; the index of the first text is a multiple of 2^k, and all texts
                lie in one block.
        """
        tree = self._with_node(block)
        if self.size is None or self.start or self.texts + block.texts < MOST_BLOCKS * self.size:
            return tree
        return tree.coarser(2 * self.size)

    def join(self, later: SumTree) -> SumTree:
        """This tree, joined with the tree of the texts that follow.

        Args:
            later: a tree that starts where this tree ends, with blocks if this tree has blocks.

        Raises:
            ValueError: `later` starts elsewhere.
        """
        if later.start != self.end or (self.size is None) != (later.size is None):
            raise ValueError(f"sums of texts up to {self.end} cannot be joined with sums of texts from {later.start}")
        tree = self
        if self.size is not None and later.size is not None:
            tree = self.coarser(max(self.size, later.size))
        for node in later.nodes:
            tree = tree.add(node)
        return tree

    def coarser(self, size: int) -> SumTree:
        """This tree with blocks of `size` texts. It is unchanged if its blocks are at least as large."""
        if self.size is None or self.size >= size:
            return self
        tree = SumTree(size, self.start)
        for node in self.nodes:
            tree = tree._with_node(node)
        return tree

    def _with_node(self, block: DataBlock) -> SumTree:
        stack = [(node.texts, node) for node in self.nodes]
        push(stack, block.texts, block, DataBlock.__add__, self.start, self.size)
        return replace(self, nodes=tuple(node for _, node in stack))

    def blocks(self) -> tuple[DataBlock, ...]:
        """All blocks in the order of the data; the last may be incomplete. The tree must start at text 0."""
        whole_blocks = [node for node in self.nodes if node.texts == self.size]
        nodes_of_last = self.nodes[len(whole_blocks) :]
        if not nodes_of_last:
            return tuple(whole_blocks)
        stack = [(node.texts, node) for node in nodes_of_last]
        return (*whole_blocks, fold(stack, DataBlock.__add__))

    def total(self) -> DataBlock:
        """The sums of all texts as one block. The block of an empty tree has no sums."""
        stack: list[tuple[int, DataBlock]] = []
        for node in self.nodes:
            push(stack, node.texts, node, DataBlock.__add__, self.start)
        return fold(stack, DataBlock.__add__) if stack else DataBlock(0, 0, {})


@dataclass(frozen=True)
class Tally:
    """Progress and sums of one pass over the data.

    Attributes:
        batches: number of batches read, including batches of other ranks and shards.
        sequences: number of rows in these batches.
        texts: number of texts that these rows belong to.
        tokens: number of counted positions in these batches.
        digest: SHA-256 of these rows.
        seconds: wall time.
        done: whether the pass has reached the end of the data.
        tree: the sums of the batches that this process ran.
        inputs: digest of these rows with their counted positions, labels and texts, see `data.batches.RowDigests`.
    """

    batches: int = 0
    sequences: int = 0
    tokens: int = 0
    digest: str = ""
    seconds: float = 0.0
    done: bool = False
    tree: SumTree = SumTree()
    inputs: str = ""
    texts: int = 0

    def sums(self, names: Iterable[str]) -> dict[str, Sums]:
        """Dict from the name of each kernel to its sums over all rows.

        Args:
            names: names of the kernels.
        """
        total = self.tree.total().sums
        return {name: total.get(name, Sums()) for name in names}


def need_memory(sums: str, need: float, limit: float, instead: str = "") -> None:
    """Raise an error if sums need more memory than the limit.

    A plain function: kernels that call it are serialised by value and also run on a server.

    Args:
        sums: name of the sums, a plural noun, for the message.
        need: memory of the sums in GB.
        limit: value of `max_memory_gb`.
        instead: remedy, as a sentence.

    Raises:
        LayersimError: the sums need more memory than `limit`.
    """
    if not need <= limit:
        raise LayersimError(f"{sums} take {need:.3g} GB; `max_memory_gb` is {limit:g}. {instead}".rstrip())
