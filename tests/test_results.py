"""Results, reports, files, tables and plots."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tl_layersim as lsim
from tl_layersim import storage

from .conftest import provenance, random_tokens, tiny_llama


@pytest.fixture(scope="module")
def report():
    return lsim.analyze(tiny_llama(), random_tokens(), [lsim.Cosine(), lsim.CKA(minibatch=16)])


def curve(n: int = 3) -> lsim.LayerCurve:
    return lsim.LayerCurve(
        values=torch.arange(n, dtype=torch.float64), layers=tuple(f"blocks.{i}.x" for i in range(n)), provenance=provenance()
    )


def test_results_are_frozen_and_numpy_arrays(report):
    cosine = report["cosine"]
    assert isinstance(cosine, lsim.LayerMatrix)
    assert cosine.values.dtype == torch.float64
    with pytest.raises(dataclasses.FrozenInstanceError):
        cosine.values = None
    assert np.asarray(cosine).shape == (4, 4)
    assert cosine.layers == (
        "blocks.0.hook_resid_pre",
        "blocks.0.hook_resid_post",
        "blocks.1.hook_resid_post",
        "blocks.2.hook_resid_post",
    )


def test_shapes_and_dtypes_are_checked():
    for bad in (torch.zeros(3, 3, dtype=torch.float64), torch.zeros(3)):
        with pytest.raises(lsim.LayersimError, match=r"does not take this for values(.|\n)*Float64"):
            lsim.LayerCurve(values=bad, layers=("a",) * 3, provenance=provenance())


def test_tables_are_tidy(report):
    table = report["cosine"].to_frame()
    assert list(table.columns) == ["row_layer", "column_layer", "values", "std", "below_zero"]
    assert len(table) == 16
    row = table[(table.row_layer == "blocks.0.hook_resid_pre") & (table.column_layer == "blocks.2.hook_resid_post")]
    assert row["values"].item() == report["cosine"].values[0, 3].item()
    last = report["cosine"].to_frame("to_last")
    assert list(last.columns) == ["quantile", "layer", "to_last"]
    assert list(report["cosine"].to_frame("norm_ratio").layer) == list(report["cosine"].layers[1:])
    with pytest.raises(lsim.LayersimError, match=r"no tensor field 'mood'(.|\n)*values, std"):
        report["cosine"].to_frame("mood")


def test_pivots_keep_the_order_of_layers():
    names = ("blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in range(11)))
    values = torch.arange(144, dtype=torch.float64).view(12, 12)
    matrix = lsim.LayerMatrix(values=values, layers=names, column_layers=names, provenance=provenance())
    pivot = matrix.to_frame().pivot(index="row_layer", columns="column_layer", values="values")
    assert (pivot.to_numpy() == values.numpy()).all()
    assert list(pivot.index) == list(names)


def test_a_result_says_in_short_what_it_is(report):
    assert repr(report["cka"]).startswith("CKAResult(4 x 4, LlamaForCausalLM, 160 tokens)")
    assert "tensor" not in repr(report["cosine"])


def test_plots_carry_layer_names(report):
    fig = report["cosine"].plot()
    assert list(fig.layout.xaxis.ticktext) == ["embed", "0", "1", "2"]
    assert list(fig.data[0].customdata[0][0]) == ["blocks.0.hook_resid_pre", "blocks.0.hook_resid_pre"]
    assert len(report["cosine"].plot("to_last").data) == 5
    assert list(report["cosine"].plot("norm_ratio").layout.xaxis.ticktext) == ["0", "1", "2"]
    assert curve().plot().data[0].y.tolist() == [0, 1, 2]


def test_a_report_is_a_mapping_with_a_page(report, tmp_path):
    assert list(report) == ["cosine", "cka"]
    assert "COS(embedding, last)" in repr(report)
    with pytest.raises(KeyError, match="it has cosine, cka"):
        report["lens"]
    page = report.to_html(tmp_path / "report.html").read_text()
    for part in ("theorem 2.1", "figure 11", "Nguyen", "data", report["cka"].provenance.data):
        assert part in page
    # One file and no network: nothing is loaded from anywhere.
    assert 'src="http' not in page
    assert '<link rel="stylesheet"' not in page


def test_model_names_do_not_run_as_code(tmp_path):
    nasty = lsim.LayerCurve(values=torch.zeros(1, dtype=torch.float64), layers=("a",), provenance=provenance(model="<script>x"))
    page = lsim.Report({"a": nasty}).to_html(tmp_path / "r.html").read_text()
    assert "<script>x" not in page
    assert "&lt;script&gt;x" in page


def test_files_hold_no_pickle(report, tmp_path):
    path = report.save(tmp_path / "report.safetensors")
    head = path.read_bytes()
    length = int.from_bytes(head[:8], "little")
    assert json.loads(head[8 : 8 + length])["__metadata__"]["tl_layersim"].startswith('{"format": 1')


def test_not_a_number_and_infinity_survive(tmp_path):
    values = torch.tensor([float("nan"), float("inf"), -0.0], dtype=torch.float64)
    one = lsim.LayerCurve(values=values, layers=("a", "b", "c"), provenance=provenance(seconds=float("inf")))
    again = lsim.load(one.save(tmp_path / "x"))
    assert torch.equal(again.values.view(torch.int64), values.view(torch.int64))
    assert again.provenance.seconds == float("inf")


def test_a_file_that_is_not_whole_is_refused(tmp_path):
    path = curve(1000).save(tmp_path / "x.safetensors")
    for size in (0, 4, 100, path.stat().st_size - 8):
        short = tmp_path / "short.safetensors"
        short.write_bytes(path.read_bytes()[:size])
        with pytest.raises(lsim.LayersimError, match=r"truncated or not a safetensors file(.|\n)*bytes"):
            lsim.load(short)


def test_a_file_of_a_newer_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "FORMAT", 2)
    path = curve().save(tmp_path / "x.safetensors")
    monkeypatch.setattr(storage, "FORMAT", 1)
    with pytest.raises(lsim.LayersimError, match=r"newer tl_layersim(.|\n)*format 2(.|\n)*pip install --upgrade"):
        lsim.load(path)


def test_a_file_that_is_not_ours_is_refused(tmp_path):
    save_file({"w": torch.zeros(2)}, tmp_path / "weights.safetensors")
    with pytest.raises(lsim.LayersimError, match="not one of tl_layersim"):
        lsim.load(tmp_path / "weights.safetensors")
    (tmp_path / "pickle.pt").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(lsim.LayersimError, match="truncated or not a safetensors file"):
        lsim.load(tmp_path / "pickle.pt")
    with pytest.raises(FileNotFoundError, match="pass the path that was given to save"):
        lsim.load(tmp_path / "nothing")


def test_a_result_is_no_report_and_a_checkpoint_no_result(tmp_path):
    with pytest.raises(lsim.LayersimError, match="another kind of data"):
        lsim.load_report(curve().save(tmp_path / "x"))
    lsim.analyze(tiny_llama(), random_tokens(), "cka", checkpoint=tmp_path / "run")
    with pytest.raises(lsim.LayersimError, match=r"another kind of data(.|\n)*checkpoint"):
        lsim.load(tmp_path / "run")


def test_a_class_is_never_imported_by_a_name_in_a_file(tmp_path):
    @dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
    class Fleeting(lsim.LayerCurve):
        pass

    path = Fleeting(values=torch.zeros(1, dtype=torch.float64), layers=("a",), provenance=provenance()).save(tmp_path / "x")
    assert type(lsim.load(path)).__name__ == "Fleeting"
    blob = path.read_bytes().replace(b"Fleeting", b"Vanished")
    path.write_bytes(blob)
    with pytest.raises(lsim.LayersimError, match=r"Vanished, a kind of result(.|\n)*import tests.test_results first"):
        lsim.load(path)


def test_nowhere_to_save(tmp_path):
    with pytest.raises(OSError, match=r"No such file|nowhere"):
        curve().save(tmp_path / "nowhere" / "x")
