"""tl_layersim: how do a transformer's layers relate to each other, and to another model's layers?

Importing this package imports nothing else: every name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import analyze, compare
    from .analyzer import Analyzer, Run
    from .analyzers import find_analyzers
    from .analyzers.cka import CKA, CKAResult
    from .analyzers.cosine import Cosine, CosineResult
    from .data import Batch
    from .demo import demo_model, demo_text
    from .errors import LayersimError
    from .probe import Probe, attach
    from .results import LayerCurve, LayerMatrix, Picture, Provenance, Report, Result, axes, load, load_report
    from .source import Kernel, Model, Source, View
    from .sums import Sums

_HOME = {
    "engine": ("analyze", "compare"),
    "analyzer": ("Analyzer", "Run"),
    "analyzers": ("find_analyzers",),
    "data": ("Batch",),
    "demo": ("demo_model", "demo_text"),
    "errors": ("LayersimError",),
    "probe": ("Probe", "attach"),
    "results": ("LayerCurve", "LayerMatrix", "Picture", "Provenance", "Report", "Result", "axes", "load", "load_report"),
    "source": ("Kernel", "Model", "Source", "View"),
    "sums": ("Sums",),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__version__ = "0.1.0"
__all__ = [
    "CKA",
    "Analyzer",
    "Batch",
    "CKAResult",
    "Cosine",
    "CosineResult",
    "Kernel",
    "LayerCurve",
    "LayerMatrix",
    "LayersimError",
    "Model",
    "Picture",
    "Probe",
    "Provenance",
    "Report",
    "Result",
    "Run",
    "Source",
    "Sums",
    "View",
    "analyze",
    "attach",
    "axes",
    "compare",
    "demo_model",
    "demo_text",
    "find_analyzers",
    "load",
    "load_report",
]


def __getattr__(name: str) -> Any:
    if not name[0].isalpha():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _MODULE:
        value = getattr(importlib.import_module(f".{_MODULE[name]}", __name__), name)
        if _MODULE[name] == "results":
            # A file of results can only be read where the classes of results are known.
            importlib.import_module(".analyzers", __name__).find_analyzers()
    else:
        value = _from_analyzers(name)
    globals()[name] = value
    return value


def _from_analyzers(name: str) -> Any:
    """An analyzer, or the class of its results: a new file in `analyzers/` needs no line here."""
    for cls in importlib.import_module(".analyzers", __name__).find_analyzers().values():
        module = importlib.import_module(cls.__module__)
        if hasattr(module, name) and getattr(getattr(module, name), "__module__", None) == cls.__module__:
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})
