"""Discovery of the classes that the modules of a package define, so that an extension is one new file."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def discovered(package: str, path: Iterable[str], base: type[T]) -> dict[str, type[T]]:
    """The concrete subclasses of a class that the modules of a package define, by their class attribute `name`.

    Args:
        package: dotted name of the package.
        path: its `__path__`.
        base: their abstract class, which has a class attribute `name`.
    """
    classes: dict[str, type[T]] = {}
    for info in pkgutil.iter_modules(path):
        module = importlib.import_module(f"{package}.{info.name}")
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if issubclass(cls, base) and cls.__module__ == module.__name__ and not inspect.isabstract(cls):
                classes[cls.name] = cls  # type: ignore[attr-defined]  # every base of an extension has a name
    return classes
