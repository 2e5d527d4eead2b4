"""Results of a stitch: files, tables, plots."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core import file_format

from ..models.tiny_models import tiny_llama
from .helpers import rows


class TestResult:
    @pytest.fixture(scope="class")
    def result(self):
        return lsim.stitch(
            tiny_llama(),
            tiny_llama(seed=1),
            lsim.Data(rows(), batch_size=4),
            at=(1, 0),
            fit="lstsq+sgd",
            training=lsim.stitching.StitchTraining(steps=60, warmup=5),
        )

    def test_comes_back_from_a_file(self, result, tmp_path):
        loaded = lsim.load(result.save(tmp_path / "stitch.safetensors"))
        assert loaded.penalty == result.penalty
        assert loaded.penalty_interval(0.9) == result.penalty_interval(0.9)
        assert torch.equal(loaded.adapter.weight, result.adapter.weight)
        assert loaded.provenance == result.provenance
        with pytest.raises(lsim.LayersimError, match="`model`"):
            _ = loaded.model
        tokens = rows(3, 8)
        joined = lsim.stitch(tiny_llama(), tiny_llama(seed=1), tokens, at=(1, 0), adapter=loaded.adapter)
        with torch.no_grad():
            assert torch.equal(joined.model(tokens).logits, result.model(tokens).logits)

    def test_the_models_are_joined_once_and_stay_out_of_files_and_text(self, result, tmp_path):
        assert result.model is result.model
        assert "join" not in repr(result)
        assert "join" not in {field.name for field in dataclasses.fields(result)}

        header, _ = file_format.read(result.save(tmp_path / "stitch.safetensors"), ("result",))
        assert "join" not in header["fields"]

    @pytest.mark.heavy("many figures")
    def test_tables_and_plots(self, result):
        table = result.to_frame()
        assert list(table.columns) == ["step", "curve"]
        assert len(table) == 60

        each_text = result.to_frame("text_loss")
        assert list(each_text.columns) == ["evaluation_text", "text_loss"]

        names = [trace.name for trace in result.plot().data]
        np.testing.assert_allclose(result.plot().data[0].y, result.curve)
        assert f"back alone, held-out: {result.back_loss:.3f}" in names
        assert all(f"{number:.4g}" in result.finding() for number in result.penalty_interval())

        [per_text] = [trace.y for trace in result.plot("penalty").data if trace.name == "each text"]
        np.testing.assert_allclose(per_text, (result.text_loss - result.text_back_loss) / result.text_tokens)

        plain = lsim.stitch(tiny_llama(), tiny_llama(seed=1), rows(), at=(1, 0), adapter="identity")
        assert [len(trace.y) for trace in plain.plot().data if trace.name == "each text"] == [len(plain.text_tokens)]
        assert "nats per token" in plain.plot().layout.yaxis.title.text
        assert len(result.plot("text_loss").data) == 1
        assert "penalty, nats" in repr(result)

    def test_what_is_recorded(self, result):
        options = result.provenance.options
        assert options["at"] == ["blocks.1.hook_resid_post", "blocks.0.hook_resid_post"]
        assert options["training"]["steps"] == 60
        assert options["fit_batches"] == 5
        assert result.provenance.tokens == int(result.text_tokens.sum())
        assert result.provenance.seed == 0

    def test_in_a_report(self, result, tmp_path):
        page = lsim.Report({"stitch": result}).to_html(tmp_path / "page.html").read_text()
        assert "Learning curve of the adapter" in page
