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

    Raises:
        TypeError: a class has no name, or two classes have the same.
    """
    classes: dict[str, type[T]] = {}
    for info in pkgutil.iter_modules(path):
        module = importlib.import_module(f"{package}.{info.name}")
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if issubclass(cls, base) and cls.__module__ == module.__name__ and not inspect.isabstract(cls):
                name = getattr(cls, "name", None)
                if not isinstance(name, str) or name in classes:
                    needs = "needs a class attribute `name` of its own"
                    raise TypeError(f"{cls.__qualname__} of {module.__name__} {needs}, not {name!r}.")
                classes[name] = cls
    return classes
