"""Figures of results: layers by name, quantities in words with units."""

from __future__ import annotations

import importlib
import re
from dataclasses import fields

import numpy as np
import plotly.graph_objects as go
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analyzers.exit_curve import ExitCurveResult
from tl_layersim.core.fields import declarations
from tl_layersim.reporting.curves import Series, from_lower_bound, lines, spectra, with_least_span
from tl_layersim.reporting.interval_bands import Ends
from tl_layersim.reporting.labels import AXES
from tl_layersim.reporting.stitches import step_curve
from tl_layersim.reporting.style import BLUE, ORANGE, ordered_colours
from tl_layersim.training.layer_evaluation_results import LayerChange

from ..core.helpers import curve
from ..options import called
from ..tiny_models import random_tokens, tiny_llama
from ..views import provenance


def result_classes() -> list[type[lsim.Result]]:
    """Every class of results of this package."""
    for name in lsim.__all__:
        getattr(lsim, name)
    importlib.import_module("tl_layersim.training.layer_evaluation_results")
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


def test_plots_carry_layer_names(report):
    fig = report["cosine"].plot()
    assert list(fig.layout.xaxis.ticktext) == ["embed", "0", "1", "2"]
    assert list(fig.data[0].customdata[0][0]) == ["blocks.0.hook_resid_pre", "blocks.0.hook_resid_pre"]
    assert len(report["cosine"].plot("to_last").data) == 5
    assert list(report["cosine"].plot("norm_ratio").layout.xaxis.ticktext) == ["0", "1", "2"]
    assert curve().plot().data[0].y.tolist() == [0, 1, 2]


def test_axes_and_colour_bars_are_words_with_units(report):
    lens = report["logit_lens"].plot().layout
    assert (lens.xaxis.title.text, lens.yaxis.title.text) == ("Block", "Cross-entropy (nats)")
    assert report["cosine"].plot().data[0].colorbar.title.text == "Cosine similarity"
    exits = report["exit_curve"].plot("exits")
    assert exits.layout.yaxis.title.text == "Threshold of the top probability"
    assert exits.data[0].colorbar.title.text == "Positions (fraction; colours by the square root)"
    for result in report.values():
        for picture in result.pictures:
            fig = result.plot(picture.field)
            for title in (fig.layout.xaxis.title.text, fig.layout.yaxis.title.text):
                assert title[0].isupper(), (picture.field, title)
                assert "_" not in title, (picture.field, title)


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


@pytest.mark.parametrize("cls", result_classes(), ids=lambda cls: cls.__name__)
def test_pictures_have_titles_and_captions(cls):
    for own in declarations(cls).values():
        if own.caption:
            assert own.title[0].isupper(), own
            assert not own.title.endswith(".")
            assert own.caption.endswith((".", ")")), own
            assert "{" not in own.title + own.caption


def test_figures_have_titles_words_on_axes_and_legends_beside_the_curves(report):
    for result in report.values():
        for picture in result.pictures:
            layout = result.plot(picture.field).layout
            assert layout.title.text, picture
            assert layout.title.subtitle.text.endswith("tokens")
            assert layout.width <= 620
            legend = layout.legend
            outside = (legend.yref == "container" and legend.yanchor == "bottom") or (legend.xref == "paper" and legend.x > 1)
            assert outside, picture


@pytest.mark.parametrize("cls", result_classes(), ids=lambda cls: cls.__name__)
def test_the_title_of_a_curve_is_more_than_the_words_on_its_axis(cls):
    for name, own in declarations(cls).items():
        if len(own.axes) == 1 and not NO_FIGURE & set(own.axes):
            assert own.title != own.words, name
            assert "(" not in own.title, name


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
    low, high = with_least_span(own, (-1.0, 1.0)).layout.yaxis.range
    assert high - low == pytest.approx(0.212)
    assert low < -0.2502 < -0.2488 < high
    for bounds, values in (((-1.0, 1.0), [-0.9, 0.1, 0.2]), ((-np.inf, 1.0), [-0.2, -0.2, -0.21])):
        free = lines((1, 2, 3), [Series("a", np.array(values))], "title", "unit", "step")
        assert with_least_span(free, bounds).layout.yaxis.range is None


def test_early_exits_are_one_figure_with_the_threshold_at_each_point(report):
    result = report["exit_curve"]
    fig = result.plot()
    left, right = (trace for trace in fig.data if trace.mode == "lines+markers+text")
    assert left.x.tolist() == result.agreement.tolist()
    assert right.x.tolist() == result.perplexity.tolist()
    assert left.y.tolist() == right.y.tolist() == result.speedup.tolist()
    assert left.customdata[3].startswith("threshold 0.15<br>agreement ")
    assert "speed-up" in left.customdata[3]
    mark = fig.data[1]
    threshold = result.threshold_for(agreement=0.95)
    assert mark.name == f"threshold {threshold:g}: agreement 95% or more"
    assert mark.x[0] == result.at(threshold).agreement >= 0.95
    # The other fields keep their curves over the threshold.
    assert result.plot("agreement").layout.xaxis.title.text == "Threshold of the top probability"


def test_exits_are_fractions_of_positions_and_none_is_told_from_few():
    values = torch.zeros(3, 4, dtype=torch.float64)
    values[0] = torch.tensor([10_000, 0, 0, 0])
    values[1] = torch.tensor([3, 25, 0, 9_972])
    values[2] = torch.tensor([0, 0, 1, 9_999])
    result = exits_of(values)
    fig = result.plot("exits")
    [heat] = fig.data
    assert heat.z[1][:2].tolist() == [pytest.approx(0.0003**0.5), pytest.approx(0.0025**0.5)]
    assert np.isnan(heat.z).tolist() == (values == 0).tolist()
    # The numbers at the bar's ticks are the fractions whose colours stand there.
    bar = heat.colorbar
    assert [float(text) for text in bar.ticktext] == pytest.approx([tick**2 for tick in bar.tickvals])
    assert (heat.zmin, heat.zmax) == (0, 1)
    words = [[re.sub("<.*?>", "", cell) for cell in row] for row in heat.text]
    assert words == [["100", "", "", ""], ["&lt;0.1", "0.2", "", "99.7"], ["", "", "&lt;0.1", "99.9"]]
    assert list(fig.layout.yaxis.ticktext) == ["0", "0.5", "1"]
    assert list(fig.layout.xaxis.ticktext) == ["0", "1", "2", "3"]
    assert fig.layout.title.subtitle.text.startswith("Numbers: per cent of positions; white: none")
    assert heat.customdata[1][0] == "threshold 0.5<br>blocks.0.hook_resid_post<br>0.0003 of positions"
    # Many layers leave no room for numbers.
    wide = exits_of(torch.ones(3, 20, dtype=torch.float64)).plot("exits")
    assert wide.data[0].text is None
    assert wide.layout.title.subtitle.text.startswith("White: none")


def exits_of(values: torch.Tensor) -> ExitCurveResult:
    own = torch.ones(len(values), dtype=torch.float64)
    sites = ("blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in range(values.shape[1])))
    fields = dict.fromkeys(("accuracy", "agreement", "perplexity", "speedup"), own)
    fields |= {f"part_{name}": own.expand(2, -1) for name in ("accuracy", "agreement", "perplexity")}
    fields["part_exits"] = values.expand(2, *values.shape)
    counts = {"positions": int(values[0].sum()), "targets": 0, "unembedding": "norm"}
    return ExitCurveResult(values=values, thresholds=(0.0, 0.5, 1.0), layers=sites, provenance=provenance(), **fields, **counts)


def test_early_exits_without_targets_have_no_panel_of_perplexity():
    result = lsim.analyze(tiny_llama(), random_tokens(), [lsim.ExitCurve(labels="none")])["exit_curve"]
    assert [trace.xaxis for trace in result.plot().data if trace.mode == "lines+markers+text"] == ["x"]


def test_saturation_has_bars_and_a_fraction_on_the_right():
    result = lsim.analyze(tiny_llama(), random_tokens(), [lsim.Saturation()])["saturation"]
    fig = result.plot()
    bars, line = fig.data
    assert (bars.type, line.type, line.yaxis) == ("bar", "scatter", "y2")
    assert bars.y.tolist() == result.counts.tolist()
    assert line.y.tolist() == result.cumulative.tolist()
    assert fig.layout.yaxis2.range == (0, 1.04)
    assert "fraction" in fig.layout.yaxis2.title.text
    assert result.plot("cumulative").data[0].type == "scatter"


def test_the_line_shape_score_stands_beside_the_norms():
    result = lsim.analyze(tiny_llama(), random_tokens(), [lsim.Trajectory()])["trajectory"]
    fig = result.plot()
    score = [trace for trace in fig.data if trace.xaxis == "x"]
    assert score[-1].y.tolist() == [float(result.lss_quantiles[2])]
    assert list(score[0].y) == [float(result.lss_quantiles[0]), float(result.lss_quantiles[-1])]
    lines = {trace.name: trace for trace in fig.data if trace.xaxis == "x2" and trace.showlegend is not False}
    assert lines["residual stream"].y.tolist() == result.norm_quantiles[2].tolist()
    assert lines["update of the block"].y.tolist() == result.update_norm_quantiles[2].tolist()
    # The update of block 0 stands where the stream after block 0 stands.
    assert list(lines["update of the block"].x) == [1, 2, 3]
    said = fig.layout.title.subtitle.text.replace("<br>", " ")
    assert said.startswith(
        "Bars and bands: 5 to 95 % (thin, light) and 25 to 75 % (thick, dark) of tokens; diamond and lines: median"
    )
    assert "points" not in said
    widths = [trace.line.width for trace in score[:2]]
    assert widths[0] < widths[1]
    assert fig.layout.yaxis2.title.text == "Norm"
    rows = lsim.analyze(tiny_llama(), random_tokens(), [lsim.Trajectory(per_prompt=True)])["trajectory"].plot()
    assert "points: means of rows of the data" in rows.layout.title.subtitle.text.replace("<br>", " ")


def test_the_score_of_a_window_stands_beside_a_straight_path_and_independent_steps():
    result = lsim.analyze(tiny_llama(), random_tokens(), [lsim.Trajectory(window=2)])["trajectory"]
    fig = result.plot("windowed_lss")
    assert {trace.name: trace.y[0] for trace in fig.data[1:]} == {
        "independent steps (√2): 1.414": 2**0.5,
        "straight path: 1": 1.0,
    }
    # The legend names both lines, and the vertical axis the curve.
    assert [trace.showlegend for trace in fig.data] == [False, None, None]
    low, high = fig.layout.yaxis.range
    assert 0.9 < low < 1 < max(trace.y.max() for trace in fig.data[:1]) < high
    assert "Window of 2 steps" in fig.layout.title.subtitle.text
    assert fig.layout.xaxis.title.text == "After block"
    assert [str(tick) for tick in fig.layout.xaxis.ticktext] == [site.split(".")[1] for site in result.centres]


@pytest.mark.parametrize(("high", "start"), [(3.0, 0.9), (120.0, 0.0)])
def test_an_axis_from_a_bound_of_1_does_not_reach_below_0(high, start):
    fig = go.Figure(go.Scatter(x=[0, 1], y=[2.0, high])).update_yaxes(rangemode="tozero")
    assert from_lower_bound(fig, 1.0).layout.yaxis.range[0] == pytest.approx(start)


def test_curvature_fills_the_figure_beside_its_reference():
    result = lsim.analyze(tiny_llama(), random_tokens(), [lsim.Trajectory()])["trajectory"]
    fig = result.plot("curvature")
    assert fig.data[-1].name == "independent positions (2π/3): 2.094"
    assert fig.layout.yaxis.rangemode != "tozero"
    # Other curves without negative values start at 0, with whole markers.
    growing = result.plot("values")
    assert growing.layout.yaxis.rangemode == "tozero"
    assert growing.data[0].cliponaxis is False


def test_where_positions_exit_names_the_threshold():
    both = torch.rand(2, 3, dtype=torch.float64)
    numbers = {
        name: {"layer": both, "residual": torch.rand(2, 4, dtype=torch.float64)}.get(own[-1], both[:, 0])
        for name, own in LayerChange.tensor_fields().items()
    }
    sites = ("blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in range(3)))
    own = {"models": ("a", "b"), "threshold": 0.85, "eps": 0.1, "center": "none"}
    change = LayerChange(layers=sites, provenance=provenance(), **numbers, **own)
    assert "Threshold of the top probability: 0.85" in change.plot("exits").layout.title.subtitle.text
    assert "Threshold" not in change.plot("accuracy").layout.title.subtitle.text
    assert change.plot().layout.title.text == change.plot("cross_entropy").layout.title.text
    # A fraction of 0 has a whole marker on the axis.
    assert [trace.cliponaxis for trace in change.plot("exits").data] == [False, False]


def test_singular_values_have_a_colour_for_each_block_and_a_dash_for_each_pair():
    values = np.random.default_rng(0).random((3, 2, 128))
    labels = [f"block {block}, pair {pair}" for block in range(3) for pair in range(2)]
    fig = spectra(values, labels)
    colours = [trace.line.color for trace in fig.data]
    assert colours[::2] == colours[1::2]
    assert len(set(colours)) == 3
    assert [trace.line.dash for trace in fig.data] == ["solid", "dash"] * 3
    for trace, row in zip(fig.data, values.reshape(6, 128), strict=True):
        np.testing.assert_array_equal(trace.y, row)
    assert fig.layout.xaxis.tickvals == (1, 20, 40, 60, 80, 100, 120)
    assert fig.layout.legend.orientation == "h"
    assert spectra(values[..., :6], labels).layout.xaxis.tickvals == (1, 2, 3, 4, 5, 6)
    # More blocks than the palette has colours are in the order of depth.
    many = spectra(np.ones((8, 1, 4)), [f"block {n}, token 10 on itself" for n in range(8)])
    assert [trace.line.color for trace in many.data] == ordered_colours(8)
    assert many.layout.height > fig.layout.height


def test_names_along_an_axis_keep_away_from_its_ends():
    fig = lines(("a", "b", "c"), [Series("a", np.array([1.0, 2.0, 3.0]))], "title", "unit", "name")
    assert fig.layout.xaxis.range == (-0.5, 2.5)


def test_an_axis_starts_at_a_positive_lower_bound():
    one = [Series("a", np.array([2.0, 4.0]))]
    fig = from_lower_bound(lines((1, 2), one, "title", "unit", "step"), 1.0)
    assert fig.layout.yaxis.range == pytest.approx((0.85, 4.24))
    whisker = Ends(np.array([1.5, 3.0]), np.array([3.0, 9.0]))
    barred = from_lower_bound(lines(("a", "b"), [Series("a", np.array([2.0, 4.0]), whisker)], "title", "unit", "name"), 1.0)
    assert barred.layout.yaxis.range[1] > 9
    for low in (0.0, -np.inf):
        assert from_lower_bound(lines((1, 2), one, "title", "unit", "step"), low).layout.yaxis.range is None


def test_two_models_have_two_hues_and_the_better_one_is_named():
    models = tiny_llama(seed=0), tiny_llama(seed=1)
    found = called(lsim.evaluate_layers, *models, random_tokens(), names=("first", "second"))["layers"]
    fig = found.plot()
    assert [trace.line.color for trace in fig.data] == [BLUE, ORANGE]
    lower = int((found.cross_entropy[0] < found.cross_entropy[1]).sum())
    winner, count = ("first", lower) if lower > 3 - lower else ("second", 3 - lower)
    assert fig.layout.title.subtitle.text.startswith(f"{winner} is better (lower) at {count} of 3 layers")
    # A cosine is neither better nor worse.
    assert "better" not in found.plot("cosine_to_last").layout.title.subtitle.text


def test_a_loss_by_step_has_its_moving_mean():
    fig = step_curve(np.arange(40.0), "Training loss", "Loss (nats)")
    mean = fig.data[1]
    assert mean.name == "training, mean of 10 steps"
    assert (mean.x[0], mean.y[0]) == pytest.approx((5.5, 4.5))
    assert (fig.layout.xaxis.title.text, fig.layout.yaxis.title.text) == ("Training step", "Loss (nats)")
    assert len(step_curve(np.arange(5.0), "t", "u").data) == 1


def test_the_table_of_axes_has_no_entry_that_no_result_has():
    assert set(AXES) <= {axis for cls in result_classes() for axes in cls.tensor_fields().values() for axis in axes}


def test_titles_name_the_kind_of_sites_that_were_measured():
    model, tokens = tiny_llama(), random_tokens()
    heads = lsim.analyze(model, tokens, [lsim.CKA(minibatch=16)], at="z", per_head=True)["cka"].plot()
    assert heads.layout.title.text == "Linear CKA between heads"
    assert heads.layout.xaxis.tickangle == -90
    outputs = lsim.analyze(model, tokens, [lsim.Cosine(center="none")], at=["resid_post", "mlp_out"])["cosine"]
    assert outputs.plot("to_last").layout.title.text == "Cosine similarity to the last site"
    stream = lsim.analyze(model, tokens, [lsim.Cosine(center="none")])["cosine"]
    assert stream.plot("to_last").layout.title.text == "Cosine similarity to the last layer"


def test_effective_samples_of_two_models_are_two_curves():
    a, b = tiny_llama(), tiny_llama(layers=2, seed=1)
    found = lsim.compare(a, b, random_tokens(256, 8), lsim.CKA(minibatch=64), intervals=True)
    first, second = found.plot("effective_samples").data[-2:]
    assert (first.name, second.name) == ("first model", "second model")
    np.testing.assert_array_equal(first.y, found.effective_samples)
    np.testing.assert_array_equal(second.y, [*found.column_effective_samples, np.nan])
    assert first.customdata is not None
    assert "CKA of the same layers, mean" not in found.headline()
    same = lsim.compare(a, tiny_llama(seed=1), random_tokens(20, 12), "cka")
    assert same.headline()["CKA of the same layers, mean"] == pytest.approx(float(same.values.diagonal().mean()))
