"""One figure of a whole report, and what notebooks show."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import plotly.graph_objects as go
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core import LayerCurve
from tl_layersim.reporting.report_panels import panels

from ..tiny_models import random_tokens, tiny_llama
from ..views import provenance


@pytest.fixture(scope="module")
def report():
    chosen = [lsim.Cosine(), lsim.CKA(minibatch=16), lsim.LogitLens()]
    return lsim.analyze(tiny_llama(), random_tokens(), chosen)


def domains(figure: go.Figure) -> list[tuple[float, float, float, float]]:
    """Left, right, bottom and top of the pairs of axes of the traces."""
    found = {}
    for trace in figure.data:
        x, y = (figure.layout[f"{axis[0]}axis{axis[1:]}"] for axis in (trace.xaxis or "x", trace.yaxis or "y"))
        found[trace.xaxis, trace.yaxis] = (*x.domain, *y.domain)
    return list(found.values())


def test_a_report_is_one_figure_of_its_first_pictures(report):
    figure = report.plot()
    np.testing.assert_array_equal(figure.data[0].z, report["cosine"].values.numpy())
    np.testing.assert_array_equal(figure.data[1].z, report["cka"].values.numpy())
    places = domains(figure)
    assert len(places) == 3
    for a, b in combinations(places, 2):
        assert a[1] <= b[0] or b[1] <= a[0] or a[3] <= b[2] or b[3] <= a[2]
    titles = [note.text for note in figure.layout.annotations]
    words = ["Cosine similarity between layers", "Linear CKA between layers", "Cross-entropy of each layer's prediction"]
    assert [title for title in titles if title.startswith("<b>")] == [f"<b>{one}</b>" for one in words]
    assert figure.layout.title.text == f"LlamaForCausalLM · {report['cka'].provenance.tokens} tokens"
    assert list(figure.layout.xaxis.ticktext) == ["embed", "0", "1", "2"]
    assert figure.layout.yaxis2.scaleanchor == "x2"


def test_second_axes_and_notes_of_a_panel_stay_with_it():
    one = go.Figure(go.Scatter(y=[1, 2]))
    two = go.Figure([go.Bar(y=[1, 2]), go.Scatter(y=[3, 4], yaxis="y2")])
    two.update_layout(yaxis2={"overlaying": "y", "side": "right"}, title="both")
    two.add_annotation(text="corner", x=1, y=1, xref="paper", yref="paper")
    two.add_shape(type="line", x0=0, x1=1, y0=2, y1=2, xref="x domain", yref="y")
    whole = panels([("a", one), ("b", two)], ["", ""])
    assert [(trace.xaxis, trace.yaxis) for trace in whole.data] == [("x", "y"), ("x2", "y2"), ("x2", "y3")]
    assert whole.layout.yaxis3.overlaying == "y2"
    corner = next(note for note in whole.layout.annotations if note.text == "corner")
    assert corner.x == pytest.approx(whole.layout.xaxis2.domain[1])
    assert (whole.layout.shapes[0].xref, whole.layout.shapes[0].yref) == ("x2 domain", "y2")


def test_panels_of_one_title_have_names_and_panels_of_other_data_their_own_words():
    two = [lsim.analyze(tiny_llama(), random_tokens(rows), lsim.Cosine())["cosine"] for rows in (3, 4)]
    counts = [result.provenance.tokens for result in two]
    figure = lsim.Report({"first": two[0], "second <b>": two[1]}).plot()
    notes = [note.text for note in figure.layout.annotations if note.text.startswith("<b>")]
    assert [note.split("<br>")[0] for note in notes] == [
        "<b>Cosine similarity between layers (first)</b>",
        "<b>Cosine similarity between layers (second &lt;b&gt;)</b>",
    ]
    assert [f"{count} tokens" in note for count, note in zip(counts, notes, strict=True)] == [True, True]
    assert not figure.layout.title.text


@pytest.mark.parametrize(("layers", "beside"), [(6, "0"), (8, "")])
def test_the_label_beside_embed_is_left_out_of_a_panel_without_room_for_both(layers, beside):
    found = lsim.analyze(tiny_llama(layers), random_tokens(3), [lsim.Cosine(), lsim.EffectiveRank()])
    figure = lsim.Report(dict(found)).plot()
    assert list(figure.layout.xaxis.ticktext)[:3] == ["embed", beside, "1"]
    # The axis of a curve is longer than that of a heat map.
    assert list(figure.layout.xaxis2.ticktext)[:3] == ["embed", "0", "1"]


def test_a_report_without_pictures_is_refused():
    curve = LayerCurve(values=torch.full((1,), math.nan, dtype=torch.float64), layers=("a",), provenance=provenance())
    with pytest.raises(lsim.LayersimError, match="picture"):
        lsim.Report({"curve": curve}).plot()


def test_notebooks_show_numbers_and_what_they_were_measured_on(report):
    page = report._repr_html_()
    for name, value in report["cka"].headline().items():
        assert name in page
        assert f"{value:.4g}" in page
    run = report["cka"].provenance
    assert f"{run.tokens:,} tokens in {run.sequences:,} rows" in page
    one = report["cka"]._repr_html_()
    assert "CKAResult (4 x 4)" in one
    assert "COS(" not in one
    assert "Report" in lsim.Report({})._repr_html_()


def test_notebooks_show_margins_and_no_markup_of_names():
    found = lsim.analyze(tiny_llama(), lsim.Data(random_tokens(20, 9), batch_size=1), lsim.Cosine(), intervals=True)
    assert "± half of the 95 %" in found._repr_html_()
    assert " ± " in found["cosine"]._repr_html_()
    nasty = LayerCurve(values=torch.zeros(1, dtype=torch.float64), layers=("a",), provenance=provenance(model="<script>x"))
    assert "<script>" not in nasty._repr_html_()
