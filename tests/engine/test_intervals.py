"""Intervals of whole runs: what they rest on, and that nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core.intervals import bounds_of, degrees_of_freedom, standard_error
from tl_layersim.sources.hooked_module import HookedSource

from ..inputs.views import worst
from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama
from ..oracles import skewness

pytestmark = pytest.mark.filterwarnings("ignore:CKA (rests|is dominated).*:UserWarning")


def rows(count: int, seed: int = 0) -> list[torch.Tensor]:
    """Rows of different lengths."""
    return [random_tokens(1, 5 + (7 * i) % 11, seed=seed + i)[0] for i in range(count)]


def one_pass() -> list:
    return [
        lsim.Cosine(center="none"),
        lsim.CKA(minibatch=4),
        lsim.LogitLens(),
        lsim.Saturation(),
        lsim.Trajectory(),
        lsim.ExitCurve(),
    ]


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_replicate_is_the_result_of_the_data_without_a_block():
    model = tiny_llama(dtype=torch.float64)
    data = rows(40)
    analyzers = [analyzer for analyzer in one_pass() if analyzer.name != "cka"]
    report = lsim.analyze(model, lsim.Data(data, batch_size=2), analyzers, intervals=True)
    without = {}
    for block in (0, 7, 19):
        other_rows = data[: 2 * block] + data[2 * block + 2 :]
        without[block] = lsim.analyze(model, lsim.Data(other_rows, batch_size=2), analyzers)

    for name, result in report.items():
        assert len(result.replicates) == len(result.block_tokens) == 20
        assert result.block_tokens == tuple(sum(len(row) for row in data[2 * j : 2 * j + 2]) for j in range(20))
        # Without a block in the middle, later rows have other numbers, which choose the halves of an exit curve.
        for block in (19,) if name == "exit_curve" else (0, 7, 19):
            assert worst(result.replicates[block], without[block][name]) < 1e-9


@pytest.mark.heavy("many runs")
def test_a_block_of_a_measure_of_pairs_is_a_pool_of_sixteen_rows():
    model = tiny_llama(dtype=torch.float64)
    data = rows(16 * 17)
    result = lsim.analyze(model, lsim.Data(data, batch_size=5), lsim.CKA(minibatch=64), intervals=True)["cka"]

    assert len(result.replicates) == 17
    for block in (0, 7):
        other_rows = data[: 16 * block] + data[16 * block + 16 :]
        assert worst(result.replicates[block], lsim.analyze(model, other_rows, lsim.CKA(minibatch=64))["cka"]) < 1e-9


def test_what_a_first_pass_determines_is_held_fixed():
    """The most frequent tokens of the data are the classes of NC1, also of the data without a block."""
    model = tiny_llama()
    data = rows(34)
    result = lsim.analyze(model, lsim.Data(data, batch_size=2), [lsim.NeuralCollapse()], intervals=True)["neural_collapse"]
    assert len(result.replicates) == 17
    assert {replicate.labels for replicate in result.replicates} == {result.labels}
    assert bool(result.interval().error.gt(0).all())

    cosine = lsim.analyze(model, lsim.Data(data, batch_size=2), [lsim.Cosine()], intervals=True)["cosine"]
    fixed = lsim.analyze(model, lsim.Data(data[2:], batch_size=2), [lsim.Cosine(center=cosine.mean)])["cosine"]
    assert worst(cosine.replicates[0], fixed) < 1e-9
    with pytest.raises(lsim.LayersimError, match=r"^CosineResult\.mean "):
        cosine.interval("mean")
    assert "mean_low" not in cosine.to_frame("mean")


def test_intervals_change_no_number():
    model = tiny_llama()
    data = rows(21)

    plain = lsim.analyze(model, lsim.Data(data, batch_size=1), [*one_pass(), lsim.NeuralCollapse()])
    report = lsim.analyze(model, lsim.Data(data, batch_size=1), [*one_pass(), lsim.NeuralCollapse()], intervals=True)

    for name in plain:
        assert worst(plain[name], report[name]) < 1e-12
        assert not plain[name].has_intervals
        assert plain[name].block_tokens == ()
        assert report[name].provenance.options.pop("intervals") is True
        assert report[name].provenance.options == plain[name].provenance.options


def test_an_interval_is_students_t_about_the_value_with_the_error_of_the_replicates():
    from scipy import stats

    result = lsim.analyze(tiny_llama(), lsim.Data(rows(36), batch_size=2), [lsim.LogitLens()], intervals=True)["logit_lens"]
    value, low, high, error = result.interval("entropy", level=0.9)
    replicates = torch.stack([replicate.entropy for replicate in result.replicates])
    assert error.equal(standard_error(result.entropy, replicates))
    # On the scale of logarithms, as an entropy is above 0.
    degrees = degrees_of_freedom(value, replicates)
    factor = (torch.as_tensor(stats.t.ppf(0.95, degrees)) * error / value).exp()
    skew = [skewness.moments(column.tolist())[1:] for column in replicates.T]
    hall = [
        skewness.ends(*moments, level=0.9)
        for moments in zip(value.tolist(), error.tolist(), degrees.tolist(), *zip(*skew, strict=True), strict=True)
    ]
    expected = torch.tensor(hall).double().T
    torch.testing.assert_close(low, torch.minimum(value / factor, expected[0]), rtol=1e-4, atol=0)
    torch.testing.assert_close(high, torch.maximum(value * factor, expected[1]), rtol=1e-4, atol=0)
    assert value.equal(result.entropy)
    assert result.interval().value.equal(result.values)
    assert result.interval("cross_entropy").low.equal(result.interval("values").low)


def test_any_number_of_a_result_has_an_interval():
    a = tiny_llama()
    b = tiny_llama(seed=1)
    data = rows(40)
    result = lsim.compare(a, b, lsim.Data(data, batch_size=2), lsim.CKA(minibatch=4), intervals=True)
    interval = result.interval(lambda replicate: replicate.distance())
    naive = standard_error(
        torch.tensor(result.distance(), dtype=torch.float64),
        torch.tensor([replicate.distance() for replicate in result.replicates], dtype=torch.float64),
    )

    assert interval.error.equal(naive)
    assert interval.value.shape == ()

    # The other order of the models, intervals included.
    turned = result.transposed()
    assert turned.interval("values").low.equal(result.interval("values").low.T)
    assert turned.interval("effective_samples").high.equal(result.interval("column_effective_samples").high)


def test_a_table_and_the_text_show_the_intervals():
    report = lsim.analyze(tiny_llama(), lsim.Data(rows(40), batch_size=2), [lsim.Cosine(center="none")], intervals=True)
    table = report["cosine"].to_frame()
    interval = report["cosine"].interval("values")
    np.testing.assert_array_equal(table["values_low"], interval.low.flatten())
    np.testing.assert_array_equal(table["values_high"], interval.high.flatten())
    assert {"std_low", "below_zero_high"} <= set(table.columns)

    margins = [line for line in repr(report).splitlines() if " ± " in line]
    assert len(margins) >= 2

    plain = lsim.analyze(tiny_llama(), lsim.Data(rows(40), batch_size=2), [lsim.Cosine(center="none")])
    assert " ± " not in repr(plain)
    assert "values_low" not in plain["cosine"].to_frame("values")


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_grid_has_intervals_of_its_distances_and_of_each_pair(tmp_path):
    models = {"a": tiny_llama(), "b": tiny_llama(seed=1), "c": tiny_llama(seed=2)}
    data = rows(16 * 5)
    grid = lsim.compare_grid(models, data, lsim.CKA(minibatch=64), intervals=True)
    pair = lsim.compare(models["a"], models["b"], data, lsim.CKA(minibatch=64), intervals=True)

    assert worst(grid["a", "b"], pair) < 1e-12
    torch.testing.assert_close(grid["a", "b"].interval("values").low, pair.interval("values").low)
    torch.testing.assert_close(grid.interval().low[0, 1], pair.interval(lambda replicate: replicate.distance()).low)
    torch.testing.assert_close(grid["b", "a"].interval("values").low, pair.interval("values").low.T)

    grid.save(tmp_path / "grid.safetensors")
    loaded = lsim.load(tmp_path / "grid.safetensors")
    torch.testing.assert_close(loaded.interval().high, grid.interval().high, rtol=0, atol=0, equal_nan=True)
    assert loaded["a", "c"].interval("values").low.equal(grid["a", "c"].interval("values").low)
    assert loaded.replicates[3]["a", "b"].values.equal(grid.replicates[3]["a", "b"].values)


@pytest.mark.heavy("every analyzer with intervals")
def test_a_file_keeps_the_intervals(tmp_path):
    report = lsim.analyze(tiny_llama(), lsim.Data(rows(33), batch_size=2), one_pass(), intervals=True)
    loaded = lsim.load(report.save(tmp_path / "report.safetensors"))
    for name, result in report.items():
        assert loaded[name].block_tokens == result.block_tokens
        for field in (name for name, bounds in bounds_of(result).items() if bounds is not None):
            for bound, loaded_bound in zip(result.interval(field), loaded[name].interval(field), strict=True):
                assert torch.equal(bound.nan_to_num(-7), loaded_bound.nan_to_num(-7))
        for replicate, loaded_replicate in zip(result.replicates, loaded[name].replicates, strict=True):
            assert worst(replicate, loaded_replicate) == 0
            assert type(replicate) is type(loaded_replicate)


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("at", [1, 30, 60])
def test_a_resumed_run_has_the_same_intervals_to_the_last_bit(at, tmp_path, monkeypatch):
    """Thirty-four rows twice over: blocks of one row become blocks of two at the thirty-second."""
    model = tiny_llama()
    data = rows(34)
    path = tmp_path / "run.safetensors"
    analyzers = [lsim.Cosine(), lsim.LogitLens()]
    undisturbed = lsim.analyze(model, lsim.Data(data, batch_size=1), analyzers, intervals=True)
    calls = []
    run = HookedSource.run

    def interrupted(self, batch, kernels):
        calls.append(1)
        if len(calls) == at + 1:
            raise KeyboardInterrupt
        return run(self, batch, kernels)

    monkeypatch.setattr(HookedSource, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lsim.analyze(model, lsim.Data(data, batch_size=1), analyzers, intervals=True, checkpoint=path)
    report = lsim.analyze(model, lsim.Data(data, batch_size=1), analyzers, intervals=True, checkpoint=path)
    assert len(calls) == 2 * 34 + 1
    for name, result in undisturbed.items():
        assert result.block_tokens == report[name].block_tokens
        assert len(result.block_tokens) == 17
        for replicate, resumed_replicate in zip(result.replicates, report[name].replicates, strict=True):
            assert worst(replicate, resumed_replicate) == 0
    # Without blocks it is another run.
    with pytest.raises(lsim.LayersimError, match="belongs to another run"):
        lsim.analyze(model, lsim.Data(data, batch_size=1), analyzers, checkpoint=path)


def test_forward_passes_of_a_loop_form_blocks():
    model = tiny_gpt2()
    data = list(random_tokens(48, 12))
    with lsim.attach(model, [lsim.LogitLens()], intervals=True) as probe:
        for batch in torch.stack(data).split(3):
            model(batch)
    result = probe.results()["logit_lens"]

    assert result.block_tokens == (36,) * 16
    assert bool(result.interval("entropy").error.gt(0).all())
    assert result.provenance.options["intervals"] is True


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_forward_passes_that_are_measured_together_share_a_block():
    """A loop of small forward passes gives the same pools of rows with and without intervals."""
    model = tiny_gpt2()
    data = random_tokens(560, 60)
    results = {}
    for intervals in (False, True):
        with lsim.attach(model, [lsim.CKA(minibatch=64)], intervals=intervals) as probe:
            for batch in data.split(7):
                model(batch)
        results[intervals] = probe.results()["cka"]

    assert results[True].values.equal(results[False].values)
    assert sum(results[True].block_tokens) == 560 * 60
    assert len(results[True].block_tokens) >= 16


def test_few_blocks_are_reported():
    model = tiny_llama()
    with pytest.warns(lsim.LayersimWarning, match=r"'logit_lens', 'saturation'.*\b6\b") as warnings:
        few = lsim.analyze(model, lsim.Data(rows(6), batch_size=2), [lsim.LogitLens(), lsim.Saturation()], intervals=True)[
            "logit_lens"
        ]
    # One warning of the blocks, and one of the texts.
    texts, blocks = (
        [warning for warning in warnings if f" 6 {what}" in str(warning.message)] for what in ("texts", "jackknife blocks")
    )

    assert len(texts) == len(blocks) == 1
    assert len([warning for warning in warnings if "'saturation'" in str(warning.message)]) == 2
    assert bool(few.interval("entropy").error.isfinite().all())

    with pytest.warns(lsim.LayersimWarning, match=r"'cosine' [^']*\b6\b[^']*'cka' [^']*\b1\b"):
        lsim.analyze(model, lsim.Data(rows(6), batch_size=1), [lsim.Cosine(), lsim.CKA(minibatch=4)], intervals=True)
    with pytest.warns(lsim.LayersimWarning, match=r"'logit_lens'.*\b1\b"):
        single_row = lsim.analyze(model, rows(1), [lsim.LogitLens()], intervals=True)["logit_lens"]

    assert single_row.has_intervals
    assert bool(single_row.interval("entropy").low.isnan().all())
    assert " ± " not in repr(single_row)


def test_a_measure_that_needs_every_block_has_no_intervals_and_says_so():
    """Without the block of the only row of a class, NC1 of two classes is not defined."""
    data = list(random_tokens(32, 9))
    labels = torch.tensor([0] * 31 + [1])

    analyzer = lsim.NeuralCollapse(labels=labels, pool="last")
    with pytest.warns(lsim.LayersimWarning, match="no intervals.* 16"):
        result = lsim.analyze(tiny_llama(), lsim.Data(data, batch_size=2), [analyzer], intervals=True)["neural_collapse"]

    assert not result.has_intervals


def test_what_has_no_interval_is_refused():
    plain = lsim.analyze(tiny_llama(), rows(4), [lsim.Cosine(center="none")])["cosine"]
    with pytest.raises(lsim.LayersimError, match=r"has no intervals(.|\n)*intervals=True"):
        plain.interval()

    result = lsim.analyze(tiny_llama(), lsim.Data(rows(32), batch_size=2), [lsim.Cosine(center="none")], intervals=True)[
        "cosine"
    ]
    with pytest.raises(lsim.LayersimError, match="'nothing'"):
        result.interval("nothing")
    with pytest.raises(lsim.LayersimError, match=r"`interval`.*\(2,\).*\(3,\)"):
        result.interval(lambda replicate: torch.zeros(2 if replicate is result else 3))
    for level in (0.0, 1.0, 95.0):
        with pytest.raises(lsim.LayersimError, match="`level`"):
            result.interval(level=level)


@pytest.mark.parametrize("intervals", [True, False])
def test_sums_that_may_not_fit_into_memory_are_warned_of(intervals, monkeypatch):
    import psutil

    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=1000))
    with pytest.warns(lsim.LayersimWarning, match=r"\bcopies\b.*'cosine'"):
        lsim.analyze(tiny_llama(), rows(4), [lsim.Cosine(center="none")], intervals=intervals)
    model = tiny_llama()
    with lsim.attach(model, [lsim.Cosine(center="none")], intervals=True) as probe:
        model(random_tokens(1, 5))
    with pytest.warns(lsim.LayersimWarning, match=r"\bcopies\b.*'cosine'"):
        probe.results()


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_memory_holds_32_blocks_of_a_long_stream():
    """The checkpoint of a stream of many batches holds no more blocks than that of a short one."""
    report = lsim.analyze(
        tiny_llama(), lsim.Data(list(random_tokens(150, 4)), batch_size=1), [lsim.LogitLens()], intervals=True
    )
    assert report["logit_lens"].block_tokens == (32,) * 18 + (24,)
