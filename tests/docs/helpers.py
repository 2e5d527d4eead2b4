"""The pages, and the code on them."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def blocks(page: Path) -> list[str]:
    # Indented blocks show other ways to load a model, from a hub.
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@functools.cache
def hook(name: str) -> ModuleType:
    """A module of docs/hooks/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/hooks/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def executed_pages() -> ModuleType:
    """The hook of mkdocs that executes pages."""
    return hook("executed_pages")
