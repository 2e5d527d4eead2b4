"""Every Python block of the README and the docs runs, page by page, top to bottom."""

from __future__ import annotations

import linecache
import math
import re
import sys
import types
import warnings

import pytest

import tl_layersim as lsim

from .helpers import ROOT, blocks
from .pictures import BLOCKS_ALONE, TIMES
from .tables import pictures_of_tables, read_csv

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Code that asks a server, which tests/remote and tests/ndif have; and the gallery, of test_gallery.py.
ELSEWHERE = ("ndif.md", "gallery.md")
# Empty cells of the tables that are drawn: CKA before the first block, the cosine's null, windows that do not fit.
EMPTY = {
    ("clip", "CKA"): 1,
    ("measures", "random pairing of rows, block 3"): 1,
    ("paths", "line-shape score of 4 blocks"): 3,
}
# Warnings that a page explains.
EXPLAINED: dict[str, str] = dict.fromkeys(("quickstart.md", "hook_points.md"), "CKA is dominated by a few samples")
# Of a sixth of the texts there are few blocks.
EXPLAINED |= dict.fromkeys(("intervals.md", "fine_tunes.md"), "Intervals of .* rest on")
EXPLAINED["quickstart.md"] += "|Intervals of .* rest on"


@pytest.mark.heavy("executed documentation")
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p) and p.name not in ELSEWHERE], ids=lambda p: p.name)
def test_code_on_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # The code is what is tested here, on every sixth text: numbers on the pages are of all texts.
    texts = lsim.demo_text()[::6]
    monkeypatch.setattr(lsim, "demo_text", lambda: texts)
    # Dataclasses look their module up by name.
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    if page.name in EXPLAINED:
        warnings.filterwarnings("ignore", message=EXPLAINED[page.name], category=lsim.LayersimWarning)
    for number, block in enumerate(blocks(page)):
        name = f"{page.name}[{number}]"
        # nnsight reads the body of a trace from there.
        monkeypatch.setitem(linecache.cache, name, (len(block), None, block.splitlines(keepends=True), name))
        exec(compile(block, name, "exec"), vars(module))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        # docs/hooks/command_reference.py makes this page.
        if not target.startswith("http") and target != "api/cli.md":
            assert (page.parent / target).exists(), target


def test_every_error_that_is_explained_is_raised():
    """A heading of docs/errors.md quotes a message; what it quotes must stand in the code."""
    code = "\n".join(path.read_text() for path in (ROOT / "tl_layersim").rglob("*.py"))
    for quoted in re.findall(r'^### "(.*?)"', (ROOT / "docs/errors.md").read_text(), re.MULTILINE):
        parts = [part.strip() for part in quoted.split("...") if len(part.strip()) > 8]
        assert parts
        assert all(part.split("Cosine")[-1].strip() in code for part in parts), quoted


def test_the_readme_cites_what_the_citation_file_says():
    citation = (ROOT / "CITATION.cff").read_text()
    bibtex = (ROOT / "README.md").read_text().split("```bibtex")[1]
    for field in ("title", "version", "license"):
        [value] = re.findall(rf'^{field}: "?(.*?)"?$', citation, re.MULTILINE)
        assert f"{field} = {{{value}}}" in bibtex


def test_the_chart_of_performance_has_its_rows_in_the_table():
    table = read_csv("one_pass")
    seconds = dict(zip(table.labels, table.column("seconds").values, strict=True))
    assert {*TIMES, BLOCKS_ALONE} <= set(seconds)


@pytest.mark.heavy("every picture of the documentation")
def test_pictures_of_tables_draw_every_number():
    for name, picture in pictures_of_tables().items():
        assert (ROOT / "docs/images" / f"{name}.png").exists()
        for figure, _ in picture.figures:
            drawn = [trace for trace in figure.data if trace.showlegend is not False]
            assert drawn
            for trace in drawn:
                missing = sum(not math.isfinite(value) for value in trace.y)
                assert missing <= EMPTY.get((name, trace.name), 0), (name, trace.name)
