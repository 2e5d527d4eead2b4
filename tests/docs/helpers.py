"""The pages, and the code on them."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def blocks(page: Path) -> list[str]:
    # Indented blocks show other ways to load a model, from a hub.
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def outputs(page: str) -> list[dict]:
    """The code cells of an executed page with their outputs: of the build of the site, or of a run here.

    Args:
        page: name of a file in docs/.
    """
    for library in ("mkdocs", "nbclient", "ipykernel"):
        pytest.importorskip(library, reason="make docs executes the pages and runs this test")
    hook = executed_pages()
    return hook.executed_cells(page, hook.cells((ROOT / "docs" / page).read_text()), server=False)


def warnings_of(cells: list[dict], explained: str) -> list[str]:
    """Lines of warnings below cells, without those that match a pattern; a kernel has no widgets, which tqdm says."""
    streams = [output["text"] for cell in cells for output in cell["outputs"] if output.get("name") == "stderr"]
    lines = [line for text in streams for line in text.splitlines() if re.search(r"\b\w*Warning: ", line)]
    return [line for line in lines if not re.search(f"TqdmWarning|{explained}", line)]


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
