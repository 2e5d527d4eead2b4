"""Every Python block of the README and the docs runs, page by page, top to bottom, each page once: in the build or here."""

from __future__ import annotations

import linecache
import math
import re
import sys
import types

import pytest

import tl_layersim as lsim

from .helpers import ROOT, blocks, outputs, warnings_of
from .pictures import BLOCKS_ALONE, TIMES
from .tables import pictures_of_tables, read_csv

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Of these pages the build of the site shows the outputs; test_gallery.py has the gallery.
EXECUTED = [page for page in PAGES if page.read_text().startswith("---\nexecuted: true\n") and page.name != "gallery.md"]
# Code that asks a server, which tests/remote and tests/ndif have.
OTHERS = [page for page in PAGES if blocks(page) and page not in EXECUTED and page.name not in ("ndif.md", "gallery.md")]
# Empty cells of the tables that are drawn: CKA before the first block, the cosine's null, windows that do not fit.
EMPTY = {
    ("clip", "CKA"): 1,
    ("measures", "random pairing of rows, block 3"): 1,
    ("paths", "line-shape score of 4 blocks"): 3,
}
# Warnings that a page explains; intervals.md explains those of intervals.
EXPLAINED = {
    "hook_points.md": "few tokens decide these numbers",
    "probes.md": "LinearProbe is evaluated on 11 held-out texts",
}
# What is counted for 80 layers is counted for 8 in a tenth of the time.
LAYERS_OF_70B = '"num_hidden_layers": 80', '"num_hidden_layers": 8'


@pytest.mark.heavy("executed documentation")
@pytest.mark.parametrize("page", EXECUTED, ids=lambda p: p.name)
def test_an_executed_page_runs_and_explains_its_warnings(page):
    cells = outputs(page.name)
    assert len(cells) >= len(blocks(page)) > 0
    assert warnings_of(cells, EXPLAINED.get(page.name, "Intervals of")) == []


@pytest.mark.heavy("executed documentation")
@pytest.mark.parametrize("page", OTHERS, ids=lambda p: p.name)
def test_code_on_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # The code is what is tested here, on every sixth text: numbers on the pages are of all texts.
    texts = lsim.demo_text()[::6]
    monkeypatch.setattr(lsim, "demo_text", lambda: texts)
    # Dataclasses look their module up by name.
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    for number, block in enumerate(blocks(page)):
        name = f"{page.name}[{number}]"
        code = block.replace(*LAYERS_OF_70B)
        # nnsight reads the body of a trace from there.
        monkeypatch.setitem(linecache.cache, name, (len(code), None, code.splitlines(keepends=True), name))
        exec(compile(code, name, "exec"), vars(module))


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
