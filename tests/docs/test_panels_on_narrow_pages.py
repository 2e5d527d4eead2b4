"""Figures on pages of the documentation: panels side by side where there is room, else in one column; titles in more lines."""

from __future__ import annotations

import json
from pathlib import Path

import plotly.express
import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs

import tl_layersim as lsim

from ..models.tiny_models import random_tokens, tiny_llama
from .helpers import ROOT, executed_pages

# Left, right, top and bottom of each element of a kind, beside the left upper corner of the figure.
BOXES = """
(async () => {{
  const figure = document.querySelector(".executed-figure");
  for (let n = 0; n < 100 && !figure.querySelector(".main-svg"); n++) await new Promise((done) => setTimeout(done, 50));
  await new Promise((done) => setTimeout(done, 200));
  const own = figure.getBoundingClientRect();
  return [...figure.querySelectorAll("{}")].map((one) => {{
    const box = one.getBoundingClientRect();
    return [box.left - own.left, box.right - own.left, box.top - own.top, box.bottom - own.top].map(Math.round);
  }});
}})()
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    report = lsim.analyze(tiny_llama(), random_tokens(), [lsim.Cosine(), lsim.CKA(minibatch=16), lsim.LogitLens()])
    return written(tmp_path_factory.mktemp("page"), report.plot())


def written(folder: Path, *figures: go.Figure) -> Path:
    """A page with figures as the hook of mkdocs writes them."""
    figure = "".join(executed_pages()._figure_html(json.loads(figure.to_json())) for figure in figures)
    (folder / "plotly.js").write_text(get_plotlyjs(), encoding="utf-8")
    (folder / "figures.js").write_text((ROOT / "docs/javascripts/figures.js").read_text(encoding="utf-8"), encoding="utf-8")
    style = (ROOT / "docs/stylesheets/figures.css").read_text(encoding="utf-8")
    scripts = "".join(f'<script defer src="{name}.js"></script>' for name in ("plotly", "figures"))
    path = folder / "page.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><style>{style}</style><body>{figure}{scripts}", encoding="utf-8")
    return path


@pytest.mark.parametrize(("width", "columns"), [(1200, 2), (600, 1), (400, 1)])
def test_panels_are_beside_or_below_one_another_and_none_is_cut(page, browser, width, columns):
    browser.look(width)
    browser.open(page.as_uri())
    plots = browser.evaluate(BOXES.format(".bglayer .bg, .plot"))
    titles = browser.evaluate(BOXES.format(".annotation"))
    bars = browser.evaluate(BOXES.format(".cbfills"))
    assert len(titles) == 3
    assert len(bars) == 2
    assert len({round(left, -2) for left, *_ in titles}) == columns
    assert len({top for _, _, top, _ in titles}) == (2 if columns == 2 else 3)
    assert all(right <= width for _, right, _, _ in (*plots, *titles, *bars))
    # Every colour bar is beside its heat map: below the title of its own panel, and above that of the next.
    for (_, _, top, bottom), (_, _, _, above) in zip(bars, titles[:2], strict=True):
        assert above < top < bottom
    if columns == 1:
        assert bars[0][3] < titles[1][2] < bars[1][2]
        assert bars[1][3] < titles[2][2]


def test_titles_are_broken_anew_and_figures_without_titles_are_drawn(tmp_path, browser):
    result = lsim.analyze(tiny_llama(), random_tokens(), lsim.Cosine())["cosine"]
    long = result.plot(title="Words that fill one line of a figure and two lines of a telephone")
    page = written(tmp_path, long, plotly.express.scatter(y=[1, 2]))
    tops = {}
    for width in (900, 380):
        browser.look(width)
        browser.open(page.as_uri())
        [title] = browser.evaluate(BOXES.format(".gtitle"))
        [subtitle] = browser.evaluate(BOXES.format(".gtitle-subtitle"))
        plots = browser.evaluate(BOXES.format(".bglayer .bg, .plot"))
        assert max(title[1], subtitle[1]) <= width
        tops[width] = title[3] - title[2]
        assert title[3] <= subtitle[2] + 6
        assert subtitle[3] <= min(top for _, _, top, _ in plots) + 6
        assert browser.evaluate('document.querySelectorAll(".executed-figure__plot .main-svg").length') >= 4
    assert tops[380] > 1.5 * tops[900]
