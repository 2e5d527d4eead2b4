"""Digests of functions and values, which show whether two runs used the same code."""

from __future__ import annotations

import dis
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch


def called_by(starts: Iterable[FunctionType]) -> list[FunctionType]:
    """The given functions, and all functions of the same module that they call, directly or indirectly."""
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
    """A code object and all code objects nested in it."""
    yield code
    for item in code.co_consts:
        if isinstance(item, CodeType):
            yield from codes_in(item)


def plain_constants(code: CodeType) -> list[str]:
    """Constants of a code object as texts. Nested code is left out, and the texts are equal in every process."""
    plain = [item for item in code.co_consts if not isinstance(item, CodeType)]
    # The order of a set differs between processes.
    return [repr(sorted(map(repr, item)) if isinstance(item, frozenset) else item) for item in plain]


def digest_of_code(starts: Iterable[FunctionType]) -> str:
    """Digest (12 hex digits) of the bytecode of functions.

    Functions of the same module that they call are included, see `called_by`.
    """
    seen = {code.co_qualname: code for function in called_by(starts) for code in codes_in(function.__code__)}
    digest = hashlib.sha256()
    for name, code in sorted(seen.items()):
        digest.update(repr((name, code.co_code, code.co_names, plain_constants(code))).encode())
    return digest.hexdigest()[:12]


def defined_in(function: Any) -> str:
    """Name of the module that defines a function or an object's class.

    Args:
        function: any object; for a `functools.partial`, the function inside counts.
    """
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) or type(function).__module__


class ValueNames:
    """Makes names for functions and values from their code and contents. Equal contents have equal names in every process.

    A function is named with its closure, its defaults, the object of a method, and the globals that its code reads. A tensor
    is named by its dtype, shape and bytes, a module by its class and its weights.

    Args:
        known: names of other objects, by `id`.

    Attributes:
        unknown: classes of the objects without such a name, whose contents are missing from the digest.
    """

    def __init__(self, known: Mapping[int, str] = MappingProxyType({})) -> None:
        self._known = dict(known)
        self.unknown: list[str] = []

    def function(self, function: Callable[..., Any]) -> str:
        """Qualified name of a function, with a digest of its code and of the values it holds.

        Args:
            function: a function, a method, a `functools.partial`, or an object with `__call__`.

        Examples:
            >>> ValueNames().function(defined_in).split(" ")[0]
            'tl_layersim.core.code_digests.defined_in'
        """
        values: list[Any] = []
        while isinstance(function, functools.partial):
            values += [function.args, function.keywords]
            function = function.func
        # Decorators such as torch.no_grad() hold objects of their own, so only their code counts.
        while (inner := getattr(function, "__wrapped__", None)) is not None:
            values += [digest_of_code([function])] if isinstance(function, FunctionType) else []
            function = inner
        bound = getattr(function, "__self__", None)
        own: Any = getattr(function, "__func__", function)
        name = f"{defined_in(function)}.{getattr(function, '__qualname__', type(function).__qualname__)}"
        code = ""
        if isinstance(own, FunctionType):
            # A function that reaches itself is digested once.
            self._known[id(own)] = name
            code = digest_of_code([own])
            if bound is not None:
                known = id(bound) in self._known or isinstance(bound, type | torch.nn.Module)
                values.append(bound if known else [type(bound), getattr(bound, "__dict__", {})])
            values += [_closure(own), own.__defaults__, own.__kwdefaults__, *map(_globals, called_by([own]))]
        else:
            # An object that can be called, or a function of C, which has no code to digest.
            self.unknown.append(name)
            call = vars(type(own)).get("__call__")
            code = digest_of_code([call]) if isinstance(call, FunctionType) else ""
            values.append(getattr(own, "__dict__", {}))
        return f"{name} sha256 {self.digest(code, values)}"

    def digest(self, text: str, values: Any) -> str:
        """Digest (12 hex digits) of a text and of values."""
        return hashlib.sha256(f"{text} {self.named(values)!r}".encode()).hexdigest()[:12]

    def named(self, value: Any) -> Any:
        """A value as nested lists of numbers and texts. The `repr` of these lists is equal in every process."""
        if value is None or isinstance(value, str | bytes | bool | int | float | complex):
            return value
        if id(value) in self._known:
            return self._known[id(value)]
        if isinstance(value, Mapping):
            return sorted(([self.named(key), self.named(item)] for key, item in value.items()), key=repr)
        if isinstance(value, list | tuple):
            return [self.named(item) for item in value]
        if isinstance(value, set | frozenset):
            return sorted(map(self.named, value), key=repr)
        if isinstance(value, slice | torch.dtype | torch.device):
            return repr(value)
        if isinstance(value, torch.nn.Module):
            return [type(value).__qualname__, self.named(value.state_dict())]
        if isinstance(value, np.ndarray | np.generic) and value.dtype.hasobject:
            return self.named(value.tolist())
        if isinstance(value, torch.Tensor) and not value.is_meta:
            plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return [str(value.dtype), tuple(value.shape), hashlib.sha256(plain.numpy().tobytes()).hexdigest()]
        if isinstance(value, ModuleType):
            return value.__name__
        if isinstance(value, type):
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, FunctionType | MethodType | functools.partial):
            return self.function(value)
        if isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, ModuleType | type | None):
            return f"{value.__module__}.{value.__qualname__}"
        if hasattr(value, "tobytes"):
            # Arrays of NumPy, and images.
            kind, size = getattr(value, "dtype", type(value).__qualname__), getattr(value, "shape", getattr(value, "size", ""))
            return [str(kind), size, hashlib.sha256(value.tobytes()).hexdigest()]
        self.unknown.append(type(value).__qualname__)
        return type(value).__qualname__


def _closure(function: FunctionType) -> list[Any]:
    """Values of a function's closure; variables that are not set yet are left out."""
    values = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            values.append(cell.cell_contents)
    return values


def _globals(function: FunctionType) -> dict[str, Any]:
    """Global values that a function reads. Functions of its own module are left out: `digest_of_code` covers them."""
    read = {
        step.argval
        for code in codes_in(function.__code__)
        for step in dis.get_instructions(code)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    found = {name: function.__globals__[name] for name in read if name in function.__globals__}
    return {
        name: value
        for name, value in found.items()
        if not (isinstance(value, FunctionType) and value.__module__ == function.__module__)
    }
