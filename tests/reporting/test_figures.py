"""Figures of results: the data that they draw, and every field of every result through every view."""

from __future__ import annotations

import importlib
import math
from dataclasses import fields

import numpy as np
import plotly.graph_objects as go
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analyzers.exit_curve import ExitCurveResult
from tl_layersim.core.result_declarations import declarations
from tl_layersim.reporting.lines_and_bars import Ends, Series, lines, widen_axis
from tl_layersim.reporting.site_labels import AXES
from tl_layersim.reporting.style import BLUE, ORANGE, PAPER_SIZES

from ..core.helpers import FILES, RESULTS, curve
from ..inputs.views import provenance
from ..models.tiny_models import random_tokens, tiny_llama
from ..running.options import called
from ..structure.public_names import public_names
from . import html_pages


def result_classes() -> list[type[lsim.Result]]:
    """Every class of results of this package."""
    public_names()
    importlib.import_module("tl_layersim.training.layer_comparison")
    found, waiting = [], [lsim.Result]
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        if cls.__module__.startswith("tl_layersim"):
            found.append(cls)
    return found


@pytest.fixture(scope="module")
def report():
    analyzers = [lsim.Cosine(), lsim.CKA(minibatch=16), lsim.LogitLens(), lsim.ExitCurve()]
    return lsim.analyze(tiny_llama(), random_tokens(), analyzers)


@pytest.mark.light("adapters.safetensors")
@pytest.mark.parametrize("name", RESULTS)
def test_every_field_of_every_result_has_a_table_and_a_figure_or_a_sentence(name, tmp_path):
    loaded = lsim.load(FILES / name)
    report = loaded if isinstance(loaded, lsim.Report) else lsim.Report({"one": loaded})
    for result in report.values():
        # Sizes and titles do not depend on the field: all of them with the first.
        widths = list(PAPER_SIZES)
        for field, own in declarations(result).items():
            held = getattr(result, field)
            if own.axes:
                assert len(result.to_frame(field)) == held.numel(), field
            missing = bool(held.isnan().all())
            if (len(own.axes) in (1, 2) or own.drawn) and not missing:
                for width in widths:
                    fig = result.plot(field, width=width, title="")
                    assert fig.layout.width == PAPER_SIZES[width].width
                    assert not fig.layout.title.text
                if len(widths) > 1:
                    assert result.plot(field, title="<b>own").layout.title.text == "&lt;b&gt;own"
                widths = ["column"]
            elif type(result).plot is lsim.Result.plot:
                with pytest.raises(lsim.LayersimError, match=f"`field` is '{field}'"):
                    result.plot(field)
    page = report.to_html(tmp_path / "r.html").read_text()
    assert len(html_pages.figures(page)) == sum(len(result.pictures) for result in report.values())
    assert all(figure["data"] for figure in html_pages.figures(page))


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_plots_carry_layer_names(report):
    fig = report["cosine"].plot()
    assert list(fig.layout.xaxis.ticktext) == ["embed", "0", "1", "2"]
    assert list(fig.data[0].customdata[0][0]) == ["blocks.0.hook_resid_pre", "blocks.0.hook_resid_pre"]
    assert len(report["cosine"].plot("to_last").data) == 5
    assert list(report["cosine"].plot("norm_ratio").layout.xaxis.ticktext) == ["0", "1", "2"]
    assert curve().plot().data[0].y.tolist() == [0, 1, 2]


# Trained weights of adapters, tensors over tokens and dimensions: no figure shows them.
NO_FIGURE = {"adapter", "pair"}


@pytest.mark.parametrize("cls", result_classes(), ids=lambda cls: cls.__name__)
def test_every_field_that_a_figure_can_show_declares_its_words(cls):
    declared = {field.name: field.metadata["declared"] for field in fields(cls) if "declared" in field.metadata}
    for name, own in declared.items():
        if 0 < len(own.axes) <= 2 and not NO_FIGURE & set(own.axes):
            assert own.label, name
            assert not own.label[0].islower() or own.label.startswith("p-value"), name
            assert "_" not in own.label + own.title, name


def test_sites_without_any_value_are_no_place_on_the_axis():
    sites = ("blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in range(3)))
    own = [Series("a", np.array([np.nan, 0.4, np.nan, 0.2])), Series("b", np.array([np.nan, 0.1, 0.2, np.nan]))]
    fig = lines(sites, own, "title", "unit", "residual")
    assert list(fig.layout.xaxis.ticktext) == ["0", "1", "2"]
    assert [list(trace.customdata) for trace in fig.data] == [list(sites[1:])] * 2
    empty = lines(sites, [Series("a", np.full(4, np.nan))], "title", "unit", "residual")
    assert len(empty.layout.xaxis.ticktext) == 4


def test_a_ripple_of_a_bounded_quantity_does_not_fill_the_figure():
    own = lines((1, 2, 3), [Series("a", np.array([-0.2488, -0.2502, -0.2495]))], "title", "unit", "step")
    low, high = widen_axis(own, (-1.0, 1.0)).layout.yaxis.range
    assert high - low == pytest.approx(0.212)
    assert low < -0.2502 < -0.2488 < high
    for bounds, values in (((-1.0, 1.0), [-0.9, 0.1, 0.2]), ((-np.inf, 1.0), [-0.2, -0.2, -0.21])):
        free = lines((1, 2, 3), [Series("a", np.array(values))], "title", "unit", "step")
        assert widen_axis(free, bounds).layout.yaxis.range is None


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_early_exits_are_one_figure_with_the_threshold_at_each_point(report):
    result = report["exit_curve"]
    [points] = result.plot().data
    assert points.x.tolist() == result.agreement.tolist()
    assert points.y.tolist() == result.speedup.tolist()
    assert [own[0] for own in points.customdata] == [f"{threshold:g}" for threshold in result.thresholds]
    # The other fields keep their curves over the threshold.
    assert list(result.plot("agreement").data[0].x) == list(result.thresholds)


def test_exits_are_fractions_of_positions_and_none_is_told_from_few():
    values = torch.zeros(3, 4, dtype=torch.float64)
    values[0] = torch.tensor([10_000, 0, 0, 0])
    values[1] = torch.tensor([3, 25, 0, 9_972])
    values[2] = torch.tensor([0, 0, 1, 9_999])
    result = exits_of(values)
    fig = result.plot("exits")
    [heat] = fig.data
    assert heat.z[1][:2].tolist() == [pytest.approx(0.0003), pytest.approx(0.0025)]
    assert np.isnan(heat.z).tolist() == (values == 0).tolist()
    assert (heat.zmin, heat.zmax) == (0, 1)
    assert "(fraction)" in heat.colorbar.title.text
    assert [[bool(cell) for cell in row] for row in heat.text] == (values > 0).tolist()
    assert list(fig.layout.yaxis.ticktext) == ["0", "0.5", "1"]
    assert list(fig.layout.xaxis.ticktext) == ["0", "1", "2", "3"]
    assert tuple(heat.customdata[1][0]) == ("0.5", "blocks.0.hook_resid_post")
    # Many layers leave no room for numbers.
    wide = exits_of(torch.ones(3, 20, dtype=torch.float64)).plot("exits")
    assert wide.data[0].text is None


def exits_of(values: torch.Tensor) -> ExitCurveResult:
    own = torch.ones(len(values), dtype=torch.float64)
    sites = ("blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in range(values.shape[1])))
    fields = dict.fromkeys(("accuracy", "agreement", "perplexity", "speedup"), own)
    fields |= {f"part_{name}": own.expand(2, -1) for name in ("accuracy", "agreement", "perplexity")}
    fields["part_exits"] = values.expand(2, *values.shape)
    counts = {"positions": int(values[0].sum()), "targets": 0, "unembedding": "norm"}
    return ExitCurveResult(values=values, thresholds=(0.0, 0.5, 1.0), layers=sites, provenance=provenance(), **fields, **counts)


def test_saturation_is_bars_with_whiskers():
    result = lsim.analyze(tiny_llama(), lsim.Data(random_tokens(6), batch_size=1), [lsim.Saturation()], intervals=True)
    result = result["saturation"]
    [bars] = result.plot().data
    assert bars.type == "bar"
    assert bars.y.tolist() == result.counts.tolist()
    _, low, high, _ = result.interval("counts")
    np.testing.assert_allclose(bars.y + bars.error_y.array, high)
    np.testing.assert_allclose(bars.y - bars.error_y.arrayminus, low)
    assert result.plot("cumulative").data[-1].y.tolist() == result.cumulative.tolist()


def test_the_score_of_a_window_stands_beside_a_straight_path_and_independent_steps():
    result = lsim.analyze(tiny_llama(), random_tokens(), [lsim.Trajectory(window=2)])["trajectory"]
    fig = result.plot("windowed_lss")
    assert {trace.y[0] for trace in fig.data[1:]} == {2**0.5, 1.0}
    # The legend names both lines, and the vertical axis the curve.
    assert [trace.showlegend for trace in fig.data] == [False, None, None]
    low, high = fig.layout.yaxis.range
    assert 0.9 < low < 1 < max(trace.y.max() for trace in fig.data[:1]) < high
    assert [str(tick) for tick in fig.layout.xaxis.ticktext] == [site.split(".")[1] for site in result.centres]


@pytest.mark.parametrize(("high", "start"), [(3.0, 0.9), (120.0, 0.0)])
def test_an_axis_from_a_bound_of_1_does_not_reach_below_0(high, start):
    fig = go.Figure(go.Scatter(x=[0, 1], y=[2.0, high])).update_yaxes(rangemode="tozero")
    assert widen_axis(fig, (1.0, math.inf)).layout.yaxis.range[0] == pytest.approx(start)


def test_singular_values_have_a_colour_for_each_block_and_a_dash_for_each_pair():
    places = {"layers": [0, 2], "positions": [(1, 2), -1]}
    found = called(lsim.prompts.block_jacobians, tiny_llama(), random_tokens(1, 5)[0], **places)
    fig = found.plot()
    assert [trace.line.dash for trace in fig.data] == ["solid", "dash"] * 2
    assert [trace.line.color for trace in fig.data] == [BLUE, BLUE, ORANGE, ORANGE]
    for trace, row in zip(fig.data, found.singular_values.flatten(0, 1), strict=True):
        np.testing.assert_array_equal(np.nan_to_num(trace.y), row.clamp(min=0))


def test_connections_are_labelled_by_what_differs():
    model, row = tiny_llama(layers=2).double(), random_tokens(1, 6)[0]
    fig = lsim.prompts.coupling_matrices(model, row, k=3).plot()
    assert list(fig.layout.xaxis.ticktext) == ["0", "1"]
    heat = np.array(fig.data[0].z)
    assert np.isnan(heat.diagonal()).all()
    own = lsim.prompts.coupling_matrices(model, row, along="self", layers=[1], k=3)
    shown = own.plot()
    assert [text.split(" ")[0] for text in shown.layout.xaxis.ticktext] == [str(n) for n in range(6)]
    assert shown.data[0].z[0][1] == float(own.coupling[0, 1])


def test_a_user_s_analyzer_has_a_finding_a_figure_and_numbers(tmp_path):
    shown = lsim.Report({"mine": curve()})
    assert "mine" in repr(shown)
    page = shown.to_html(tmp_path / "r.html").read_text()
    [figure] = html_pages.figures(page)
    assert list(figure["data"][0]["y"]) == [0, 1, 2]
    section = page.split('<section id="mine">')[1]
    assert '<td class="number">2</td>' in section
    # The first screen has the figure of the first finding.
    assert 'data-figure="0"' in page.split('<section id="numbers">')[0]


def test_names_along_an_axis_keep_away_from_its_ends():
    fig = lines(("a", "b", "c"), [Series("a", np.array([1.0, 2.0, 3.0]))], "title", "unit", "name")
    assert fig.layout.xaxis.range == (-0.5, 2.5)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_an_axis_starts_at_a_positive_lower_bound():
    one = [Series("a", np.array([2.0, 4.0]))]
    fig = widen_axis(lines((1, 2), one, "title", "unit", "step"), (1.0, math.inf))
    assert fig.layout.yaxis.range == pytest.approx((0.85, 4.24))
    whisker = Ends(np.array([1.5, 3.0]), np.array([3.0, 9.0]))
    barred = widen_axis(
        lines(("a", "b"), [Series("a", np.array([2.0, 4.0]), whisker)], "title", "unit", "name"), (1.0, math.inf)
    )
    assert barred.layout.yaxis.range[1] > 9
    for low in (0.0, -np.inf):
        assert widen_axis(lines((1, 2), one, "title", "unit", "step"), (low, math.inf)).layout.yaxis.range is None


def test_two_models_have_two_hues():
    models = tiny_llama(seed=0), tiny_llama(seed=1)
    found = called(lsim.evaluate_layers, *models, random_tokens(), names=("first", "second"))["layers"]
    fig = found.plot()
    assert [trace.line.color for trace in fig.data] == [BLUE, ORANGE]
    assert [trace.name for trace in fig.data] == ["first", "second"]


def test_the_table_of_axes_has_no_entry_that_no_result_has():
    assert set(AXES) - {"relative_depth"} <= {
        axis for cls in result_classes() for axes in cls.tensor_fields().values() for axis in axes
    }
