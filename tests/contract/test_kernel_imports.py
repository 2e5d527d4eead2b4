"""Kernels use torch, einops and the standard library alone: an NDIF server has no more, and gets their source by value."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType

import tl_layersim.analyzers

PACKAGE = "tl_layersim"
ALLOWED = {PACKAGE, "torch", "einops", "builtins", *sys.stdlib_module_names}


def names_in(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(names_in(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def reached(function: FunctionType, seen: dict[int, FunctionType]) -> None:
    """Adds a function, and all functions and methods of the package that it calls, to `seen`."""
    if id(function) in seen:
        return
    seen[id(function)] = function
    for value in globals_of(function):
        for one in [value] if isinstance(value, FunctionType) else vars(value).values() if isinstance(value, type) else ():
            if isinstance(one, FunctionType) and one.__module__.startswith(PACKAGE):
                reached(one, seen)


def globals_of(function: FunctionType) -> Iterator[object]:
    return (function.__globals__[name] for name in names_in(function.__code__) if name in function.__globals__)


def test_kernels_use_torch_alone():
    modules = [
        importlib.import_module(f"{tl_layersim.analyzers.__name__}.{found.name}")
        for found in pkgutil.iter_modules(tl_layersim.analyzers.__path__)
    ]
    kernels = {name: value for module in modules for name, value in vars(module).items() if name.endswith("_kernel")}
    kernels |= {
        name: vars(module)[name] for module in modules for name in ("pool_sums", "exchanged_sums") if hasattr(module, name)
    }
    assert {"cosine_kernel", "exact_kernel", "lens_kernel", "pool_sums"} <= set(kernels)
    seen: dict[int, FunctionType] = {}
    for kernel in kernels.values():
        reached(kernel, seen)
    assert len(seen) > 100
    for function in seen.values():
        for value in globals_of(function):
            module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or "builtins"
            assert module.split(".")[0] in ALLOWED, f"{function.__module__}.{function.__qualname__} uses {module}"
