"""Figures of labelled tables: lines over runs and over sites, heat maps, and matrices of runs."""

from __future__ import annotations

import numpy as np
import pytest

import tl_layersim as lsim

from ..models.tiny_models import random_tokens, tiny_llama

STEPS = (0, 1, 30, 1000)


@pytest.fixture(scope="module")
def reports():
    analyzers = [lsim.Cosine(center="none"), lsim.CKA(minibatch=16), lsim.Trajectory(), lsim.BlockCoupling(k=3)]
    models = {step: tiny_llama(seed=step) for step in (1000, 0, 1, 30)}
    return lsim.sweep(models, lsim.Data(random_tokens(64, 8), batch_size=8), analyzers, intervals=True)


@pytest.fixture(scope="module")
def table(reports):
    return lsim.stack(reports, "step")


@pytest.fixture(scope="module")
def depths():
    models = {"deep": tiny_llama(6), "shallow": tiny_llama(3)}
    return lsim.stack(lsim.sweep(models, random_tokens(4), [lsim.Trajectory(), lsim.CKA(minibatch=8)]), "model")


def drawn(figure):
    """The lines of a figure, without bands."""
    return [trace for trace in figure.data if trace.mode == "lines+markers"]


def bands(figure):
    return [trace for trace in figure.data if trace.fill == "toself"]


def test_a_line_for_each_layer_over_steps(reports, table):
    figure = lsim.plot(table["cosine"].sel(quantile=0.5), "to_last")
    lines = drawn(figure)

    assert [line.name for line in lines] == ["embed", "0", "1", "2"]
    # In the order of steps; 0 stands half a decade below 1.
    np.testing.assert_allclose(lines[0].x, [-0.5, 0, np.log10(30), 3])
    assert list(figure.layout.xaxis.tickvals) == [-0.5, 0, 1, 2, 3]
    assert list(figure.layout.xaxis.ticktext) == ["0", "1", "10", "100", "1k"]

    median = reports[30]["cosine"].quantiles.index(0.5)
    assert lines[1].y[2] == reports[30]["cosine"].to_last[median, 1]
    # Bands of four lines would hide one another: the intervals are where the pointer is.
    assert bands(figure) == []

    interval = reports[30]["cosine"].interval("to_last")
    low, high = (float(end[median, 1]) for end in (interval.low, interval.high))
    assert lines[1].customdata[2] == ["30", f" ({low:.4f} to {high:.4f})"]
    assert len({line.line.color for line in lines}) == 4


def test_one_number_for_each_run_is_one_line_with_its_band(reports, table):
    figure = lsim.plot(table["trajectory"], "lss_mean", title="Own")
    [line] = drawn(figure)

    assert list(line.y) == [float(reports[step]["trajectory"].lss_mean) for step in STEPS]
    assert figure.layout.title.text == "Own"

    [band] = bands(figure)
    intervals = [reports[step]["trajectory"].interval("lss_mean") for step in STEPS]
    assert list(band.y) == [
        *(float(interval.high) for interval in intervals),
        *(float(interval.low) for interval in reversed(intervals)),
    ]

    alone = lsim.plot(table["trajectory"]["lss_mean"])
    assert list(drawn(alone)[0].y) == list(line.y)
    assert bands(alone) == []


def test_coupling_has_neighbours_and_random_vectors(reports, table):
    lines = drawn(lsim.plot(table["block_coupling"], "mean_coupling"))
    assert [line.name for line in lines] == ["all pairs", "neighbours", "random vectors"]

    results = [reports[step]["block_coupling"] for step in STEPS]
    assert list(lines[0].y) == [result.mean() for result in results]
    assert list(lines[1].y) == [result.neighbours() for result in results]
    assert list(lines[2].y) == [result.mean("null_coupling") for result in results]

    # As the interval of the mean.
    interval = results[1].interval(lambda result: result.mean())
    assert float(table["block_coupling"]["mean_coupling_high"].sel(step=1, pair_kind="all pairs")) == float(interval.high)


@pytest.mark.heavy("many runs")
def test_a_line_for_each_run_over_shared_sites_or_relative_depth(reports, table, depths):
    over = drawn(lsim.plot(table["trajectory"], "norm", over="residual"))
    assert [line.name for line in over] == ["0", "1", "30", "1,000"]
    assert list(over[2].y) == reports[30]["trajectory"].norm.tolist()
    assert list(over[2].x) == [0, 1, 2, 3]

    lines = drawn(lsim.plot(depths["trajectory"], "growth"))
    assert [line.name for line in lines] == ["deep", "shallow"]
    np.testing.assert_allclose(lines[0].x, [n / 6 for n in range(1, 7)])
    np.testing.assert_allclose(lines[1].x, [1 / 3, 2 / 3, 1])

    by_model = lsim.plot(depths["trajectory"], "growth", over="model")
    assert list(by_model.layout.xaxis.ticktext) == ["deep", "shallow"]
    assert len(drawn(by_model)) == 6
    assert np.isnan(drawn(by_model)[5].y[1])


def test_a_heat_map_of_layers_by_steps(reports, table):
    last = table["cka"].isel(column=-1)
    figure = lsim.plot(last, over=("step", "row"))
    [heat] = figure.data

    np.testing.assert_array_equal(heat.z, np.stack([reports[step]["cka"].values[:, -1] for step in STEPS], 1))
    assert list(figure.layout.xaxis.ticktext) == ["0", "1", "30", "1,000"]
    assert figure.layout.yaxis.autorange == "reversed"


@pytest.mark.heavy("many runs")
def test_matrices_stand_side_by_side_with_one_colour_scale(reports, table, depths):
    figure = lsim.plot(table["cka"])
    assert len({(trace.zmin, trace.zmax, trace.colorscale) for trace in figure.data}) == 1
    for trace, step in zip(figure.data, STEPS, strict=True):
        np.testing.assert_array_equal(trace.z, reports[step]["cka"].values)
    assert [np.shape(trace.z) for trace in lsim.plot(depths["cka"]).data] == [(7, 7), (4, 4)]

    coupling = lsim.plot(table["block_coupling"], "coupling")
    assert np.isnan(np.diagonal(coupling.data[0].z)).all()
    assert coupling.data[0].z[0][1] == reports[0]["block_coupling"].coupling[0, 1]

    [alone] = lsim.plot(reports[0].to_xarray()["cka"]).data
    np.testing.assert_array_equal(alone.z, reports[0]["cka"].values)


def test_what_cannot_be_drawn_is_refused(table):
    for call, match in (
        (lambda: lsim.plot(table), "`table`.*'cka'"),
        (lambda: lsim.plot(3), "`table`"),
        (lambda: lsim.plot(table["cka"], "valuess"), "`field` is 'valuess'.* values"),
        (lambda: lsim.plot(table["cosine"], "to_last"), r"'to_last' .* step, quantile, residual"),
        (lambda: lsim.plot(table["trajectory"], "norm", over="layer"), "`over` is 'layer'.* step, residual"),
        (lambda: lsim.plot(table["trajectory"], "norm", over=("step", "step")), "`over`.* step, residual"),
        (lambda: lsim.plot(table["trajectory"], "norm", over=()), "`over`.* step, residual"),
    ):
        with pytest.raises(lsim.LayersimError, match=match):
            call()
