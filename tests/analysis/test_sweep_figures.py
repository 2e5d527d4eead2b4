"""Figures of many models: over training steps, over depth, and as heat maps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analysis import Sweep

from ..tiny_models import random_tokens, tiny_llama
from ..views import from_views, residuals, view


@pytest.fixture(scope="module")
def found():
    models = {step: tiny_llama(seed=step) for step in (1000, 0, 1, 30)}
    analyzers = [lsim.Cosine(center="none"), lsim.CKA(minibatch=16), lsim.Trajectory(), lsim.BlockCoupling(k=3)]
    return lsim.sweep(models, lsim.Data(random_tokens(256, 8), batch_size=16), analyzers, intervals=True)


def drawn(figure):
    """The lines of a figure, without bands and colour bars."""
    return [trace for trace in figure.data if trace.mode == "lines+markers"]


def bands(figure):
    return [trace for trace in figure.data if trace.fill == "toself"]


def test_a_line_for_each_layer_over_steps(found):
    figure = lsim.plot_sweep(found, "cosine", "to_last")
    lines = drawn(figure)
    assert [line.name for line in lines] == ["embed", "0", "1", "2"]
    # In the order of steps; 0 stands half a decade below 1.
    np.testing.assert_allclose(lines[0].x, [-0.5, 0, np.log10(30), 3])
    median = found[30]["cosine"].quantiles.index(0.5)
    assert lines[1].y[2] == found[30]["cosine"].to_last[median, 1]
    own = found[30]["cosine"].interval("to_last")
    # Bands of four lines would hide one another: the intervals are where the pointer is.
    assert bands(figure) == []
    low, high = (float(end[median, 1]) for end in (own.low, own.high))
    assert lines[1].customdata[2] == ["30", f" ({low:.4g} to {high:.4g})"]
    assert "%{y:.4g}%{customdata[1]}" in lines[1].hovertemplate
    tokens = found[30]["cosine"].provenance.tokens
    assert figure.layout.title.subtitle.text == f"4 models · {tokens:,} tokens each"
    assert figure.layout.title.text == "Cosine similarity to the last layer (median over tokens), by model"
    assert figure.layout.yaxis.title.text == "Cosine similarity"
    assert figure.layout.xaxis.title.text == "Model"
    assert list(figure.layout.xaxis.tickvals) == [-0.5, 0, 1, 2, 3]
    assert list(figure.layout.xaxis.ticktext) == ["0", "1", "10", "100", "1k"]
    assert figure.layout.legend.title.text == "After block"
    # Below the axes: beside them, long names were cut.
    assert figure.layout.legend.yref == "container"
    assert len({line.line.color for line in lines}) == 4


def test_selected_labels_and_levels(found):
    low = lsim.plot_sweep(found, "cosine", "to_last", select={"quantile": 0.05}, title="Own", key_title="Step")
    assert drawn(low)[1].y[0] == found[0]["cosine"].to_last[found[0]["cosine"].quantiles.index(0.05), 1]
    assert (low.layout.title.text, low.layout.xaxis.title.text) == ("Own", "Step")
    narrow = lsim.plot_sweep(found, "trajectory", "lss_mean", level=0.5)
    own = found[0]["trajectory"].interval("lss_mean", 0.5)
    assert bands(narrow)[0].y[0] == float(own.high)
    assert narrow.layout.title.subtitle.text.endswith(" · bands: 50 % intervals of each point")


def test_titles_say_what_the_keys_are(found):
    def title(words):
        return lsim.plot_sweep(found, "trajectory", "growth", key_title=words, over="depth").layout.title.text.split(", by ")[1]

    assert title("Parameters (millions)") == "parameters"
    assert title("GPU hours") == "GPU hours"
    assert title("a <b>") == "a &lt;b&gt;"
    coupling = lsim.plot_sweep(found, "block_coupling", key_title="Training step")
    assert coupling.layout.title.text == "Coupling of blocks, by training step"


@pytest.mark.parametrize(("models", "count"), [(3, 3), (4, 0)])
def test_up_to_three_lines_over_depth_have_bands(found, models, count):
    some = {key: found[key]["trajectory"] for key in (0, 1, 30, 1000)[:models]}
    figure = lsim.plot_sweep(some, field="growth", over="depth")
    assert len(bands(figure)) == count
    assert ("bands: 95 % intervals" in figure.layout.title.subtitle.text) is (count > 0)
    own = some[1].interval("growth")
    assert drawn(figure)[1].customdata[0][1] == f" ({float(own.low[0]):.4g} to {float(own.high[0]):.4g})"


def test_one_number_for_each_model_is_one_line(found):
    figure = lsim.plot_sweep(found, "trajectory", "lss_mean")
    [line] = drawn(figure)
    assert list(line.y) == [float(found[step]["trajectory"].lss_mean) for step in (0, 1, 30, 1000)]
    assert figure.layout.showlegend is False
    headline = lsim.plot_sweep(found, "trajectory", "line-shape score (1: a straight line)")
    assert list(drawn(headline)[0].y) == list(line.y)
    for over in ("depth", "both"):
        with pytest.raises(lsim.LayersimError, match="`over` is '"):
            lsim.plot_sweep(found, "trajectory", "lss_mean", over=over)


def test_coupling_has_neighbours_and_random_vectors(found):
    figure = lsim.plot_sweep(found, "block_coupling")
    lines = drawn(figure)
    assert [line.name for line in lines] == ["all pairs", "neighbours", "random vectors"]
    results = [found[step]["block_coupling"] for step in (0, 1, 30, 1000)]
    assert list(lines[0].y) == pytest.approx([one.mean() for one in results])
    assert list(lines[1].y) == pytest.approx([one.neighbours() for one in results])
    assert list(lines[2].y) == pytest.approx([one.mean("null_coupling") for one in results])
    assert (lines[0].line.dash, lines[2].line.dash) == ("solid", "dash")
    own = results[1].interval(lambda one: one.mean())
    assert bands(figure)[0].y[1] == pytest.approx(float(own.high))
    rows = lsim.plot_sweep(found, "block_coupling", "coupling")
    matrix = results[0].coupling.clone()
    assert drawn(rows)[0].y[0] == pytest.approx(float((matrix[0, 1] + matrix[0, 2]) / 2))
    assert rows.layout.title.text == "Coupling of blocks (mean over the other blocks), by model"
    means = results[0].interval(lambda one: (one.coupling[0, 1] + one.coupling[0, 2]) / 2)
    assert bands(rows)[0].y[0] == pytest.approx(float(means.high))


def test_results_without_a_sweep_and_without_intervals():
    one = from_views(lsim.BlockCoupling(k=3), [view(residuals(1)[:, :9])])
    figure = lsim.plot_sweep({1: one, 50: one, 99: one})
    assert [line.name for line in drawn(figure)] == ["all pairs", "neighbours", "random vectors"]
    assert list(drawn(figure)[0].x) == [1, 50, 99]
    assert figure.layout.xaxis.tickvals is None
    assert bands(figure) == []
    assert list(drawn(lsim.plot_sweep({1: one, 100: one}))[0].x) == [0, 2]
    named = lsim.plot_sweep({"b": one, "a": one}, field="singular_values")
    assert list(named.layout.xaxis.ticktext) == ["b", "a"]
    assert named.layout.xaxis.title.text == "Model"
    assert drawn(named)[0].y[0] == one.singular_values[0, 0]


def test_a_line_for_each_model_over_depth(found):
    deep = lsim.analyze(tiny_llama(6), random_tokens(4), lsim.Trajectory())["trajectory"]
    shallow = found[0]["trajectory"]
    figure = lsim.plot_sweep({"deep": deep, "shallow": shallow}, field="growth", over="depth")
    lines = drawn(figure)
    assert [line.name for line in lines] == ["deep", "shallow"]
    assert list(lines[0].x) == pytest.approx([n / 6 for n in range(1, 7)])
    assert list(lines[1].x) == pytest.approx([1 / 3, 2 / 3, 1])
    assert list(lines[1].y) == shallow.growth.tolist()
    # Only one of the two was measured with intervals.
    assert len(bands(figure)) == 1
    assert figure.layout.xaxis.title.text == "Relative depth (0: first site, 1: last)"
    by_key = lsim.plot_sweep({6: deep, 3: shallow}, field="growth", key_title="Blocks")
    assert len(drawn(by_key)) == 6
    assert drawn(by_key)[0].y[0] == shallow.growth[0]
    assert np.isnan(drawn(by_key)[5].y[0])
    assert drawn(by_key)[5].y[1] == deep.growth[5]


def test_many_lines_have_a_colour_bar(found):
    many = Sweep(dict.fromkeys(range(1, 12), found[0]))
    figure = lsim.plot_sweep(many, "cka", over="depth")
    assert figure.layout.showlegend is False
    bar = figure.data[-1].marker.colorbar
    assert bar.title.text == "Model"
    assert list(bar.ticktext) == ["1", "11"]
    wide = lsim.plot_sweep(Sweep({10**n: found[0] for n in range(11)}), "cka", over="depth")
    assert list(wide.data[-1].marker.colorbar.tickvals) == pytest.approx([n / 10 for n in range(11)])
    deep = lsim.analyze(tiny_llama(12), random_tokens(4), lsim.Trajectory())["trajectory"]
    layers = lsim.plot_sweep({0: deep, 1: deep}, field="growth")
    assert layers.data[-1].marker.colorbar.title.text == "Relative depth"


def test_a_heat_map_of_layers_by_steps(found):
    figure = lsim.plot_sweep(found, "cka", over="both")
    [heat] = figure.data
    expected = torch.stack([found[step]["cka"].values[:, -1] for step in (0, 1, 30, 1000)], 1)
    np.testing.assert_array_equal(heat.z, expected)
    assert list(figure.layout.xaxis.ticktext) == ["0", "1", "30", "1,000"]
    assert figure.layout.yaxis.title.text == "After block"
    assert heat.colorbar.title.text == "Linear CKA"
    deep = lsim.analyze(tiny_llama(6), random_tokens(4), lsim.Trajectory())["trajectory"]
    with pytest.raises(lsim.LayersimError, match=r"`over`.*7, 4\b"):
        lsim.plot_sweep({"a": deep, "b": found[0]["trajectory"]}, over="both")


def test_what_cannot_be_drawn_is_refused(found):
    cka = found[0]["cka"]
    for call, match in (
        (lambda: lsim.plot_sweep(found), "`analyzer` is None"),
        (lambda: lsim.plot_sweep({1: cka}, "cka"), "`analyzer` is 'cka'"),
        (lambda: lsim.plot_sweep({}), "`results`"),
        (lambda: lsim.plot_sweep({1: cka, 2: "x"}), "`results`.*CKAResult, str"),
        (lambda: lsim.plot_sweep({1: cka, 2: found[0]["cosine"]}), "`results`.*CKAResult, CosineResult"),
        (lambda: lsim.plot_sweep([cka]), "`results`.*list of 1 CKAResult"),
    ):
        with pytest.raises(lsim.LayersimError, match=match):
            call()
    alone = Sweep({1: lsim.Report({"cka": cka})})
    assert len(drawn(lsim.plot_sweep(alone))) == 4
