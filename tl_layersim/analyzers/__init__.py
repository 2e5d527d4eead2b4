"""Every analyzer: one file each, found by looking; installed packages may add more by entry point."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from importlib.metadata import entry_points

from ..core.typed import typed
from .base import Analyzer, Exchange, Run, need_head, need_tokens

__all__ = ["Analyzer", "Exchange", "Run", "find_analyzers", "need_head", "need_tokens"]

GROUP = "tl_layersim.analyzers"


@typed
def find_analyzers() -> dict[str, type[Analyzer]]:
    """All analyzers by name: those of this folder, then those that installed packages offer as `tl_layersim.analyzers`.

    >>> sorted(find_analyzers())[:2]
    ['block_coupling', 'cka']
    """
    found: dict[str, type[Analyzer]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if issubclass(cls, Analyzer) and cls.__module__ == module.__name__ and not inspect.isabstract(cls):
                found[cls.name] = cls
    for entry in entry_points(group=GROUP):
        try:
            cls = entry.load()
        except Exception as error:  # anything may be wrong in another package, and none of it is a reason to fail here
            warnings.warn(f"The analyzer {entry.name!r} of {entry.value!r} could not be loaded: {error}", stacklevel=2)
            continue
        found.setdefault(cls.name, cls)
    return found
