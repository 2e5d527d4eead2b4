"""Sums that do not fit into memory are refused or warned of with the first batch."""

from __future__ import annotations

import psutil
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core import LayersimError, LayersimWarning, Sums
from tl_layersim.engine.run import check_memory

CASES = [(1, False, 3), (1024, False, 13), (1000, True, 38)]


@pytest.mark.parametrize(("leaves", "intervals", "copies"), CASES)
def test_sums_that_may_not_fit_are_warned_of(leaves, intervals, copies, monkeypatch, recwarn):
    sums = {"a": Sums({"x": torch.zeros(100, dtype=torch.float64)}), "b": Sums({"x": torch.zeros(1, dtype=torch.float64)})}
    memory, need = psutil.virtual_memory(), copies * 808
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=need))
    check_memory(sums, leaves, intervals)
    assert not recwarn
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=need - 1))
    with pytest.warns(LayersimWarning, match=rf"\b{copies} copies(.|\n)*'a'"):
        check_memory(sums, leaves, intervals)


@pytest.mark.parametrize(("leaves", "intervals", "copies"), CASES)
def test_all_copies_of_the_sums_are_within_the_limit_of_the_analyzer(leaves, intervals, copies):
    sums = {"procrustes": Sums({"x": torch.zeros(1000, dtype=torch.float64)}), "cosine": Sums({"x": torch.zeros(10**6)})}
    fits, larger = (
        {"procrustes": lsim.Procrustes(max_memory_gb=copies * size / 1e9), "cosine": lsim.Cosine()} for size in (8000, 7999)
    )
    check_memory(sums, leaves, intervals, fits)
    with pytest.raises(LayersimError, match=rf"\b{copies} copies(.|\n)*'procrustes'"):
        check_memory(sums, leaves, intervals, larger)
