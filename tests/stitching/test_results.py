"""Results of a stitch: files, tables, plots."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from ..tiny_models import tiny_llama
from .helpers import rows


class TestResult:
    @pytest.fixture(scope="class")
    def found(self):
        return lsim.stitch(
            tiny_llama(),
            tiny_llama(seed=1),
            rows(),
            at=(2, 1),
            fit="lstsq+sgd",
            batch_size=4,
            training=lsim.StitchTraining(steps=60, warmup=5),
        )

    def test_comes_back_from_a_file(self, found, tmp_path):
        again = lsim.load(found.save(tmp_path / "stitch.safetensors"))
        assert again.penalty == found.penalty
        assert again.penalty_interval(0.9) == found.penalty_interval(0.9)
        assert torch.equal(again.adapter.weight, found.adapter.weight)
        assert again.provenance == found.provenance
        with pytest.raises(lsim.LayersimError, match="not at hand"):
            _ = again.model
        tokens = rows(3, 8)
        joined = lsim.stitch(tiny_llama(), tiny_llama(seed=1), tokens, at=(2, 1), adapter=again.adapter)
        with torch.no_grad():
            assert torch.equal(joined.model(tokens).logits, found.model(tokens).logits)

    def test_tables_and_plots(self, found):
        table = found.to_frame()
        assert list(table.columns) == ["step", "curve"]
        assert len(table) == 60
        batches = found.to_frame("batch_loss")
        assert {"batch", "batch_tokens", "batch_back_loss"} <= set(batches.columns)
        names = [trace.name for trace in found.plot().data]
        assert names[:2] == ["each step", "mean of 15 steps"]
        assert f"back alone, held-out: {found.back_loss:.3f}" in names
        each = found.plot("penalty").data[0].y
        np.testing.assert_allclose(each, (found.batch_loss - found.batch_back_loss) / found.batch_tokens)
        plain = lsim.stitch(tiny_llama(), tiny_llama(seed=1), rows(), at=(2, 1), adapter="identity")
        assert plain.plot().layout.title.text == "Penalty by batch"
        assert "nats a token" in plain.plot().layout.yaxis.title.text
        assert len(found.plot("batch_loss").data) == 1
        assert "penalty, nats" in repr(found)

    def test_what_is_recorded(self, found):
        options = found.provenance.options
        assert options["at"] == ["blocks.1.hook_resid_post", "blocks.0.hook_resid_post"]
        assert options["training"]["steps"] == 60
        assert options["fit_batches"] == 5
        assert found.provenance.tokens == int(found.batch_tokens.sum())
        assert found.provenance.seed == 0

    def test_in_a_report(self, found, tmp_path):
        page = lsim.Report({"stitch": found}).to_html(tmp_path / "page.html").read_text()
        assert "Learning curve of the adapter" in page
