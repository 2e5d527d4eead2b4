"""The GPU benchmark runs on the CPU, keeps its time, and reports what it measured."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

FILE = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
pytestmark = pytest.mark.skipif(not FILE.exists(), reason="benchmarks are not in the package")


@pytest.fixture
def gpu(monkeypatch):
    """The script as a module. It sets variables when it is imported, which are restored."""
    for name in ("TQDM_DISABLE", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, "1")
    spec = importlib.util.spec_from_file_location("gpu_benchmark", FILE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.heavy("benchmarks")
def test_every_part_runs_on_a_cpu(gpu, monkeypatch, capsys, tmp_path):
    path = tmp_path / "record.json"
    given = ["--device", "cpu", "--shape", "tiny", "--repeats", "1", "--minutes", "2", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", [str(FILE), *given])
    gpu.main()
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line.startswith("###")] == [
        "### Pass",
        "### Coupling",
        "### Training",
        "### Early exit",
    ]
    record = json.loads(path.read_text(encoding="utf-8"))
    assert list(record["parts"]) == list(gpu.PARTS)
    assert record["versions"]["torch"] == torch.__version__
    assert not record["errors"]
    for part in record["parts"].values():
        assert all(seconds > 0 for own in part["seconds"].values() for seconds in own)
        assert set(part["bases"]) <= set(part["seconds"])
    rows = [line for line in shown.splitlines() if line.startswith("| `CKA()`")]
    assert len(rows) == 1
    assert rows[0].count("|") == 6


def test_without_a_gpu_the_script_says_how_it_runs(gpu, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [str(FILE)])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "--device cpu --shape tiny" in capsys.readouterr().err


@pytest.fixture
def clock(gpu, monkeypatch):
    """A clock that the test moves, in place of the machine's."""
    now = [1000.0]
    read = lambda: now[0]  # noqa: E731
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=read, perf_counter=read))
    return now


def test_rounds_end_before_the_deadline(gpu, clock):
    device, calls = gpu.Device("cpu"), []

    def slow():
        calls.append(clock[0])
        clock[0] += 0.05

    deadline = clock[0] + 0.4
    found = gpu.measure(device, {"a": slow, "b": slow}, deadline, repeats=50)
    assert clock[0] <= deadline
    assert found.warm
    assert 1 <= len(found.seconds["a"]) == len(found.seconds["b"]) <= 3
    # In turn: the runs of a round stand beside one another.
    assert len(calls) == 2 + 2 * len(found.seconds["a"])


def test_a_part_without_time_keeps_its_only_round(gpu, clock):
    def work():
        clock[0] += 0.05

    found = gpu.measure(gpu.Device("cpu"), {"a": work, "b": work}, clock[0] - 1, repeats=5)
    assert not found.warm
    assert [len(own) for own in found.seconds.values()] == [1, 1]
    assert "without a warm-up" in "\n".join(gpu.table("pass", found))


def test_time_that_a_part_leaves_goes_to_the_next_ones(gpu, clock):
    parts = gpu.Clock(100.0)
    assert parts.deadline("pass") - clock[0] == pytest.approx(35)
    # Nothing of it was used: 15 of the 65 hundredths that remain.
    assert parts.deadline("coupling") - clock[0] == pytest.approx(100 * 15 / 65)


def test_peak_memory_is_counted_above_the_model(gpu, monkeypatch):
    events = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("wait"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: events.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1_000_000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 8_000_000)
    found = gpu.measure(gpu.Device("cuda"), {"a": lambda: events.append("work")}, time.monotonic() + 60, repeats=2)
    assert found.peak == {"a": 7_000_000}
    assert events == ["wait", "reset", "work", "wait"] * 3
    assert "| a | 0.0000" in (text := "\n".join(gpu.table("pass", found)))
    assert "| 7 |" in text
    assert "MB of the model: 1" in text
