"""The code of functions, and of the functions that they call: to tell whether two runs used the same kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType


def called_by(starts: Iterable[FunctionType]) -> list[FunctionType]:
    """These functions, and those of their own modules that they call by name, and so on."""
    found: dict[int, FunctionType] = {}
    waiting = list(starts)
    while waiting:
        function = waiting.pop()
        if id(function) in found:
            continue
        found[id(function)] = function
        names = {name for code in codes_in(function.__code__) for name in code.co_names}
        named = (function.__globals__.get(name) for name in sorted(names))
        waiting += [item for item in named if isinstance(item, FunctionType) and item.__module__ == function.__module__]
    return list(found.values())


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A function's or a module's code, and all code inside it."""
    yield code
    for item in code.co_consts:
        if isinstance(item, CodeType):
            yield from codes_in(item)


def plain_constants(code: CodeType) -> list[str]:
    """The constants of a function's code, as text that is the same in every process; not the code inside it."""
    plain = [item for item in code.co_consts if not isinstance(item, CodeType)]
    # A set has no order of its own.
    return [repr(sorted(map(repr, item)) if isinstance(item, frozenset) else item) for item in plain]
