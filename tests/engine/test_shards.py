"""Shards of a run: their files, merged, give the report of one process to the last bit."""

from __future__ import annotations

import json
import tracemalloc

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core import file_format
from tl_layersim.engine import run_description, run_identity
from tl_layersim.sources.hooked_module import HookedSource

from ..models.head_models import CASES
from ..models.tiny_models import random_tokens, tiny_llama
from ..running.options import called
from ..running.processes import finish, started

pytestmark = pytest.mark.filterwarnings("ignore:Intervals of:tl_layersim.LayersimWarning")


def contents(path):
    """The header of a file of results without durations, and the bytes of its tensors."""
    header, tensors = file_format.read(path, ("report",))

    def without_seconds(value):
        if isinstance(value, dict):
            return {key: without_seconds(entry) for key, entry in value.items() if key != "seconds"}
        return [without_seconds(entry) for entry in value] if isinstance(value, list) else value

    bytes_of_tensors = {name: (tensor.dtype, tensor.shape, tensor.numpy().tobytes()) for name, tensor in tensors.items()}
    return without_seconds(header), bytes_of_tensors


def assert_same(merged, alone, folder):
    """Equal to the last bit, replicates and provenance included."""
    header, tensors = contents(merged.save(folder / "a.report"))
    expected_header, expected_tensors = contents(alone.save(folder / "b.report"))
    assert header == expected_header
    assert tensors.keys() == expected_tensors.keys()
    assert [name for name in tensors if tensors[name] != expected_tensors[name]] == []
    for name, result in alone.items():
        assert merged[name].provenance.seconds > 0
        assert merged[name].has_intervals == result.has_intervals


def measured(folder, of, *arguments, first=None, **options):
    """The files of all shards of a run."""
    folder.mkdir()
    for number in reversed(range(of)):
        path = called(
            lsim.analyze, *arguments, shard=(number, of), save_to=folder / f"{number}.safetensors", first=first, **options
        )
        assert path == folder / f"{number}.safetensors"
    return folder


@pytest.mark.heavy("killed processes")
def test_eight_shards_of_which_three_are_killed_equal_one_process(tmp_path):
    finish(started("import sys\nfrom tests.engine.shard_workers import main\nmain(sys.argv[1])", str(tmp_path)))
    outcome = json.loads((tmp_path / "found.json").read_text())
    assert outcome["failed"] == 0
    assert [process["signal"] for process in outcome["killed"]] == [9] * 3
    assert not any(process["done"] for process in outcome["killed"])
    # Some had sums of a part of their batches.
    assert len([process for process in outcome["killed"] if process["held"] > 0]) >= 1

    alone, merged = (contents(tmp_path / f"{name}.safetensors") for name in ("alone", "merged"))
    assert merged[0] == alone[0]
    assert merged[1] == alone[1]
    assert len(lsim.load(tmp_path / "merged.safetensors")["cka"].replicates) >= 16


ALL = {
    "one": (1, {}),
    "three, with intervals": (3, {"intervals": True}),
    "seven, packed and cut short": (7, {"max_tokens": 1100, "seq_len": 8, "pack": True, "batch_size": 3}),
    "more than batches": (13, {"batch_size": 4}),
    "some batches without a counted position": (4, {"batch_size": 1, "positions": lambda ids: ids % 4 == 0}),
}


@pytest.mark.light("some batches without a counted position")
@pytest.mark.parametrize(("of", "options"), ALL.values(), ids=ALL)
def test_any_number_of_shards_equals_one_process(of, options, tmp_path):
    model = tiny_llama()
    data = list(random_tokens(21 if "positions" in options else 150, 4))
    if "pack" in options:
        model = lsim.demo_model()
        data = lsim.demo_text()[:30]
    # Batches hold whole pools of 16 rows; some of fewer rows have no counted position.
    pooled = [] if "positions" in options else [lsim.CKA(minibatch=8, permutations=19)]
    analyzers = [lsim.Cosine(center="none"), *pooled, lsim.LogitLens(), lsim.Trajectory(final_norm=True)]
    options = {"batch_size": 2, **options}
    alone = called(lsim.analyze, model, data, analyzers, **options)
    parts = measured(tmp_path / "parts", of, model, data, analyzers, **options)

    assert_same(lsim.merge(parts), alone, tmp_path)


@pytest.mark.heavy("many runs")
def test_two_passes_in_calls_of_their_own_equal_one_call(tmp_path):
    model = tiny_llama()
    data = list(random_tokens(22, 5))
    analyzers = [lsim.Cosine(), lsim.CKA(minibatch=8)]
    options = {"batch_size": 2, "intervals": True}
    alone = called(lsim.analyze, model, data, analyzers, **options)
    first = measured(tmp_path / "first", 3, model, data, analyzers, **options)

    with pytest.raises(lsim.LayersimError, match=r"first/0\.safetensors"):
        lsim.merge(first)

    # The passes may have different numbers of shards.
    parts = measured(tmp_path / "parts", 4, model, data, analyzers, first=first, **options)
    assert_same(lsim.merge(str(parts / "*.safetensors")), alone, tmp_path)

    again = {"shard": (0, 4), "save_to": tmp_path / "other", **options}
    with pytest.raises(lsim.LayersimError, match=r"2 of 3 .*1, 2.*shard=\(1, 3\).*`first`"):
        called(lsim.analyze, model, data, analyzers, first=first / "0.safetensors", **again)
    with pytest.raises(lsim.LayersimError, match=r"`first`.*\b110\b.*\b22\b"):
        called(lsim.analyze, model, data[::-1], analyzers, first=first, **again)
    with pytest.raises(lsim.LayersimError, match=r"`first`.*analyzers"):
        called(lsim.analyze, model, data, [lsim.Cosine(), lsim.CKA(minibatch=4)], first=first, **again)
    with pytest.raises(lsim.LayersimError, match=r"`first`.*0\.safetensors"):
        called(lsim.analyze, model, data, analyzers, first=parts, **again)
    with pytest.raises(lsim.LayersimError, match=r"^`first` "):
        called(lsim.analyze, model, data, "cka", first=first, **again)
    with pytest.raises(lsim.LayersimError, match=r"`first` is .*no\*"):
        called(lsim.analyze, model, data, analyzers, first=tmp_path / "no*", **again)
    assert not (tmp_path / "other").exists()


def test_a_first_pass_without_a_model_needs_no_call_of_its_own(tmp_path):
    model = tiny_llama()
    data = list(random_tokens(12, 6))
    analyzers = [lsim.NeuralCollapse(classes=4), lsim.CKA(minibatch=8)]
    alone = lsim.analyze(model, lsim.Data(data, batch_size=2), analyzers)
    parts = measured(tmp_path / "parts", 3, model, data, analyzers, batch_size=2)

    assert_same(lsim.merge(parts), alone, tmp_path)


def test_a_shard_is_its_own_checkpoint(tmp_path, monkeypatch, capsys):
    model = tiny_llama()
    data = list(random_tokens(16, 5))
    path = tmp_path / "part"
    call = {"batch_size": 1, "shard": (1, 2), "save_to": path}
    calls = []
    counted = []
    stopped = []
    run = HookedSource.run
    count = run_description.count_data

    def interrupted(self, batch, kernels):
        calls.append(1)
        if len(calls) == 4 and not stopped:
            stopped.append(1)
            raise KeyboardInterrupt
        return run(self, batch, kernels)

    monkeypatch.setattr(HookedSource, "run", interrupted)
    monkeypatch.setattr("tl_layersim.engine.run_description.count_data", lambda batches: counted.append(1) or count(batches))
    with pytest.raises(KeyboardInterrupt) as caught:
        called(lsim.analyze, model, data, lsim.Cosine(center="none"), **call)
    # Three of its batches, not those of the other shard before them.
    assert caught.value.__notes__[0].startswith("The sums of 15 tokens are in ")
    assert "the same call continues from there" in caught.value.__notes__[0]
    assert (len(calls), len(counted)) == (4, 1)
    second_shard = lsim.analyze(
        model, lsim.Data(data, batch_size=1), lsim.Cosine(center="none"), shard=(0, 2), save_to=tmp_path / "other"
    )
    with pytest.raises(lsim.LayersimError, match=r"part.*\b1\b.*shard=\(1, 2\)"):
        lsim.merge([path, second_shard])
    calls.clear()
    assert called(lsim.analyze, model, data, lsim.Cosine(center="none"), **call) == path
    # Three batches of eight were in the file; data was counted for the other shard only.
    assert (len(calls), len(counted)) == (5, 2)
    capsys.readouterr()
    assert called(lsim.analyze, model, data, lsim.Cosine(center="none"), **call) == path
    # Counted once more, to know that the data is that of the file.
    assert (len(calls), len(counted)) == (5, 3)
    assert "is complete" in capsys.readouterr().err
    for changed in (data[::-1], data[:8]):
        with pytest.raises(lsim.LayersimError, match=r"`save_to`.*part.*\b80\b.*\b16\b"):
            called(lsim.analyze, model, changed, lsim.Cosine(center="none"), **call)
    with pytest.raises(lsim.LayersimError, match=r"part.*shard: 1.*shard: 0"):
        called(lsim.analyze, model, data, lsim.Cosine(center="none"), **call | {"shard": (0, 2)})
    assert_same(
        lsim.merge([path, second_shard]),
        lsim.analyze(model, lsim.Data(data, batch_size=1), lsim.Cosine(center="none")),
        tmp_path,
    )


def test_data_that_changes_after_it_was_counted_is_refused(tmp_path, monkeypatch):
    class Changing:
        def __init__(self):
            self.rows = list(random_tokens(8, 5))

        def __iter__(self):
            yield from self.rows
            self.rows = self.rows[::-1]

    monkeypatch.setattr("tl_layersim.data.data.MOST_KEPT", 0)
    with pytest.raises(lsim.LayersimError, match=r"`data`.*\b40\b.*\b40\b"):
        lsim.analyze(tiny_llama(), lsim.Data(Changing(), batch_size=2), "cka", shard=(0, 2), save_to=tmp_path / "part")


REFUSED = {
    "no file": ({"shard": (0, 2)}, r"`shard`.*\(0, 2\).*`save_to`"),
    "no shard": ({"save_to": "part"}, "`save_to` is 'part'.*`shard`"),
    "first alone": ({"first": "x"}, "`first` is 'x'.*`shard`"),
    "number": ({"shard": (2, 2), "save_to": "part"}, r"`shard` is \(2, 2\)"),
    "negative": ({"shard": (-1, 2), "save_to": "part"}, r"`shard` is \(-1, 2\)"),
    "none": ({"shard": (0, 0), "save_to": "part"}, r"`shard` is \(0, 0\)"),
    "checkpoint": ({"shard": (0, 2), "save_to": "part", "checkpoint": "x"}, "`checkpoint`.*`shard`"),
    "blocking": ({"shard": (0, 2), "save_to": "part", "blocking": False}, "`blocking=False`"),
    "folder": ({"shard": (0, 2), "save_to": "nowhere/part"}, r"^`save_to`.*nowhere"),
}


@pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=REFUSED)
def test_arguments_that_contradict_each_other_are_refused(options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(lsim.LayersimError, match=words):
        called(lsim.analyze, tiny_llama(), random_tokens(2, 5), "cka", **options)
    assert list(tmp_path.iterdir()) == []


def test_ranks_and_data_for_one_reading_are_refused(tmp_path, monkeypatch):
    call = {"shard": (0, 2), "save_to": tmp_path / "part"}
    monkeypatch.setattr("tl_layersim.data.data.MOST_KEPT", 0)
    with pytest.raises(lsim.LayersimError, match="`data`"):
        called(lsim.analyze, tiny_llama(), iter(random_tokens(4, 5)), "cka", **call)

    monkeypatch.setattr("tl_layersim.engine.run_arguments.rank_and_size", lambda: (0, 2))
    with pytest.raises(lsim.LayersimError, match=r"`shard`.*\(0, 2\).* 2 "):
        called(lsim.analyze, tiny_llama(), random_tokens(4, 5), "cka", **call)


@pytest.mark.parametrize("shard", [(0, 10**7), (5, 3), (-1, 2)])
def test_a_file_does_not_decide_how_much_memory_merge_takes(shard, tmp_path):
    [path] = measured(tmp_path / "parts", 1, tiny_llama(), list(random_tokens(9, 5)), lsim.LogitLens()).iterdir()
    header, tensors = file_format.read(path, ("shard",))
    header["identity"]["shard"] = list(shard)
    file_format.write(path, "shard", header, tensors)
    tracemalloc.start()

    with pytest.raises(lsim.LayersimError) as caught:
        lsim.merge(path)
    assert tracemalloc.get_traced_memory()[1] < 2**24

    tracemalloc.stop()
    assert str(shard[1]) in str(caught.value)


def test_shards_that_do_not_belong_together_are_refused_by_name(tmp_path, monkeypatch):
    model = tiny_llama()
    data = list(random_tokens(9, 5))
    parts = measured(tmp_path / "parts", 3, model, data, "cka", batch_size=1)
    files = sorted(parts.iterdir())
    with pytest.raises(lsim.LayersimError, match=r"1 of 3 .*\b1\b.*shard=\(1, 3\)"):
        lsim.merge([files[0], files[2]])
    with pytest.raises(lsim.LayersimError, match=r"0\.safetensors \(shard 0\)"):
        lsim.merge([*files, files[0]])
    with pytest.raises(FileNotFoundError, match=r"3\.safetensors"):
        lsim.merge([*files, parts / "3.safetensors"])
    with pytest.raises(lsim.LayersimError, match=r"`files` is "):
        lsim.merge([])
    with pytest.raises(lsim.LayersimError, match="report"):
        lsim.merge([lsim.merge(parts).save(tmp_path / "report")])

    def odd(name, number=1, of=3, rows=data, analyzers="cka", of_model=model, **options):
        options = {"batch_size": 1, **options}
        return called(lsim.analyze, of_model, rows, analyzers, shard=(number, of), save_to=tmp_path / name, **options)

    def refused(path):
        with pytest.raises(lsim.LayersimError) as caught:
            lsim.merge([files[0], path, files[2]])
        assert f"{path} (shard {1})" in str(caught.value)
        return str(caught.value)

    assert "45 tokens in 9 rows" in refused(odd("rows", rows=data[::-1]))
    assert "data: skip_first: 1, not data: skip_first: 0" in refused(odd("options", skip_first=1))
    assert "minibatch: 8, not" in refused(odd("analyzers", analyzers=lsim.CKA(minibatch=8)))
    assert " models: " in refused(odd("model", of_model=tiny_llama(layers=2)))
    assert " 4 shards, not 3" in refused(odd("number", of=4))
    assert "intervals: True, not" in refused(odd("intervals", intervals=True))
    monkeypatch.setattr(run_identity, "version", lambda _: "9.9")
    with pytest.raises(lsim.LayersimError, match=r"9\.9.*version.*\b1\b"):
        lsim.merge([files[0], odd("version"), files[2]])


def test_a_damaged_file_is_named(tmp_path):
    parts = measured(tmp_path / "parts", 2, tiny_llama(), random_tokens(4, 5), "cka", batch_size=1)
    path = parts / "1.safetensors"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(lsim.LayersimError, match=r"1\.safetensors"):
        lsim.merge(parts)


def test_analyzers_that_hold_tensors_are_given_again(tmp_path):
    model = tiny_llama()
    data = list(random_tokens(8, 6))
    probe = lsim.NeuralCollapse(classes=4)
    parts = measured(tmp_path / "parts", 2, model, data, [probe], batch_size=2)

    with pytest.raises(lsim.LayersimError, match="`analyzers`"):
        lsim.merge(parts, analyzers=[lsim.NeuralCollapse(classes=5)])
    assert_same(lsim.merge(parts, analyzers=[probe]), lsim.analyze(model, lsim.Data(data, batch_size=2), [probe]), tmp_path)


@pytest.mark.parametrize("kind", ["deit with teacher"])
def test_shards_of_a_classifier_equal_one_process(kind, tmp_path):
    case = CASES[kind]
    model = lsim.open_model(case.build(), **case.options)
    data = lsim.Data(case.data(), batch_size=2)
    for number in range(2):
        lsim.analyze(model, data, lsim.Saturation(), shard=(number, 2), save_to=tmp_path / f"{number}.safetensors")

    merged = lsim.merge(tmp_path)["saturation"]
    alone = lsim.analyze(model, data, lsim.Saturation())["saturation"]

    assert torch.equal(merged.counts, alone.counts)
