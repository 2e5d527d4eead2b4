"""Several runs in one figure."""

from __future__ import annotations

import numpy as np
import pytest

import tl_layersim as lsim

from ..tiny_models import random_tokens, tiny_llama


def run(layers: int = 2, seed: int = 0, intervals: bool = False, rows: int = 256):
    analyzers = [lsim.Cosine(center="none"), lsim.LogitLens(), lsim.CKA(minibatch=8)]
    data = random_tokens(rows, 8)
    return lsim.analyze(tiny_llama(layers=layers, seed=seed), lsim.Data(data, batch_size=16), analyzers, intervals=intervals)


@pytest.fixture(scope="module")
def runs():
    return [run(intervals=True), run(seed=1)]


def lines(fig):
    return [trace for trace in fig.data if trace.mode == "lines+markers"]


def test_runs_of_one_depth_share_an_axis_of_sites_and_bands_are_intervals(runs):
    fig = lsim.overlay(dict(zip("ab", runs, strict=True)), "logit_lens", "cross_entropy")
    assert [line.name for line in lines(fig)] == ["a", "b"]
    for line, report in zip(lines(fig), runs, strict=True):
        np.testing.assert_array_equal(line.y, report["logit_lens"].values)
    assert list(fig.layout.xaxis.ticktext) == ["0", "1"]
    assert fig.layout.yaxis.title.text == "Cross-entropy (nats)"
    [band] = [trace for trace in fig.data if trace.fill == "toself"]
    _, low, high, _ = runs[0]["logit_lens"].interval("cross_entropy")
    np.testing.assert_array_equal(band.y, [*high, *low.flip(0)])
    assert fig.layout.title.subtitle.text.startswith("the same ")


def test_runs_of_other_depths_are_drawn_over_relative_depth(runs):
    fig = lsim.overlay([runs[0], run(layers=4, rows=4)], "cosine", "to_last")
    assert [list(line.x) for line in lines(fig)] == [[0, 0.5, 1], [0, 0.25, 0.5, 0.75, 1]]
    assert fig.layout.xaxis.title.text.startswith("Relative depth")
    assert "median over tokens" in fig.layout.title.text.replace("<br>", " ")
    assert fig.layout.title.subtitle.text.startswith("different data: ")


def test_matrices_stand_side_by_side_with_one_colour_scale(runs):
    fig = lsim.overlay(runs, "cka")
    assert [trace.type for trace in fig.data] == ["heatmap", "heatmap"]
    assert {trace.coloraxis for trace in fig.data} == {"coloraxis"}
    assert fig.layout.coloraxis.cmax == 1
    for trace, report in zip(fig.data, runs, strict=True):
        np.testing.assert_array_equal(trace.z, report["cka"].values)
    # Intervals of the first run alone.
    assert [len(trace.customdata[0][0]) for trace in fig.data] == [3, 2]
    assert {fig.layout.yaxis.scaleanchor, fig.layout.yaxis2.scaleanchor} == {"x", "x2"}
    curve = lsim.overlay(runs, "cka", select={"column": 0})
    np.testing.assert_array_equal(lines(curve)[1].y, runs[1]["cka"].values[:, 0])


def test_runs_are_named_by_model_then_by_file_then_by_number(runs, tmp_path):
    model = runs[0]["cka"].provenance.model
    paths = [report.save(tmp_path / f"{name}.safetensors") for name, report in zip("ab", runs, strict=True)]
    fig = lsim.overlay([paths[0], str(paths[1])], "logit_lens")
    assert [line.name for line in lines(fig)] == [f"{model} (a.safetensors)", f"{model} (b.safetensors)"]
    fig = lsim.overlay([report["logit_lens"] for report in runs])
    assert [line.name for line in lines(fig)] == [f"{model} (run 1)", f"{model} (run 2)"]
    assert [line.name for line in lines(lsim.overlay(runs[:1], "logit_lens"))] == [model]


def test_what_cannot_be_overlaid_is_refused_with_the_names_that_exist(runs):
    cosine, cka = (runs[0][name] for name in ("cosine", "cka"))
    for given, match in (
        ((runs, "rsa"), "`analyzer` is 'rsa'.*'cosine', 'logit_lens', 'cka'"),
        ((runs,), "`analyzer` is None.*'cosine', 'logit_lens', 'cka'"),
        ((runs, "cosine", "to_lst"), "`field`.*'to_lst'.*CosineResult.*to_last"),
        (([cka], "cka"), "`analyzer` is 'cka'"),
        ((runs[0], "cka"), "`analyzer` is 'cka'"),
        (([cka, cosine],), "`runs`.*CKAResult, CosineResult"),
        (([], "cka"), "`runs`"),
        (({}, "cka"), "`runs`"),
        (([runs[0], 3], "cka"), r"`runs`.*\b3\b"),
        (("path.safetensors", "cka"), "`runs`.*'path.safetensors'"),
    ):
        with pytest.raises(lsim.LayersimError, match=match):
            lsim.overlay(*given)
