"""Intervals of runs on a server: a request carries a block at most, and blocks do not depend on requests."""

from __future__ import annotations

import pytest

import tl_layersim as lsim

from ..inputs.views import worst
from ..models.tiny_models import random_tokens, tiny_llama


def equal_to_the_last_bit(a, b) -> bool:
    pairs = zip((a, *a.replicates), (b, *b.replicates), strict=True)
    return a.block_tokens == b.block_tokens and all(worst(one, other) == 0 for one, other in pairs)


@pytest.fixture
def few_blocks(monkeypatch):
    """Four to eight blocks of rows, so that ten batches make blocks of two."""
    monkeypatch.setattr("tl_layersim.core.sums.MOST_BLOCKS", 8)


@pytest.mark.heavy("a server with a socket")
def test_blocks_are_those_of_this_process_and_do_not_depend_on_requests(small, few_blocks, tmp_path):
    """Ten batches: blocks of two, so requests of one or two batches; waited for, or collected later."""
    data, analyzers = lsim.Data(list(random_tokens(10, 6)), batch_size=1), [lsim.LogitLens(), lsim.Cosine()]
    here = lsim.analyze(tiny_llama(), data, analyzers, intervals=True)
    opened = [lsim.open_model(small.model(), remote=small.url, tokens_per_request=tokens) for tokens in (6, 1000)]
    reports = [lsim.analyze(model, data, analyzers, intervals=True) for model in opened]
    requests = [report["cosine"].provenance.options["remote"][0]["requests"] for report in reports]
    # Two passes over the data: the first keeps no blocks of its own, but its sums have the same order.
    assert requests[0] > requests[1] >= 5
    path = tmp_path / "lens.run"
    lsim.analyze(opened[1], data, analyzers, intervals=True, blocking=False).save(path)
    collected = lsim.load_run(path).result(timeout=1200)
    for name in here:
        assert equal_to_the_last_bit(reports[0][name], reports[1][name])
        assert equal_to_the_last_bit(reports[0][name], collected[name])
        assert here[name].block_tokens == (12,) * 5 == reports[0][name].block_tokens
        for one, other in zip(here[name].replicates, reports[0][name].replicates, strict=True):
            assert worst(one, other) < 1e-5


def test_a_stream_of_unknown_length_begins_with_blocks_of_one_batch(small, few_blocks):
    data = lsim.Data((row for row in random_tokens(10, 6)), batch_size=1)
    report = lsim.analyze(lsim.open_model(small.model(), remote=small.url), data, lsim.LogitLens(), intervals=True)
    assert report["logit_lens"].block_tokens == (12,) * 5


def test_two_models_of_which_one_is_on_a_server_have_intervals(small):
    data, cka = list(random_tokens(64, 8)), lsim.CKA(minibatch=8)
    here = lsim.compare(tiny_llama(), tiny_llama(seed=1), lsim.Data(data, batch_size=2), cka, intervals=True)
    there = lsim.compare(
        lsim.open_model(small.model(), remote=small.url), tiny_llama(seed=1), lsim.Data(data, batch_size=2), cka, intervals=True
    )
    assert here.block_tokens == there.block_tokens == (16 * 8,) * 4
    assert float((here.interval().low - there.interval().low).abs().max()) < 1e-4
