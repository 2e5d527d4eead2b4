"""Adding in pairs: an order of additions that depends on how many terms there are, and not on how they came.

One request may sum one batch or sixty-four, a request that took too long is cut in two, a run that was killed goes on
elsewhere: floating-point sums are the same to the last bit only if the same terms meet in the same order. So terms meet as in a
binary counter: first with second, third with fourth, then these two, up to a block of `BLOCK`.

Plain functions that travel with a request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
BLOCK = 64


def push(stack: list[tuple[int, T]], count: int, value: T, add: Callable[[T, T], T]) -> None:
    """Put the sum of `count` terms, a power of two that follows in line, onto the stack, and add what has met its equal.

    >>> stack = []
    >>> for term in "abcde":
    ...     push(stack, 1, term, lambda a, b: f"({a}{b})")
    >>> stack
    [(4, '((ab)(cd))'), (1, 'e')]
    """
    stack.append((count, value))
    while len(stack) > 1 and stack[-1][0] == stack[-2][0]:
        number, right = stack.pop()
        stack[-1] = (2 * number, add(stack[-1][1], right))


def fold(stack: list[tuple[int, T]], add: Callable[[T, T], T]) -> T:
    """The sum of all that is on a stack, which must not be empty, from its end.

    >>> fold([(4, "x"), (2, "y"), (1, "z")], lambda a, b: f"({a}{b})")
    '(x(yz))'
    """
    total = stack[-1][1]
    for _, value in reversed(stack[:-1]):
        total = add(value, total)
    return total


def next_size(index: int, most: int) -> int:
    """How many terms, at most `most`, a request may sum that starts at term `index`: a power of two that divides it.

    >>> [next_size(index, 8) for index in (0, 1, 2, 4, 6, 8)]
    [8, 1, 2, 4, 2, 8]
    """
    size = 1
    while size * 2 <= min(most, BLOCK) and index % (size * 2) == 0:
        size *= 2
    return size
