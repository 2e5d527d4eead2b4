"""Analyzers under names of the user's own: the same analyzer twice in one call, in every call that takes analyzers."""

from __future__ import annotations

import re

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.engine.run_arguments import choose_analyzers

from ..models.tiny_models import random_tokens, tiny_llama
from ..running.options import called

# Few blocks are enough to compare two runs.
pytestmark = pytest.mark.filterwarnings("ignore:Intervals of .* rest on")
ROWS = random_tokens(32, 16)


def lenses():
    return {"raw": lsim.LogitLens(norm="none"), "normed": lsim.LogitLens()}


def similarities():
    return {"small": lsim.CKA(minibatch=8), "large": lsim.CKA(minibatch=16)}


def assert_equal(report, name, alone):
    """Every field of a result of a report is that of a run of its own."""
    for field in alone.tensor_fields():
        assert torch.equal(torch.nan_to_num(getattr(report[name], field)), torch.nan_to_num(getattr(alone, field))), (
            name,
            field,
        )
    assert report[name].provenance.options == alone.provenance.options


def alone(analyzer, **options):
    [result] = called(lsim.analyze, tiny_llama(), ROWS, analyzer, batch_size=2, **options).values()
    return result


@pytest.mark.light("lenses")
@pytest.mark.parametrize("make", [lenses, similarities], ids=["lenses", "similarities"])
def test_each_equals_a_run_of_its_own_and_survives_a_file(make, tmp_path):
    report = lsim.analyze(tiny_llama(), lsim.Data(ROWS, batch_size=2), make(), intervals=True)
    assert list(report) == list(make())
    for name, analyzer in make().items():
        assert_equal(report, name, alone(analyzer, intervals=True))

    again = lsim.load(report.save(tmp_path / "report.safetensors"))
    for name in make():
        assert_equal(again, name, report[name])
        low = report[name].interval("values").low
        assert torch.equal(again[name].interval("values").low.nan_to_num(), low.nan_to_num())

    first, second = (report[name].values for name in make())
    assert not torch.equal(first, second)


@pytest.mark.heavy("many runs")
def test_two_sets_of_labels_do_not_share_a_lens():
    labels = [torch.randint(50, (len(ROWS),), generator=torch.Generator().manual_seed(n)) for n in (0, 1)]
    analyzers = {f"labels_{n}": lsim.LogitLens(labels=targets) for n, targets in enumerate(labels)}
    report = lsim.analyze(tiny_llama(), lsim.Data(ROWS, batch_size=2, positions="last"), analyzers)
    for name, analyzer in analyzers.items():
        assert_equal(report, name, alone(analyzer, positions="last"))


@pytest.mark.heavy("many runs")
def test_an_analyzer_of_two_passes_twice():
    analyzers = {"means": lsim.Cosine(), "raw": lsim.Cosine(center="none"), "collapse": "neural_collapse"}
    data = {"input_ids": ROWS, "label": torch.arange(32) % 2}
    report = lsim.analyze(tiny_llama(), lsim.Data(data, batch_size=2), analyzers)

    assert_equal(report, "means", alone(lsim.Cosine()))
    assert_equal(report, "raw", alone(lsim.Cosine(center="none")))
    assert type(report["collapse"]).__name__ == "NeuralCollapseResult"


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_compare_and_compare_grid_return_a_report_of_the_names():
    a = tiny_llama(seed=0)
    b = tiny_llama(seed=1)

    report = lsim.compare(a, b, lsim.Data(ROWS, batch_size=2), similarities())
    grids = lsim.compare_grid({"a": a, "b": b}, lsim.Data(ROWS, batch_size=2), similarities())

    assert list(report) == list(grids) == ["small", "large"]
    for name, analyzer in similarities().items():
        expected = lsim.compare(a, b, lsim.Data(ROWS, batch_size=2), analyzer)
        assert torch.equal(report[name].values, expected.values)
        assert torch.equal(grids[name]["a", "b"].values, expected.values)
        assert torch.equal(
            grids[name].values, lsim.compare_grid({"a": a, "b": b}, lsim.Data(ROWS, batch_size=2), analyzer).values
        )


@pytest.mark.parametrize(
    ("analyzers", "says"), [({"cka": lsim.Cosine()}, "'cka'.*CKA"), ({"head": lsim.LogitLens()}, "'head'.*estimate")]
)
def test_the_name_of_another_analyzer_or_of_a_cost_is_refused(analyzers, says):
    with pytest.raises(lsim.LayersimError, match=f"`analyzers`.*{says}"):
        choose_analyzers(analyzers)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_attach_and_estimate(monkeypatch):
    # One batch is timed, where a user's model is timed for seconds.
    monkeypatch.setattr("tl_layersim.costs.estimate.CALIBRATION", 0.0)
    model = tiny_llama()
    with lsim.attach(model, lenses()) as probe:
        for rows in ROWS.split(2):
            model(rows)
    report = probe.results()
    for name, analyzer in lenses().items():
        with lsim.attach(model, analyzer) as probe_of_lens:
            for rows in ROWS.split(2):
                model(rows)
        assert_equal(report, name, probe_of_lens.results()["logit_lens"])

    cost = {"tokens": 1000, "batch_size": 2, "seq_len": 16}
    twice = lsim.estimate(model, similarities(), **cost)
    once = lsim.estimate(model, similarities()["small"], **cost)
    assert twice.flops["forward"] == once.flops["forward"]
    assert twice.flops["small"] == once.flops["cka"] > 0
    assert twice.sums_bytes.keys() == {"small", "large"}


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_sweep_and_its_folder(tmp_path):
    models = {0: tiny_llama(seed=0), 1: tiny_llama(seed=1)}
    computed = lsim.sweep(models, lsim.Data(ROWS, batch_size=2), lenses(), checkpoint=tmp_path / "folder")
    again = lsim.sweep(models, lsim.Data(ROWS, batch_size=2), lenses(), checkpoint=tmp_path / "folder")

    for sweep in (computed, again):
        assert_equal(sweep[0], "raw", alone(lsim.LogitLens(norm="none")))
    with pytest.raises(lsim.LayersimError):
        lsim.sweep(models, ROWS, {"raw": lsim.LogitLens(), "normed": lsim.LogitLens()}, checkpoint=tmp_path / "folder")


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_shards_are_merged_under_the_names_with_options_restored(tmp_path):
    analyzers = lenses()
    for number in range(2):
        path = tmp_path / f"{number}.safetensors"
        lsim.analyze(tiny_llama(), lsim.Data(ROWS, batch_size=2), analyzers, shard=(number, 2), save_to=path)

    merged = lsim.merge(tmp_path)
    merged_with_analyzers = lsim.merge(tmp_path, analyzers=analyzers)

    for name, analyzer in analyzers.items():
        assert_equal(merged, name, alone(analyzer))
        assert_equal(merged_with_analyzers, name, alone(analyzer))
    with pytest.raises(lsim.LayersimError, match="`analyzers`"):
        lsim.merge(tmp_path, analyzers={"raw": analyzers["normed"], "normed": analyzers["raw"]})


@pytest.mark.heavy("many runs")
def test_a_checkpoint_resumes_and_refuses_other_names(tmp_path):
    path = tmp_path / "checkpoint"

    def broken():
        yield from ROWS[:4]
        raise RuntimeError("the disk is gone")

    class Rows:
        def __init__(self, fails):
            self.fails = fails

        def __iter__(self):
            return broken() if self.fails else iter(ROWS)

    with pytest.raises(RuntimeError, match="the disk is gone"):
        lsim.analyze(tiny_llama(), lsim.Data(Rows(True), batch_size=2), lenses(), checkpoint=path)
    with pytest.raises(lsim.LayersimError, match="another run"):
        lsim.analyze(tiny_llama(), lsim.Data(Rows(False), batch_size=2), {"raw": lsim.LogitLens()}, checkpoint=path)
    report = lsim.analyze(tiny_llama(), lsim.Data(Rows(False), batch_size=2), lenses(), checkpoint=path)
    for name, analyzer in lenses().items():
        assert_equal(report, name, alone(analyzer))


def test_the_difference_of_two_reports():
    report = lsim.analyze(tiny_llama(), lsim.Data(ROWS, batch_size=2), similarities(), intervals=True)
    difference = lsim.difference(report, report)
    assert list(difference) == ["small", "large"]
    assert bool((difference["small"]["values"].sel(statistic="difference") == 0).all())


def test_a_list_with_an_analyzer_twice_is_refused():
    with pytest.raises(lsim.LayersimError, match=r"`analyzers`.*'logit_lens'"):
        lsim.analyze(tiny_llama(), ROWS, [lsim.LogitLens(norm="none"), lsim.LogitLens()])


@pytest.mark.parametrize("name", ["a/b", "", "1st", "a=b", "_a", "é", 3])
def test_a_name_that_a_file_or_an_option_cannot_hold_is_refused(name):
    with pytest.raises(lsim.LayersimError, match=f"`analyzers`.*{re.escape(repr(name))}"):
        lsim.analyze(tiny_llama(), ROWS, {name: lsim.Cosine(center="none")})


def test_empty_mappings_and_other_values_are_refused():
    with pytest.raises(lsim.LayersimError, match="`analyzers` is empty"):
        lsim.analyze(tiny_llama(), ROWS, {})
    with pytest.raises(lsim.LayersimError, match=r"`analyzers`.*\b3\b"):
        choose_analyzers({"a": 3})
    assert list(choose_analyzers({"cka": lsim.CKA()})) == ["cka"]
