"""Kinds of results: the names of result classes in files, which do not change when a class or its module is renamed."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

PACKAGE = __name__.partition(".")[0]
# Later packages whose modules define results.
DEFINE_RESULTS = ("analysis", "stitching", "training")


def kind_of(cls: type[Any]) -> str:
    """The name of a result class in files: its own `file_kind`, or module and name for a class without."""
    return str(vars(cls).get("file_kind") or f"{cls.__module__}:{cls.__qualname__}")


def class_of(kind: str, base: type[Any]) -> type[Any] | None:
    """The result class of a kind; None if no imported module defines it. A class is never imported because a file names it.

    Args:
        kind: as `kind_of` returns it.
        base: the base class of all results.
    """
    found = _imported(kind, base)
    if found is None:
        _import_all()
        found = _imported(kind, base)
    return found


def _imported(kind: str, base: type[Any]) -> type[Any] | None:
    found = [cls for cls in below(base) if kind_of(cls) == kind]
    # A cell of a notebook that ran twice defines a class twice; the last one counts. Classes of this package come first.
    own = [cls for cls in found if cls.__module__.startswith(f"{PACKAGE}.")]
    return next(iter([*own, *found[::-1]]), None)


def _import_all() -> None:
    """Import every module that may define a result: of this package, and the analyzers that installed packages declare."""
    importlib.import_module(f"{PACKAGE}.analyzers").find_analyzers()
    for name in DEFINE_RESULTS:
        package = importlib.import_module(f"{PACKAGE}.{name}")
        for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(info.name)


def below(cls: type[Any]) -> Iterator[type[Any]]:
    """All imported subclasses, direct and indirect."""
    for sub in cls.__subclasses__():
        yield sub
        yield from below(sub)
