"""The page of a report."""

from __future__ import annotations

import re
from html import unescape
from urllib.parse import unquote

import numpy as np
import pytest
import torch
from plotly.offline import get_plotlyjs

import tl_layersim as lsim
from tl_layersim.core import LayerCurve

from ..inputs.views import provenance
from ..models.tiny_models import random_tokens, tiny_llama
from . import html_pages


@pytest.fixture(scope="module")
def report():
    return lsim.analyze(tiny_llama(), random_tokens(), [lsim.Cosine(), lsim.CKA(minibatch=16)])


@pytest.fixture(scope="module")
def path(report, tmp_path_factory):
    return report.to_html(tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture(scope="module")
def page(path):
    return path.read_text()


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_report_is_a_mapping_with_a_page(report, page):
    assert list(report) == ["cosine", "cka"]
    assert "COS(embedding, last)" in repr(report)
    with pytest.raises(KeyError, match="it has cosine, cka"):
        report["lens"]
    assert report["cka"].provenance.data in page
    assert page.count("4 sites: blocks.0.hook_resid_pre, blocks.0.hook_resid_post to blocks.2.hook_resid_post") == 2
    # One file and no network: nothing is loaded from anywhere.
    assert 'src="http' not in page
    assert '<link rel="stylesheet"' not in page


def test_model_names_do_not_run_as_code(tmp_path):
    nasty = LayerCurve(values=torch.zeros(1, dtype=torch.float64), layers=("a",), provenance=provenance(model="<script>x"))
    page = lsim.Report({"a": nasty}).to_html(tmp_path / "r.html").read_text()
    assert "<script>x" not in page
    assert "&lt;script&gt;x" in page


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_the_page_names_the_sites_of_both_models(tmp_path):
    a, b = tiny_llama(), tiny_llama(layers=2, seed=1)
    found = lsim.compare(a, b, random_tokens(), [lsim.CKA(minibatch=16)], at="mlp_out")
    page = found.to_html(tmp_path / "r.html").read_text()
    assert "3 sites: blocks.0.hook_mlp_out to blocks.2.hook_mlp_out; second model: 2 sites: blocks.0.hook_mlp_out to" in page
    one = lsim.analyze(a, random_tokens(), [lsim.CKA(minibatch=16)], at=["model.layers.1.mlp.up_proj", "blocks.0.hook_mlp_out"])
    page = one.to_html(tmp_path / "r.html").read_text()
    assert "Measured at 2 sites: model.layers.1.mlp.up_proj, blocks.0.hook_mlp_out." in page
    assert "Relations between sites of the model" in page
    # One site has no pairs of sites, and no headline numbers.
    alone = lsim.analyze(a, random_tokens(), "cosine", at="blocks.0.hook_mlp_out").to_html(tmp_path / "r.html").read_text()
    assert "Headline numbers" in page
    assert "Headline numbers" not in alone


def test_a_page_has_its_figures_and_plotly(report, path, page):
    assert path.stat().st_size < 6e6
    figures = html_pages.figures(page)
    # The figure of the first finding is in the summary and in its section.
    assert len(figures) == sum(len(result.pictures) for result in report.values()) == page.count('data-figure="') - 1
    assert 'data-figure="0"' in page.split('id="numbers"')[0]
    np.testing.assert_array_equal(figures[0]["data"][0]["z"], report["cosine"].values)
    assert get_plotlyjs() in page


def test_links_of_a_page_lead_to_its_sections(page):
    targets = set(re.findall(r'id="([^"]+)"', page))
    links = re.findall(r'href="#([^"]+)"', page)
    assert {"summary", "numbers", "cosine", "cka"} <= set(links) <= targets
    assert "<title>Layers of " in page


def test_the_record_of_a_run_is_folded(report, page):
    folded = page.split('<details class="provenance">')[2].split("</details>")[0]
    run = report["cka"].provenance
    for name, value in ("minibatch", "16"), ("torch", run.versions["torch"]), ("Data (SHA-256)", run.data):
        assert re.search(rf'<th scope="row">{re.escape(name)}</th><td><code>{re.escape(value)}</code></td>', folded), name


def test_the_table_of_a_figure_has_a_line_for_each_block(report, page):
    ratio = report["cosine"].norm_ratio
    for block, value in enumerate(ratio.tolist()):
        assert f'<td>block {block}</td><td class="number">{value:.4g}</td>' in page


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_two_models_stand_side_by_side(tmp_path):
    report = lsim.evaluate_layers(tiny_llama(), tiny_llama(seed=1), random_tokens(12, 9))
    page = report.to_html(tmp_path / "r.html").read_text()
    numbers = page.split('id="numbers"')[1].split("</table>")[0]
    before, after = report["layers"].perplexity[:, -1].tolist()
    assert re.findall(r'<th scope="col">([^<]*)</th>', numbers) == ["measure", "before", "after", "change"]
    cells = f'<td class="number">{before:.4g}</td><td class="number">{after:.4g}</td>'
    assert f"<td>perplexity of the last layer</td>{cells}" in numbers
    own = report["layers"].agreement
    assert f'<td>block 0</td><td class="number">{own[0, 0]:.4g}</td><td class="number">{own[1, 0]:.4g}</td>' in page


def test_a_report_without_results_is_a_page(tmp_path):
    page = lsim.Report({}).to_html(tmp_path / "r.html").read_text()
    assert "Layers of no model" in page
    assert 'data-figure="' not in page
    assert len(page) < 20_000


def test_hostile_names_stay_text(tmp_path):
    name = '"><img src=x onerror=alert(1)></script><script>x</script>'
    nasty = LayerCurve(values=torch.zeros(2, dtype=torch.float64), layers=("a", name), provenance=provenance(model=name))
    page = lsim.Report({name.replace("/", ""): nasty}).to_html(tmp_path / "r.html").read_text()
    own = page.replace(get_plotlyjs(), "")
    assert "<img" not in own
    assert "<script>x" not in own
    assert own.count("</script>") == 3


@pytest.mark.heavy("seconds, where faster tests reach the same")
@html_pages.needs_chromium
def test_a_browser_draws_every_figure_without_a_network(report, tmp_path):
    found = html_pages.drawn(report.to_html(tmp_path / "r.html"), tmp_path / "profile")
    assert found.count('data-drawn="light"') == len(re.findall(' data-figure="', found)) > 5
    # Every heading of a table sorts, and every title of a figure is there.
    assert found.count('<button type="button">') == len(re.findall('<th scope="col">', found))


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_results_named_as_parts_of_the_page_leave_it_whole(report, tmp_path):
    """The script finds the packed figures by the name of their element."""
    named = lsim.Report(dict.fromkeys(("figures", "summary", "numbers", "a b"), report["cka"]))
    page = named.to_html(tmp_path / "r.html").read_text()
    names = re.findall(r'\sid="([^"]*)"', page)
    assert len(names) == len(set(names))
    links = {unquote(link) for link in re.findall(r'href="#([^"]*)"', page)}
    assert links | {"figures"} == set(names)
    assert len(html_pages.figures(page)) == 4 * len(report["cka"].pictures)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_warnings_of_a_run_are_on_the_page_and_in_the_file(tmp_path):
    with pytest.warns(lsim.LayersimWarning, match="'cosine', 'logit_lens'"):
        report = lsim.analyze(tiny_llama(), lsim.Data(random_tokens(3), batch_size=1), ["cosine", "logit_lens"], intervals=True)
    texts = [text for text in report["cosine"].provenance.warnings if "'cosine', 'logit_lens'" in text]
    again = lsim.load(report.save(tmp_path / "r.safetensors"))
    page = unescape(again.to_html(tmp_path / "r.html").read_text())
    assert texts
    for text in texts:
        assert text in again["logit_lens"].provenance.warnings
        assert page.count(text) == 1
        assert f"<b>Warning (cosine, logit_lens).</b> {text}" in page
    quiet = lsim.analyze(tiny_llama(), random_tokens(3), "cosine")
    assert quiet["cosine"].provenance.warnings == ()
    assert 'class="warning"' not in quiet.to_html(tmp_path / "quiet.html").read_text()


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_lens_is_measured_where_it_has_numbers(tmp_path):
    page = lsim.analyze(tiny_llama(), random_tokens(), ["logit_lens"]).to_html(tmp_path / "r.html").read_text()
    assert "Measured at 3 sites: blocks.0.hook_resid_post to blocks.2.hook_resid_post." in page
