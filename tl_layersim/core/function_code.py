"""Bytecode of functions and of the functions that they call, to compare the kernels of two runs."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any


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


def digest_of_code(starts: Iterable[FunctionType]) -> str:
    """A digest of the bytecode of functions and of the functions of their modules that they call, 12 hex digits.

    Args:
        starts: the functions.
    """
    seen = {code.co_qualname: code for function in called_by(starts) for code in codes_in(function.__code__)}
    digest = hashlib.sha256()
    for name, code in sorted(seen.items()):
        digest.update(repr((name, code.co_code, code.co_names, plain_constants(code))).encode())
    return digest.hexdigest()[:12]


def describe_function(function: Callable[..., Any]) -> str:
    """A function as text for a record: its qualified name, and a digest of its code and of the plain values that it holds.

    Args:
        function: a function, a method, a `functools.partial`, or an object with `__call__`.

    Examples:
        >>> describe_function(describe_function).split(" ")[0]
        'tl_layersim.core.function_code.describe_function'
    """
    values: list[Any] = []
    while isinstance(function, functools.partial):
        values += [function.args, sorted(function.keywords.items())]
        function = function.func
    bound = getattr(function, "__self__", None)
    own: Any = getattr(function, "__func__", function)
    if not isinstance(own, FunctionType):
        # An object that can be called, or a function of C, which has no code to digest.
        bound, own = own, vars(type(own)).get("__call__", own)
    module = getattr(function, "__module__", None) or type(function).__module__
    name = f"{module}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    values.append(sorted(getattr(bound, "__dict__", {}).items()))
    code = ""
    if isinstance(own, FunctionType):
        values += [[cell.cell_contents for cell in own.__closure__ or ()], own.__defaults__, own.__kwdefaults__]
        code = digest_of_code([own])
    return f"{name} sha256 {hashlib.sha256(f'{code} {_plain_values(values)!r}'.encode()).hexdigest()[:12]}"


def _plain_values(value: Any) -> Any:
    """A value with everything but numbers and texts replaced by its type, so that its `repr` is the same in every process."""
    if value is None or isinstance(value, str | bytes | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_plain_values(item) for item in value]
    if hasattr(value, "tolist"):
        # A tensor or an array.
        return value.tolist()
    return type(value).__qualname__
