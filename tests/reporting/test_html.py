"""The page of a report."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core import LayerCurve

from ..tiny_models import random_tokens, tiny_llama
from ..views import provenance


@pytest.fixture(scope="module")
def report():
    return lsim.analyze(tiny_llama(), random_tokens(), [lsim.Cosine(), lsim.CKA(minibatch=16)])


def test_a_report_is_a_mapping_with_a_page(report, tmp_path):
    assert list(report) == ["cosine", "cka"]
    assert "COS(embedding, last)" in repr(report)
    with pytest.raises(KeyError, match="it has cosine, cka"):
        report["lens"]
    page = report.to_html(tmp_path / "report.html").read_text()
    for part in ("Theorem 2.1", "figure 11", "Nguyen", "data", report["cka"].provenance.data):
        assert part in page
    assert page.count("Measured at 4 sites: blocks.0.hook_resid_pre to blocks.2.hook_resid_post.") == 2
    assert "Relations between the layers of the residual stream" in page
    # One file and no network: nothing is loaded from anywhere.
    assert 'src="http' not in page
    assert '<link rel="stylesheet"' not in page


def test_model_names_do_not_run_as_code(tmp_path):
    nasty = LayerCurve(values=torch.zeros(1, dtype=torch.float64), layers=("a",), provenance=provenance(model="<script>x"))
    page = lsim.Report({"a": nasty}).to_html(tmp_path / "r.html").read_text()
    assert "<script>x" not in page
    assert "&lt;script&gt;x" in page


def test_the_page_names_the_sites_of_both_models(tmp_path):
    a, b = tiny_llama(), tiny_llama(layers=2, seed=1)
    found = lsim.compare(a, b, random_tokens(), [lsim.CKA(minibatch=16)], at="mlp_out")
    page = found.to_html(tmp_path / "r.html").read_text()
    assert "3 sites: blocks.0.hook_mlp_out to blocks.2.hook_mlp_out; second model: 2 sites: blocks.0.hook_mlp_out to" in page
    one = lsim.analyze(a, random_tokens(), [lsim.CKA(minibatch=16)], at=["model.layers.1.mlp.up_proj", "blocks.0.hook_mlp_out"])
    page = one.to_html(tmp_path / "r.html").read_text()
    assert "Measured at 2 sites: model.layers.1.mlp.up_proj, blocks.0.hook_mlp_out." in page
    assert "Relations between sites of the model" in page
