"""Workers, which turn rows into sums in any engine."""

from __future__ import annotations

import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from unittest.mock import ANY

import pandas as pd
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core.blocks import DataBlock
from tl_layersim.core.errors import LayersimError
from tl_layersim.core.sum_tree import SumTree
from tl_layersim.core.sums import Sums
from tl_layersim.ray import Worker
from tl_layersim.ray import worker as module

from ..tiny_models import random_tokens
from .loaders import assert_same, load, load_plain, load_plain_nan, load_verified, texts

ANALYZERS = [lsim.CKA(minibatch=32), lsim.LogitLens()]
pytestmark = pytest.mark.filterwarnings("ignore:Intervals of")


def chunks(rows, size):
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def by_two(rows):
    return lsim.Data(rows, batch_size=2)


@pytest.fixture(scope="module")
def whole():
    return lsim.analyze(load(), by_two(texts()), ANALYZERS)


def test_equal_calls_equal_one_process_to_the_last_bit(whole, tmp_path):
    worker = pickle.loads(pickle.dumps(Worker(load, ANALYZERS)))
    found = []
    for number, rows in enumerate(chunks(texts(), 16)):
        # Files, texts, mappings, tables and iterators alike.
        kinds = [rows, [{"text": row} for row in rows], pd.DataFrame({"text": rows}), iter(rows)]
        sums = worker(by_two(kinds[number % 4]))
        path = tmp_path / str(number)
        path.write_bytes(sums)
        found.append(sums if number % 2 else path)
    assert_same(whole, worker.report(found), ("seconds", "data"), intervals=False)


def test_intervals_of_equal_calls_agree_to_rounding():
    """Each call begins with leaves of one row, and one process has larger ones later."""
    alone = lsim.analyze(load(), by_two(texts(64)), ANALYZERS, intervals=True)
    worker = Worker(load, ANALYZERS, intervals=True)
    found = worker.report(map(worker, map(by_two, chunks(texts(64), 16))))
    for name, one in alone.items():
        mine, theirs = one.interval(), found[name].interval()
        assert torch.allclose(one.values, found[name].values, atol=1e-6)
        assert torch.allclose(mine.error, theirs.error, atol=1e-6)


def test_unequal_calls_agree_to_rounding(whole):
    worker = Worker(load, [lsim.LogitLens()])
    found = worker.report(map(worker, map(by_two, [[], *chunks(texts(), 7)])))["logit_lens"]
    expected = whole["logit_lens"].cross_entropy
    assert found.provenance.tokens == whole["logit_lens"].provenance.tokens
    assert torch.allclose(found.cross_entropy, expected, rtol=1e-6)


def test_trees_that_do_not_fit_together_are_added_one_after_another():
    def tree(size, *counts):
        return SumTree(size, 0, tuple(DataBlock(n, n, {"a": Sums({"x": torch.tensor(n)})}) for n in counts))

    assert [node.rows for node in module._one_tree([tree(2, 2, 2), tree(2, 2, 1)]).nodes] == [2, 2, 2, 1]
    assert module._one_tree([tree(None, 2, 1), tree(None, 2)]).total() == DataBlock(5, 5, ANY)
    assert int(module._one_tree([tree(None, 2, 1), tree(None, 2)]).total().sums["a"]["x"]) == 5
    with pytest.raises(LayersimError, match="blocks of equal size"):
        module._one_tree([tree(2, 2, 1), tree(2, 2)])


def test_a_process_loads_the_model_once_for_all_copies_of_a_worker():
    loaded = []
    worker = Worker(lambda: loaded.append(1) or load(), ["cka"])
    key = worker._key
    copy = Worker.__new__(Worker)
    copy.__dict__.update(vars(worker))
    worker(texts(3))
    copy(texts(3))
    assert loaded == [1]
    assert key in module._models


def test_a_pool_of_processes_measures_and_raises_errors_of_this_package():
    # A new process imports this model in less time than one of transformers.
    tokens = random_tokens(70, 12).tolist()
    worker, broken = Worker(load_plain, ANALYZERS), Worker(load_plain_nan, ANALYZERS)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(worker, map(by_two, chunks(tokens, 32))))
        with pytest.raises(LayersimError, match="NaN or infinite") as refused:
            pool.submit(broken, tokens[:3]).result()
    assert not refused.value.__notes__
    whole = lsim.analyze(load_plain(), by_two(tokens), ANALYZERS)
    assert_same(whole, worker.report(found), ("seconds", "data"), intervals=False)


def test_what_a_worker_cannot_do_is_refused():
    with pytest.raises(LayersimError, match=r"Cosine .*analyze_on_ray"):
        Worker(load, [lsim.Cosine()])
    with pytest.raises(LayersimError, match="`max_tokens` is"):
        Worker(load, ["cka"])(lsim.Data(texts(3), max_tokens=100))
    with pytest.raises(LayersimError, match=r"`load_model`.*\bverify\b.*'hf'"):
        Worker(load_verified, ["cka"])(texts(3))
    worker = Worker(load, ["cka"])
    with pytest.raises(LayersimError, match="`sums` is empty"):
        worker.report([])
    with pytest.raises(LayersimError, match="different runs: number 1 differs in data"):
        worker.report([worker(texts(3)), worker(lsim.Data(texts(3), seq_len=8))])
    first, second = worker(texts(3)), worker(texts(3))
    with pytest.raises(LayersimError, match=r"what one call returned twice: number 0 and number 2 are equal"):
        worker.report([first, second, first])
    with pytest.raises(LayersimError, match="`load_model` is a"):
        Worker(load(), ["cka"])
