"""Results: frozen, checked, as tables, from files."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core import LayerCurve, LayerMatrix, storage

from ..tiny_models import random_tokens, tiny_llama
from ..views import provenance
from .helpers import curve


@pytest.fixture(scope="module")
def report():
    return lsim.analyze(tiny_llama(), random_tokens(), [lsim.Cosine(), lsim.CKA(minibatch=16)])


def test_results_are_frozen_and_numpy_arrays(report):
    cosine = report["cosine"]
    assert isinstance(cosine, LayerMatrix)
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
        with pytest.raises(lsim.LayersimError, match=r"`values` of \w+ .*Float64"):
            LayerCurve(values=bad, layers=("a",) * 3, provenance=provenance())


def test_tables_are_tidy(report):
    table = report["cosine"].to_frame()
    assert list(table.columns) == ["row_layer", "column_layer", "values", "std", "below_zero", "angular"]
    assert len(table) == 16
    row = table[(table.row_layer == "blocks.0.hook_resid_pre") & (table.column_layer == "blocks.2.hook_resid_post")]
    assert row["values"].item() == report["cosine"].values[0, 3].item()
    last = report["cosine"].to_frame("to_last")
    assert list(last.columns) == ["quantile", "layer", "to_last"]
    assert list(report["cosine"].to_frame("norm_ratio").layer) == list(report["cosine"].layers[1:])
    with pytest.raises(lsim.LayersimError, match=r"'mood'.* values, std"):
        report["cosine"].to_frame("mood")


def test_pivots_keep_the_order_of_layers():
    names = ("blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in range(11)))
    values = torch.arange(144, dtype=torch.float64).view(12, 12)
    matrix = LayerMatrix(values=values, layers=names, column_layers=names, provenance=provenance())
    pivot = matrix.to_frame().pivot(index="row_layer", columns="column_layer", values="values")
    assert (pivot.to_numpy() == values.numpy()).all()
    assert list(pivot.index) == list(names)


def test_a_result_says_in_short_what_it_is(report):
    assert repr(report["cka"]).startswith("CKAResult(4 x 4, LlamaForCausalLM, 160 tokens)")
    assert "tensor" not in repr(report["cosine"])


def test_not_a_number_and_infinity_survive(tmp_path):
    values = torch.tensor([float("nan"), float("inf"), -0.0], dtype=torch.float64)
    one = LayerCurve(values=values, layers=("a", "b", "c"), provenance=provenance(seconds=float("inf")))
    again = lsim.load(one.save(tmp_path / "x"))
    assert torch.equal(again.values.view(torch.int64), values.view(torch.int64))
    assert again.provenance.seconds == float("inf")


def test_a_result_is_no_report_and_a_checkpoint_no_result(tmp_path):
    with pytest.raises(lsim.LayersimError, match="another kind of data"):
        lsim.Report.load(curve().save(tmp_path / "x"))
    lsim.analyze(tiny_llama(), random_tokens(), "cka", checkpoint=tmp_path / "run")
    with pytest.raises(lsim.LayersimError, match=r"/run .*checkpoint.*result.*report.*sweep"):
        lsim.load(tmp_path / "run")


def test_a_class_is_never_imported_by_a_name_in_a_file(tmp_path):
    @dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
    class Fleeting(LayerCurve):
        pass

    path = Fleeting(values=torch.zeros(1, dtype=torch.float64), layers=("a",), provenance=provenance()).save(tmp_path / "x")
    assert type(lsim.load(path)).__name__ == "Fleeting"
    header, tensors = storage.read(path, ("result",))
    storage.write(path, "result", header | {"class": header["class"].replace("Fleeting", "Vanished")}, tensors)
    with pytest.raises(lsim.LayersimError, match=r"Vanished.*tests.core.test_results"):
        lsim.load(path)
