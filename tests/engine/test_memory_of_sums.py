"""Sums that do not fit into memory are refused or warned of with the first batch."""

from __future__ import annotations

import psutil
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core import LayersimError, LayersimWarning, Sums
from tl_layersim.engine.memory_checks import refuse_large_blocks, refuse_sums_over_limits, warn_of_large_sums


def test_blocks_may_take_half_of_the_free_memory(monkeypatch, capsys):
    sums = {"a": Sums({"x": torch.zeros(100, dtype=torch.float64)})}
    memory = psutil.virtual_memory()
    for free, refused in ((2 * 32 * 800, False), (2 * 32 * 800 - 1, True)):
        monkeypatch.setattr(psutil, "virtual_memory", lambda free=free: memory._replace(available=free))
        if refused:
            with pytest.raises(LayersimError, match="`intervals`"):
                refuse_large_blocks(sums)
        else:
            refuse_large_blocks(sums)
    monkeypatch.setattr("tl_layersim.engine.memory_checks.LARGE_BLOCKS", 32 * 800)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=10**9))
    refuse_large_blocks(sums)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("tl_layersim.engine.memory_checks.LARGE_BLOCKS", 32 * 800 - 1)
    refuse_large_blocks(sums)
    assert "up to 32 blocks of the data" in capsys.readouterr().err


def test_sums_that_may_not_fit_are_warned_of(monkeypatch, recwarn):
    sums = {"a": Sums({"x": torch.zeros(100, dtype=torch.float64)}), "b": Sums({"x": torch.zeros(1, dtype=torch.float64)})}
    memory = psutil.virtual_memory()
    # 1,024 batches: eleven nodes of the tree, and two copies while nodes are added.
    need = 13 * 808
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=need))
    warn_of_large_sums(sums, 1024)
    assert not recwarn
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=need - 1))
    with pytest.warns(LayersimWarning, match="held up to 13 times, .*'a'"):
        warn_of_large_sums(sums, 1024)


@pytest.mark.parametrize(("leaves", "intervals", "copies"), [(1, False, 3), (1024, False, 13), (1000, True, 38)])
def test_all_copies_of_the_sums_are_within_the_limit_of_the_analyzer(leaves, intervals, copies):
    sums = {"procrustes": Sums({"x": torch.zeros(1000, dtype=torch.float64)}), "cosine": Sums({"x": torch.zeros(10**6)})}
    fits, larger = (
        {"procrustes": lsim.Procrustes(max_memory_gb=copies * size / 1e9), "cosine": lsim.Cosine()} for size in (8000, 7999)
    )
    refuse_sums_over_limits(sums, fits, leaves, intervals)
    with pytest.raises(LayersimError, match=f"'procrustes'(.|\n)*{copies} copies"):
        refuse_sums_over_limits(sums, larger, leaves, intervals)
