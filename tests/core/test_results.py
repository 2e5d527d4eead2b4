"""Results: frozen, checked, as tables, from files."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core import LayerCurve, LayerMatrix, Report, axes, file_format

from ..inputs.views import provenance
from ..models.tiny_models import random_tokens, tiny_llama
from ..oracles import skewness
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


def test_entries_of_an_axis_without_labels_are_numbered():
    @dataclass(frozen=True, kw_only=True, eq=False)
    class Drawn(lsim.Result):
        values: torch.Tensor = axes("step", "draw", label="Draw")
        again: torch.Tensor = axes("draw")

    values = torch.zeros(3, 2, dtype=torch.float64)
    two = torch.zeros(2, dtype=torch.float64)
    drawn = Drawn(values=values, again=two, layers=("a",), provenance=provenance())
    assert (drawn.coordinates("step"), drawn.coordinates("draw")) == ((1, 2, 3), (0, 1))
    assert drawn.to_frame().values.tolist() == [[step, draw, 0.0] for step in (1, 2, 3) for draw in (0, 1)]
    with pytest.raises(lsim.LayersimError, match=r"again has shape \(3,\).*\(2,\)"):
        Drawn(values=values, again=values[:, 0], layers=("a",), provenance=provenance())


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
    # A minibatch of 64 leaves out 8 of 72 tokens.
    drawn = lsim.analyze(tiny_llama(), random_tokens(8, 9), lsim.CKA(minibatch=64))["cka"]
    assert all("64 samples" in words for words in (repr(drawn), drawn.plot().layout.title.subtitle.text))


def test_not_a_number_and_infinity_survive(tmp_path):
    values = torch.tensor([float("nan"), float("inf"), -0.0], dtype=torch.float64)
    curve = LayerCurve(values=values, layers=("a", "b", "c"), provenance=provenance(seconds=float("inf")))
    loaded = lsim.load(curve.save(tmp_path / "x"))
    assert torch.equal(loaded.values.view(torch.int64), values.view(torch.int64))
    assert loaded.provenance.seconds == float("inf")


def test_a_result_is_no_report_and_a_checkpoint_no_result(tmp_path):
    with pytest.raises(lsim.LayersimError, match=r"/x .*'result'.*'report'"):
        lsim.Report.load(curve().save(tmp_path / "x"))
    lsim.analyze(tiny_llama(), random_tokens(), "cka", checkpoint=tmp_path / "run")
    with pytest.raises(lsim.LayersimError, match=r"/run .*checkpoint.*result.*report"):
        lsim.load(tmp_path / "run")


def test_a_class_is_never_imported_by_a_name_in_a_file(tmp_path):
    @dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
    class Fleeting(LayerCurve):
        pass

    path = Fleeting(values=torch.zeros(1, dtype=torch.float64), layers=("a",), provenance=provenance()).save(tmp_path / "x")
    assert type(lsim.load(path)).__name__ == "Fleeting"
    header, tensors = file_format.read(path, ("result",))
    file_format.write(path, "result", header | {"class": header["class"].replace("Fleeting", "Vanished")}, tensors)
    with pytest.raises(lsim.LayersimError, match=r"tests\.core\.test_results.*Vanished"):
        lsim.load(path)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Margins(LayerCurve):
    """As an author of an analyzer declares fields."""

    values: torch.Tensor = axes("residual", label="Margin", unit="logits")
    spread: torch.Tensor = axes("residual")
    share: torch.Tensor = axes(label="Share of wins", within=(0, 1))


def margins(*names: str) -> Margins:
    values = torch.arange(float(len(names)), dtype=torch.float64)
    share = torch.tensor(0.5, dtype=torch.float64)
    return Margins(values=values, spread=values / 2, share=share, layers=names, provenance=provenance())


def test_fields_of_an_own_result_have_headlines_tables_and_figures():
    result = margins("blocks.0.hook_resid_pre", "blocks.0.hook_resid_post", "blocks.1.hook_resid_post")
    assert list(result.headline().values()) == [0, 2, 0.5]
    assert result.plot().layout.yaxis.title.text == "Margin (logits)"
    assert result.declared("spread").words == "Spread"
    assert [picture.name for picture in result.pictures] == ["values"]
    assert list(result.to_frame()) == ["layer", "values", "spread"]
    assert list(result.to_frame("spread")) == ["layer", "spread"]

    heads = margins("blocks.0.attn.hook_z[0]", "blocks.0.attn.hook_z[1]")
    assert list(heads.headline().values()) == [0.5, 0.5]


def test_the_mean_of_a_headline_leaves_out_what_is_not_defined():
    heads = margins(*(f"blocks.0.attn.hook_z[{n}]" for n in range(4)))
    values = torch.tensor([1.0, float("nan"), 2.0, 6.0], dtype=torch.float64)
    assert list(dataclasses.replace(heads, values=values).headline().values()) == [3.0, 0.5]


def test_a_table_of_a_paper_has_a_line_for_each_row():
    values = torch.arange(6, dtype=torch.float64).view(2, 3)
    matrix = LayerMatrix(values=values, layers=("a", "b"), column_layers=("x", "y", "z"), provenance=provenance())
    assert [line for line in matrix.to_latex().splitlines() if "&" in line][1:] == [r"a & 0 & 1 & 2 \\", r"b & 3 & 4 & 5 \\"]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in matrix.to_markdown().splitlines()]
    assert [lines[0][1:], *lines[2:]] == [["x", "y", "z"], ["a", "0", "1", "2"], ["b", "3", "4", "5"]]


def test_a_table_of_a_paper_has_half_of_the_interval():
    whole, *without = (
        LayerCurve(values=torch.tensor([x, 10 * x], dtype=torch.float64), layers=("a", "b"), provenance=provenance())
        for x in (1.5, 1.4, 1.6, 1.7)
    )
    result = dataclasses.replace(whole, replicates=tuple(without), block_tokens=(1, 1, 1))
    error, skew, effective = skewness.moments([1.4, 1.6, 1.7])
    low, high = skewness.ends(1.5, error, 2, skew, effective)
    half = (high - low) / 2
    cells = [line.split("|")[2].strip() for line in result.to_markdown().splitlines()[2:]]

    assert cells == [f"1.5 ± {half:.1f}", f"15 ± {10 * half:.0f}"]


def test_tables_of_papers_are_escaped():
    report = Report({"a_b": margins("blocks.0.hook_resid_pre", "x_1|&")})
    lines = [line for line in report.to_latex().splitlines() if "&" in line]
    assert [line.split(" & ")[0] for line in lines[1:]] == [r"a\_b"] * len(report["a_b"].headline())

    rows = report["a_b"].to_latex("spread").splitlines()
    assert rows[5] == r"x\_1|\& & 0.5 \\"
    assert report["a_b"].to_markdown("spread").splitlines()[-1].split(" | ")[0].rstrip() == r"| x\_1\|\&"
    with pytest.raises(lsim.LayersimError, match=r"'share'.*\b0 axes"):
        report["a_b"].to_latex("share")


def test_a_class_that_is_defined_again_is_the_one_that_is_read(tmp_path):
    def defined():
        @dataclass(frozen=True, kw_only=True, eq=False, repr=False)
        class Again(LayerCurve):
            file_kind = "tests.again"

        return Again

    first = defined()
    second = defined()
    result = first(values=torch.zeros(1, dtype=torch.float64), layers=("a",), provenance=provenance())
    assert type(lsim.load(result.save(tmp_path / "x"))) is second
    del first, second
