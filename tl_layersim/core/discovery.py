"""Discovery of extension classes: the subclasses of a base class in the modules of one package."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def discovered(package: str, path: Iterable[str], base: type[T]) -> dict[str, type[T]]:
    """The concrete subclasses of `base` that the modules of a package define, by their class attribute `name`.

    Args:
        package: dotted name of the package.
        path: its `__path__`.
        base: the abstract base class.
    """
    classes: dict[str, type[T]] = {}
    for info in pkgutil.iter_modules(path):
        module = importlib.import_module(f"{package}.{info.name}")
        cls: Any
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if issubclass(cls, base) and cls.__module__ == module.__name__ and not inspect.isabstract(cls):
                classes[cls.name] = cls
    return classes
