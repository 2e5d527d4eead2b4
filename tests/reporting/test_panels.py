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
from tl_layersim.reporting.figures import panels
from tl_layersim.reporting.style import styled

from ..inputs.views import provenance
from ..models.tiny_models import random_tokens, tiny_llama


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


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_report_is_one_figure_of_its_first_pictures(report):
    figure = report.plot()
    np.testing.assert_array_equal(figure.data[0].z, report["cosine"].values.numpy())
    np.testing.assert_array_equal(figure.data[1].z, report["cka"].values.numpy())
    places = domains(figure)
    assert len(places) == 3
    for a, b in combinations(places, 2):
        assert a[1] <= b[0] or b[1] <= a[0] or a[3] <= b[2] or b[3] <= a[2]
    assert list(figure.layout.xaxis.ticktext) == ["embed", "0", "1", "2"]
    assert figure.layout.yaxis2.scaleanchor == "x2"


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("width", [None, "column", "text"])
def test_no_panel_lies_on_another_one(report, width):
    figure = report.plot(width=width, title="")
    assert not figure.layout.title.text
    high, wide = figure.layout.height, figure.layout.width
    boxes = [(left * wide, right * wide, low * high, high_end * high) for left, right, low, high_end in domains(figure)]
    # Titles stand above their panels, at least a line apart from the panel above.
    tops = sorted({round(box[3]) for box in boxes})
    for note in figure.layout.annotations:
        assert not any(left < note.x * wide + 1 < right and low < note.y * high < top for left, right, low, top in boxes)
    assert len(tops) == (3 if width == "column" else 2)
    assert wide == {None: 1016, "column": 312, "text": 648}[width]


def test_shapes_and_legends_of_a_panel_stay_with_it():
    one = styled(go.Figure(go.Scatter(y=[1, 2], name="a")), "one")
    two = styled(go.Figure([go.Bar(y=[1, 2], name="b"), go.Scatter(y=[3, 4], name="c")]), "two")
    two.add_shape(type="line", x0=0, x1=1, y0=2, y1=2, xref="x domain", yref="y")
    whole = panels([one, two])
    assert [(trace.xaxis, trace.yaxis, trace.legend) for trace in whole.data] == [
        ("x", "y", "legend"),
        *[("x2", "y2", "legend2")] * 2,
    ]
    assert [trace.showlegend for trace in whole.data] == [False, True, True]
    assert (whole.layout.shapes[0].xref, whole.layout.shapes[0].yref) == ("x2 domain", "y2")


def test_panels_of_other_data_have_their_own_words():
    two = [lsim.analyze(tiny_llama(), random_tokens(rows), lsim.Cosine())["cosine"] for rows in (3, 4)]
    counts = [result.provenance.tokens for result in two]
    figure = lsim.Report({"first": two[0], "second <b>": two[1]}).plot()
    notes = [note.text for note in figure.layout.annotations]
    assert [f"{count} tokens" in note for count, note in zip(counts, notes, strict=True)] == [True, True]
    assert not figure.layout.title.text


def test_a_report_without_pictures_is_refused():
    curve = LayerCurve(values=torch.full((1,), math.nan, dtype=torch.float64), layers=("a",), provenance=provenance())
    with pytest.raises(lsim.LayersimError, match=r"report.*curve"):
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


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_notebooks_show_margins_and_no_markup_of_names():
    found = lsim.analyze(tiny_llama(), lsim.Data(random_tokens(20, 9), batch_size=1), lsim.Cosine(), intervals=True)
    assert "± half of the 95 %" in found._repr_html_()
    assert " ± " in found["cosine"]._repr_html_()
    nasty = LayerCurve(values=torch.zeros(1, dtype=torch.float64), layers=("a",), provenance=provenance(model="<script>x"))
    assert "<script>" not in nasty._repr_html_()
