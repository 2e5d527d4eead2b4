"""Bytecode of functions and of the functions that they call, to compare the kernels of two runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType


def called_by(starts: Iterable[FunctionType]) -> list[FunctionType]:
    """The given functions and all functions of their modules that they call by name, directly or indirectly.

    Args:
        starts: the functions.
    """
    functions: dict[int, FunctionType] = {}
    waiting = list(starts)
    while waiting:
        function = waiting.pop()
        if id(function) in functions:
            continue
        functions[id(function)] = function
        names = {name for code in codes_in(function.__code__) for name in code.co_names}
        named = (function.__globals__.get(name) for name in sorted(names))
        waiting += [item for item in named if isinstance(item, FunctionType) and item.__module__ == function.__module__]
    return list(functions.values())


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """The code object of a function or module and all code objects nested in it.

    Args:
        code: of the function or module.
    """
    yield code
    for item in code.co_consts:
        if isinstance(item, CodeType):
            yield from codes_in(item)


def plain_constants(code: CodeType) -> list[str]:
    """The constants of a code object, without nested code, as text that is the same in every process.

    Args:
        code: of the function.
    """
    plain = [item for item in code.co_consts if not isinstance(item, CodeType)]
    # The order of a set differs between processes.
    return [repr(sorted(map(repr, item)) if isinstance(item, frozenset) else item) for item in plain]
