"""Pairwise summation: an order of additions that depends on the number of terms alone, not on how they are grouped.

A request to a server may sum one batch or sixty-four, an interrupted run continues in the middle, and the shards of a run begin
at any batch. Floating-point sums are equal to the last bit only if the same terms are added in the same order. Terms are
therefore added as in a binary counter: the first to the second, the third to the fourth, then these two sums, and so on.

All functions are serialised by value and run on servers too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Term = TypeVar("Term")


def push(
    stack: list[tuple[int, Term]],
    count: int,
    value: Term,
    add: Callable[[Term, Term], Term],
    start: int = 0,
    most: int | None = None,
) -> None:
    """Put the sum of the next terms onto a stack, and add neighbouring sums that have one parent in the tree over all terms.

    Args:
        stack: number of terms and sum of each group so far, changed in place.
        count: number of terms in `value`, a power of two.
        value: their sum.
        add: adds two sums.
        start: number of terms before those on the stack; `count` divides the number of the first term in `value`.
        most: number of terms in a group at most, a power of two; None for any number.

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
    """The sum of all groups on a stack, added from its end.

    Args:
        stack: as `push` leaves it; not empty.
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
    """The number of terms that a request may sum without changing the order of additions: a power of two.

    Args:
        index: number of the request's first term; the result divides it.
        most: upper limit.

    Examples:
        >>> [next_size(index, 8) for index in (0, 1, 2, 4, 6, 8)]
        [8, 1, 2, 4, 2, 8]
    """
    size = 1
    while size * 2 <= most and index % (size * 2) == 0:
        size *= 2
    return size
