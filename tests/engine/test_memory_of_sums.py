"""Sums that do not fit into memory are refused or warned of with the first batch."""

from __future__ import annotations

import psutil
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core import LayersimError, LayersimWarning
from tl_layersim.core.sums import most_copies
from tl_layersim.engine import run as engine
from tl_layersim.engine.run import check_memory

from ..models.tiny_models import random_tokens, tiny_llama

CASES = [(1, False, 3), (1024, False, 13), (1000, True, 54)]


@pytest.mark.parametrize(("leaves", "intervals", "copies"), CASES)
def test_sums_that_may_not_fit_are_warned_of(leaves, intervals, copies, monkeypatch, recwarn):
    sums = {"a": 800, "b": 8}
    memory = psutil.virtual_memory()
    need = copies * 808
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=need))
    check_memory(sums, leaves, intervals)

    assert not recwarn

    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=need - 1))
    with pytest.warns(LayersimWarning, match=rf"\b{copies} copies(.|\n)*'a'"):
        check_memory(sums, leaves, intervals)


@pytest.mark.parametrize(("leaves", "intervals", "copies"), CASES)
def test_all_copies_of_the_sums_are_within_the_limit_of_the_analyzer(leaves, intervals, copies):
    sums = {"procrustes": 8000, "cosine": 4 * 10**6}
    fits, larger = (
        {"procrustes": lsim.Procrustes(max_memory_gb=copies * size / 1e9), "cosine": lsim.Cosine()} for size in (8000, 7999)
    )
    check_memory(sums, leaves, intervals, fits)

    with pytest.raises(LayersimError, match=rf"\b{copies} copies(.|\n)*'procrustes'"):
        check_memory(sums, leaves, intervals, larger)


LABELS = torch.randint(0, 2, (16, 20), generator=torch.Generator().manual_seed(0))
LARGE = {
    "exact cka": lambda gb: lsim.CKA(estimator="exact", max_memory_gb=gb),
    "cca": lambda gb: lsim.CCA(max_memory_gb=gb),
    "procrustes": lambda gb: lsim.Procrustes(permutations=19, max_memory_gb=gb),
    "predictivity": lambda gb: lsim.LinearPredictivity(max_memory_gb=gb),
    "rank": lambda gb: lsim.EffectiveRank(max_memory_gb=gb),
    "probe": lambda gb: lsim.LinearProbe(labels=LABELS, max_memory_gb=gb),
}


@pytest.mark.light("1-exact cka", "8-cca")
@pytest.mark.filterwarnings("ignore::tl_layersim.LayersimWarning")
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_run_beyond_the_limit_is_refused_before_a_kernel_runs(name, batch_size, monkeypatch):
    sizes = []
    refused = []
    check = engine.check_memory

    def noted(sizes_by_name, leaves, intervals, analyzers, at_once):
        sizes.append(sum(sizes_by_name.values()))
        refused.append(most_copies(leaves, intervals, at_once) * sizes[-1])
        check(sizes_by_name, leaves, intervals, analyzers, at_once)

    monkeypatch.setattr(engine, "check_memory", noted)
    model = tiny_llama()
    data = lsim.Data(random_tokens(16, 20), batch_size=batch_size)
    lsim.analyze(model, data, LARGE[name](4.0), intervals=True)
    # What is known before the pass with the large sums is their size, up to counts and sums of samples.
    number = sizes.index(max(sizes)) - 1
    expected, measured = sizes[number : number + 2]
    assert measured / 1.3 < expected <= measured
    before = list(sizes)
    sizes.clear()
    with pytest.raises(LayersimError, match="`max_memory_gb`"):
        lsim.analyze(model, data, LARGE[name](0.99 * refused[number] / 1e9), intervals=True)
    # The check after the first batch is not reached.
    assert sizes == before[: number + 1]
