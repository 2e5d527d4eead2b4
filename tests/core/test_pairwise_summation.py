"""The order in which sums are added: it follows how many there are, and not how they came."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tl_layersim.core.pairwise_summation import BLOCK, fold, next_size, push


def join(a: str, b: str) -> str:
    return f"({a}{b})"


def in_requests(count: int, sizes: list[int], block: int) -> str:
    """What a run gives that sends requests of at most these sizes in turn, each summed in pairs by itself."""
    total, pending, index, turn = "", [], 0, 0
    while index < count:
        size = min(next_size(index, sizes[turn % len(sizes)]), count - index)
        turn += 1
        there: list[tuple[int, str]] = []
        for term in range(index, index + size):
            push(there, 1, f"{term} ", join)
        for number, value in there:
            push(pending, number, value, join)
            if pending[0][0] >= block:
                total = join(total, pending.pop(0)[1]) if total else pending.pop(0)[1]
        index += size
    if not pending:
        return total
    rest = fold(pending, join)
    return join(total, rest) if total else rest


@given(st.integers(1, 200), st.lists(st.integers(1, 100), min_size=1, max_size=6))
def test_any_requests_add_in_one_order(count, sizes):
    assert in_requests(count, sizes, BLOCK) == in_requests(count, [1], BLOCK)


@given(st.integers(0, 1000), st.integers(1, 200))
def test_a_request_starts_where_its_size_divides(index, most):
    size = next_size(index, most)
    assert size & (size - 1) == 0
    assert size <= min(most, BLOCK)
    assert index % size == 0


def test_few_partial_sums_are_held():
    pending: list[tuple[int, int]] = []
    for term in range(BLOCK - 1):
        push(pending, 1, term, int.__add__)
    assert len(pending) <= BLOCK.bit_length() - 1
    assert fold(pending, int.__add__) == sum(range(BLOCK - 1))


def test_each_at_once_is_plain_addition():
    assert in_requests(5, [1], 1) == "((((0 1 )2 )3 )4 )"
