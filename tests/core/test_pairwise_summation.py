"""The order in which sums are added: it follows how many there are, and not how they came."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tl_layersim.core.sums import fold, next_size, push


def join(a: str, b: str) -> str:
    return f"({a}{b})"


def in_requests(first: int, end: int, sizes: list[int]) -> list[tuple[int, str]]:
    """The groups of a run over some terms that sends requests of at most these sizes in turn, each summed by itself."""
    stack: list[tuple[int, str]] = []
    index = first
    turn = 0
    while index < end:
        size = min(next_size(index, sizes[turn % len(sizes)]), end - index)
        turn += 1
        there: list[tuple[int, str]] = []
        for term in range(index, index + size):
            push(there, 1, f"{term} ", join)
        for number, value in there:
            push(stack, number, value, join, first)
        index += size
    return stack


def recursive(first: int, end: int) -> str:
    """The sum of terms as a tree from its definition: the largest power of two of terms, and then the rest."""
    if end - first == 1:
        return f"{first} "
    half = 1 << ((end - first - 1).bit_length() - 1)
    return join(recursive(first, first + half), recursive(first + half, end))


@given(st.integers(1, 200), st.lists(st.integers(1, 100), min_size=1, max_size=6))
def test_any_requests_add_in_one_order(count, sizes):
    assert fold(in_requests(0, count, sizes), join) == recursive(0, count)


@given(st.integers(1, 200), st.lists(st.integers(0, 200)), st.lists(st.integers(1, 70), min_size=1, max_size=4))
def test_any_ranges_add_in_one_order(count, cuts, sizes):
    edges = [0, *sorted(min(cut, count) for cut in cuts), count]
    stack: list[tuple[int, str]] = []
    for first, end in itertools.pairwise(edges):
        for number, value in in_requests(first, end, sizes):
            push(stack, number, value, join)

    assert fold(stack, join) == recursive(0, count)


@given(st.integers(0, 1000), st.integers(1, 200))
def test_a_request_starts_where_its_size_divides(index, most):
    size = next_size(index, most)
    assert size & (size - 1) == 0
    assert size <= most
    assert index % size == 0


@given(st.integers(0, 1000), st.integers(1, 1000))
def test_few_partial_sums_are_held(first, count):
    stack: list[tuple[int, int]] = []
    for term in range(first, first + count):
        push(stack, 1, term, int.__add__, first)
        # The groups grow up to the middle of the tree and shrink after it.
        assert len(stack) <= 2 * count.bit_length()
    assert fold(stack, int.__add__) == sum(range(first, first + count))


def test_groups_are_no_larger_than_the_most():
    stack: list[tuple[int, str]] = []
    for term in "abcdefg":
        push(stack, 1, term, join, 0, 2)
    assert stack == [(2, "(ab)"), (2, "(cd)"), (2, "(ef)"), (1, "g")]
