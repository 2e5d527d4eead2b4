"""Trees of sums: one order of addition, and blocks of batches, however the batches arrive."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_layersim.core import Sums
from tl_layersim.core.sums import MOST_BLOCKS, DataBlock, SumTree, first_block_size, most_nodes, next_size, texts_in_block


def part(start: int, count: int) -> DataBlock:
    """Consecutive batches; their numbers are a mask of bits, so that a sum tells its batches."""
    mask = torch.zeros(300, dtype=torch.int64)
    mask[start : start + count] = 1
    return DataBlock(count, 10 * count, {"a": Sums({"mask": mask})})


def held(tree: SumTree) -> list[tuple[int, int]]:
    """First batch and number of batches of each block."""
    blocks = []
    for block in tree.blocks():
        numbers = block.sums["a"]["mask"].nonzero().flatten().tolist()
        assert block.sums["a"]["mask"].max() == 1
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert (len(numbers), 10 * len(numbers)) == (block.texts, block.tokens)
        blocks.append((numbers[0], len(numbers)))
    return blocks


@pytest.mark.parametrize("count", [1, 2, 15, 31, 32, 33, 63, 64, 65, 100, 128, 129, 257, 299])
def test_blocks_are_contiguous_of_one_size_and_16_to_32(count):
    tree = SumTree(1)
    for number in range(count):
        tree = tree.add(part(number, 1))
        assert len(tree.blocks()) <= MOST_BLOCKS

    blocks = held(tree)
    assert [start for start, _ in blocks] == list(range(0, count, tree.size))
    assert sum(size for _, size in blocks) == count
    assert len(blocks) == min(count, len(blocks)) >= min(count, 16)
    assert tree.size == texts_in_block(count, 1) == first_block_size(count)
    assert tree.total().tokens == 10 * count


@pytest.mark.parametrize("first", [1, 4])
@pytest.mark.parametrize("count", [3, 40, 133, 256, 299])
def test_blocks_do_not_depend_on_how_batches_are_grouped_into_requests(first, count):
    torch.manual_seed(0)
    terms = torch.randn(count, dtype=torch.float64) * 10.0 ** torch.randint(-8, 8, (count,))

    def total(numbers) -> torch.Tensor:
        # As on a server: pairs first.
        values = [terms[n] for n in numbers]
        while len(values) > 1:
            values = [sum(pair) for pair in itertools.batched(values, 2)] if hasattr(itertools, "batched") else pairs(values)
        return values[0]

    def pairs(values):
        return [values[i] + values[i + 1] if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)]

    def run(most: int) -> list[float]:
        tree = SumTree(first)
        index = 0
        while index < count:
            size = next_size(index, min(most, texts_in_block(index, first)))
            while index + size > count:
                size //= 2
            tree = tree.add(DataBlock(size, size, {"a": Sums({"x": total(range(index, index + size))})}))
            index += size
        return [float(block.sums["a"]["x"]) for block in tree.blocks()]

    alone = run(1)
    assert run(2) == run(8) == run(64) == alone
    assert first == 4 or len(alone) >= min(count, 16)


def test_the_first_size_gives_16_to_32_blocks():
    for batches in range(16, 3000):
        size = first_block_size(batches)
        assert 16 <= -(-batches // size) <= MOST_BLOCKS
        assert size & (size - 1) == 0
    assert [first_block_size(n) for n in (None, 1, 15)] == [1, 1, 1]


@pytest.mark.parametrize("count", [5, 21, 31])
def test_coarser_blocks_hold_the_same_batches(count):
    tree = SumTree(1)
    for number in range(count):
        tree = tree.add(part(number, 1))
    coarse = tree.coarser(4)

    assert [start for start, _ in held(coarse)] == list(range(0, count, 4))
    assert tree.coarser(1) is tree


def grown(terms: torch.Tensor, first: int, end: int, size: int | None) -> SumTree:
    tree = SumTree(size, first)
    for number in range(first, end):
        tree = tree.add(DataBlock(1, 1, {"a": Sums({"x": terms[number]})}))
    return tree


def bits(blocks: tuple[DataBlock, ...]) -> list[tuple[int, int, float]]:
    return [(block.texts, block.tokens, float(block.sums["a"]["x"])) for block in blocks]


@pytest.mark.heavy("seconds, where faster tests reach the same")
@settings(deadline=None)
@given(st.integers(1, 150), st.lists(st.integers(0, 150), max_size=20), st.booleans(), st.integers(0, 99))
def test_trees_over_any_ranges_join_to_the_tree_of_one_run(count, cuts, blocks, seed):
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-8, 8, (count,), generator=generator)
    terms = torch.randn(count, generator=generator, dtype=torch.float64) * scale
    alone = grown(terms, 0, count, 1 if blocks else None)
    size = first_block_size(count) if blocks else None
    edges = [0, *sorted(min(cut, count) for cut in cuts), count]
    joined = SumTree(size)
    for first, end in itertools.pairwise(edges):
        joined = joined.join(grown(terms, first, end, size))

    assert bits((joined.total(),)) == bits((alone.total(),))

    if blocks:
        assert bits(joined.blocks()) == bits(alone.blocks())
    # In any grouping too, as workers of a cluster add neighbours first.
    middle = len(edges) // 2
    ranges = list(itertools.pairwise(edges))
    first_tree = SumTree(size)
    second_tree = SumTree(size, edges[middle])
    for first, end in ranges[:middle]:
        first_tree = first_tree.join(grown(terms, first, end, size))
    for first, end in ranges[middle:]:
        second_tree = second_tree.join(grown(terms, first, end, size))

    assert bits(first_tree.join(second_tree).nodes) == bits(joined.nodes)


def test_the_total_with_blocks_is_the_total_without():
    terms = torch.randn(100, dtype=torch.float64)
    with_blocks = grown(terms, 0, 100, 1)
    without = grown(terms, 0, 100, None)
    assert len(without.nodes) == 3
    assert bits((with_blocks.total(),)) == bits((without.total(),))


@pytest.mark.light("False")
@pytest.mark.parametrize("intervals", [False, True])
def test_the_most_nodes_are_those_of_a_tree_that_grows(intervals):
    block = DataBlock(1, 1, {})
    tree = SumTree(1 if intervals else None)
    most = 0
    for batches in range(1, 300):
        most = max(most, len(tree.nodes) + 1)
        tree = tree.add(block)
        assert most_nodes(batches, intervals) == most
        # With blocks that are chosen beforehand.
        tree_of_blocks = SumTree(first_block_size(batches) if intervals else None)
        nodes = 0
        for _ in range(batches):
            nodes = max(nodes, len(tree_of_blocks.nodes) + 1)
            tree_of_blocks = tree_of_blocks.add(block)
        assert nodes <= most


def test_a_tree_that_begins_elsewhere_is_not_joined():
    terms = torch.ones(9, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"up to 3 .* from 4"):
        grown(terms, 0, 3, None).join(grown(terms, 4, 9, None))
    with pytest.raises(ValueError, match="cannot be joined"):
        grown(terms, 0, 3, None).join(grown(terms, 3, 9, 1))
    assert SumTree().total().texts == 0
