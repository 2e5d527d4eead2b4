"""What mkdocs renders wrongly without a word: examples outside of their section, and tabs without their extension."""

from __future__ import annotations

import ast
import re

from .helpers import ROOT


def test_examples_stand_in_a_section_that_is_rendered_as_code():
    """Elsewhere `>>>` is a quotation in a quotation in a quotation."""
    outside = []
    for path in sorted((ROOT / "tl_layersim").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            section = ""
            for line in (ast.get_docstring(node) or "").splitlines():
                if line and not line.startswith(" "):
                    section = line
                if line.lstrip().startswith(">>>") and section != "Examples:":
                    outside.append(f"{path.relative_to(ROOT)}: {line.strip()}")
    assert outside == []


def test_tabs_have_their_extension():
    pages = [page for page in (ROOT / "docs").rglob("*.md") if re.search(r'^=== "', page.read_text(), re.MULTILINE)]
    assert pages
    assert "pymdownx.tabbed" in (ROOT / "mkdocs.yml").read_text()
