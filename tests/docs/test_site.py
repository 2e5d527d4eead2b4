"""The built site, read from disk by a browser: no network, search, colours, code that is not cut off; pages of the API."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import pytest
import yaml

from tl_layersim.analyzers import find_analyzers

from ..structure.public_names import public_names
from .helpers import ROOT

# The first test may build the site, which executes the gallery and the notebooks.
pytestmark = pytest.mark.timeout(3600)
# Code in tabs and in folded boxes is shown for the measurement.
CUT_LINES = """
(() => {
  const style = document.createElement("style");
  style.textContent = ".tabbed-block { display: block !important }";
  document.head.append(style);
  document.querySelectorAll("details").forEach(box => box.open = true);
  const longest = code => code.textContent.split("\\n").reduce((a, b) => a.length < b.length ? b : a);
  return [...document.querySelectorAll("pre > code")].filter(code => code.scrollWidth > code.clientWidth).map(longest);
})()
"""
SEARCH = """
new Promise(done => {
  const query = document.querySelector("[data-md-component=search-query]");
  document.querySelector("[data-md-toggle=search]").click();
  query.focus();
  query.value = "saturation";
  query.dispatchEvent(new Event("input", {bubbles: true}));
  query.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
  const look = left => {
    const found = [...document.querySelectorAll(".md-search-result__item a")].map(link => link.href);
    found.length || !left ? done(found) : setTimeout(() => look(left - 1), 100);
  };
  look(100);
})
"""


def pages(site: Path) -> list[Path]:
    found = sorted(path for path in site.rglob("*.html") if path.name != "404.html")
    assert len(found) > 30
    return found


@pytest.fixture(scope="session")
def cut_and_requests(site, browser):
    """All pages, opened once from disk at a width of 1,280 pixels: lines of code that are cut off, and requests."""
    browser.look(1280)
    browser.requests.clear()
    cut = {}
    for page in pages(site):
        browser.open(page.as_uri())
        if lines := browser.evaluate(CUT_LINES):
            cut[page.relative_to(site).as_posix()] = lines
    return cut, list(browser.requests)


def test_no_page_asks_the_network(site, cut_and_requests):
    requests = cut_and_requests[1]
    assert len(requests) > len(pages(site))
    assert [url for url in requests if not url.startswith((site.as_uri() + "/", "data:"))] == []


def test_no_line_of_code_is_cut_off(cut_and_requests):
    assert cut_and_requests[0] == {}


def test_a_long_line_would_be_noticed(site, browser):
    browser.look(1280)
    browser.open((site / "quickstart.html").as_uri())
    browser.evaluate('document.querySelector("pre > code").append("x".repeat(140)), 0')
    [line] = browser.evaluate(CUT_LINES)
    assert line.endswith("x" * 140)


def test_a_line_of_110_characters_fits_beside_the_table_of_contents(site, browser):
    browser.look(1280)
    browser.open((site / "quickstart.html").as_uri())
    browser.evaluate(f'document.querySelector("pre > code").textContent = "{"x" * 110}", 0')
    assert browser.evaluate(CUT_LINES) == []
    assert browser.evaluate('document.querySelector(".md-sidebar--secondary").offsetWidth') > 100


def test_pages_from_disk_are_searched(site, browser):
    browser.look(1280)
    browser.open((site / "index.html").as_uri())
    found = browser.evaluate(SEARCH)
    assert any("decide.html" in url for url in found), found
    assert all(url.startswith(site.as_uri()) for url in found)


@pytest.mark.parametrize(("dark", "scheme"), [(False, "default"), (True, "slate")])
def test_colours_follow_the_system_until_they_are_toggled(site, browser, dark, scheme):
    browser.look(1280, dark=dark)
    browser.open((site / "index.html").as_uri())
    assert browser.evaluate("document.body.dataset.mdColorScheme") == scheme
    browser.evaluate('document.querySelector("[for^=__palette]:not([hidden])").click()')
    assert browser.evaluate("document.body.dataset.mdColorScheme") == ("default" if dark else "slate")


def test_formulas_are_drawn_in_their_font(site, browser):
    browser.look(1280)
    browser.open((site / "api/similarity.html").as_uri())
    assert browser.evaluate('document.querySelectorAll("math").length') > 3
    assert browser.evaluate('document.fonts.ready.then(() => document.fonts.check("16px STIX Two Math", "x"))')
    for page in pages(site):
        text = re.sub(r"<(pre|code|script)\b.*?</\1>", "", page.read_text(), flags=re.DOTALL)
        assert not re.search(r"\\\(|\\\[|\\frac|\\sum|\$\$", text), page


def test_the_map_for_language_models_lists_every_page(site):
    text = (site / "llms.txt").read_text()
    title, summary = text.splitlines()[0], text.splitlines()[2]
    assert title == "# tl_layersim"
    assert summary.startswith("> ")
    links = dict(re.findall(r"^- \[[^\]]+\]\(([^)]+)\): (.+)$", text, re.MULTILINE))
    assert sorted([*links, "index.html"]) == sorted({page.relative_to(site).as_posix() for page in pages(site)})
    assert all(len(about) > 12 for about in links.values())
    full = (site / "llms-full.txt").read_text()
    assert all(f"\n# {re.search(r'<h1[^>]*>(.*?)<a', page.read_text())[1]}" for page in pages(site))
    assert full.count("\n```python\n") > 50


def test_every_public_name_stands_on_a_page_of_the_api():
    text = "\n".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    absent = [name for name in public_names() if not re.search(rf"^::: tl_layersim\.{name}$", text, re.MULTILINE)]
    assert absent == []


def test_headings_of_the_api_are_what_is_imported(site):
    """A heading is a path that can be imported, or the name alone of a class that calls return."""
    headings = []
    for page in sorted((site / "api").glob("*.html")):
        for heading in re.findall(
            r'<h[234] id="tl_layersim[^"]*" class="doc doc-heading">(.*?)</h[234]>', page.read_text(), re.DOTALL
        ):
            headings.append(unescape(re.sub(r"<[^>]+>|¶", "", heading)).strip().split()[0])
    public = {name.removeprefix("tl_layersim.") for name in headings if name.startswith("tl_layersim.")}
    assert set(public_names()) <= public
    assert not [name for name in headings if "_kernel" in name or "._" in name]
    for analyzer in find_analyzers().values():
        name = analyzer.__name__
        if analyzer.__module__.startswith("tl_layersim.") and f"{name}Result" in headings:
            assert headings.index(f"tl_layersim.{name}") < headings.index(f"{name}Result")


def test_signatures_are_broken_into_lines(site):
    for page in (site / "api").glob("*.html"):
        for signature in re.findall(r'<div class="doc-signature[^>]*>(.*?)</div>', page.read_text(), re.DOTALL):
            lines = unescape(re.sub(r"<[^>]+>", "", signature)).splitlines()
            assert max(map(len, lines), default=0) <= 100, (page.name, lines)


def test_a_description_of_two_lines_is_one_returned_value(site):
    """Each line was a value, and its first word the value's name."""
    text = (site / "api" / "run.html").read_text()
    returned = re.findall(r"Returns:.*?</table>", text, re.DOTALL)
    assert len(returned) > 3
    assert [table.count("<tr") for table in returned] == [2] * len(returned)


def test_see_name_leads_to_the_object(site):
    found = 0
    for page in sorted((site / "api").glob("*.html")):
        for target, anchor in re.findall(r'[Ss]ee <a href="([^"#]*)#([^"]+)"><code>', page.read_text()):
            assert f'id="{anchor}"' in (page.parent / (target or page.name)).read_text(), (page.name, anchor)
            found += 1
    assert found > 50


def test_the_search_index_is_beside_the_pages(site):
    script = (site / "search/search_index.js").read_text()
    index = json.loads(script.removeprefix("var __index = "))
    assert len(index["docs"]) > 200


def test_every_page_is_in_the_navigation():
    class Loader(yaml.SafeLoader):
        """YAML with the tags of mkdocs, which are not read here."""

    Loader.add_multi_constructor("!", lambda *_: None)
    nav = json.dumps(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"])
    for page in (ROOT / "docs").rglob("*.md"):
        assert f'"{page.relative_to(ROOT / "docs").as_posix()}"' in nav
