"""A record of the figures that the code of a page draws: fields of classes, and functions. The gallery shall draw all of them.

The kernel that executes the page runs `start` before its cells and `print_drawn` after them; no page shows either.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import sys
from typing import Any

import tl_layersim as lsim
from tests.structure.public_names import public_names
from tl_layersim.core import Result
from tl_layersim.core.result_declarations import declarations

_fields: set[tuple[str, str]] = set()
_functions: set[str] = set()


def classes_with_figures() -> dict[type, set[str]]:
    """Every class of the package that draws, with the fields of its pictures; "" is any figure of a class without pictures."""
    for module in pkgutil.walk_packages(lsim.__path__, "tl_layersim."):
        if "demo.make" not in module.name:
            importlib.import_module(module.name)
    drawing: dict[type, set[str]] = {}
    for name, module in list(sys.modules.items()):
        for cls in vars(module).values() if name.startswith("tl_layersim") and module else ():
            if inspect.isclass(cls) and cls.__module__.startswith("tl_layersim") and hasattr(cls, "plot"):
                fields = _pictures_of(cls)
                # Bases of several results have neither pictures nor a figure of their own, or hand theirs to subclasses.
                if not _subclasses(cls) and (fields or "plot" in vars(cls)):
                    drawing[cls] = fields or {""}
    return drawing


def functions_with_figures() -> set[str]:
    """Names of the public functions that return a figure."""
    return {
        name
        for name, function in public_names().items()
        if inspect.isfunction(function) and "Figure" in str(inspect.signature(function).return_annotation)
    }


def path_of(cls: type) -> str:
    """Module and name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def start() -> None:
    """Note each figure that is drawn from now on."""
    for cls in {base for drawing in classes_with_figures() for base in drawing.__mro__ if "plot" in vars(base)} | {Result}:
        cls.plot = _noting_fields(cls.plot)
    for name in functions_with_figures():
        package, _, function = f"tl_layersim.{name}".rpartition(".")
        owner = importlib.import_module(package)
        setattr(owner, function, _noting_name(getattr(owner, function), name))


def print_drawn() -> None:
    """Print what was drawn, as JSON."""
    print(json.dumps({"fields": sorted(_fields), "functions": sorted(_functions)}))


def _pictures_of(cls: type) -> set[str]:
    if not issubclass(cls, Result):
        return set()
    pictures = vars(cls).get("pictures")
    if isinstance(pictures, tuple):
        return {picture.name for picture in pictures}
    return {
        cls.values_name if name == "values" else name for name, declaration in declarations(cls).items() if declaration.caption
    }


def _subclasses(cls: type) -> set[type]:
    return {below for direct in cls.__subclasses__() for below in ({direct} | _subclasses(direct))}


def _noting_fields(plot: Any) -> Any:
    def plot_and_note(self: Any, *args: Any, **options: Any) -> Any:
        called = inspect.signature(plot).bind(self, *args, **options)
        called.apply_defaults()
        pictures = getattr(self, "pictures", ())
        field = called.arguments.get("field", "") or (pictures[0].name if pictures else "")
        # `plot()` draws the values under their own name.
        shown = getattr(self, "values_name", "") if field == "values" else field
        _fields.update((path_of(type(self)), name) for name in (field, shown, ""))
        return plot(self, *args, **options)

    return plot_and_note


def _noting_name(function: Any, name: str) -> Any:
    def call_and_note(*args: Any, **options: Any) -> Any:
        _functions.add(name)
        return function(*args, **options)

    return call_and_note
