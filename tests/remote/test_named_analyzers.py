"""Analyzers under names of the user's own on a server: in waited and kept runs, and between two models."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim

from ..ndif.client import equal, rows
from ..options import called

pytestmark = [pytest.mark.filterwarnings("ignore:.*(not those here|CKA rests).*:UserWarning")]
NAMED = {
    "raw": lsim.LogitLens(norm="none"),
    "normed": lsim.LogitLens(),
    "small": lsim.CKA(minibatch=8),
    "cka": lsim.CKA(minibatch=16),
}


def test_each_has_the_numbers_of_a_run_of_its_own(small, tmp_path):
    data, options = rows(7, 20), {"remote": small.url, "batch_size": 1}
    report = called(lsim.analyze, small.model(), data, NAMED, **options)
    assert list(report) == list(NAMED)
    for name, analyzer in NAMED.items():
        own = called(lsim.analyze, small.model(), data, analyzer, **options)
        # Beside a measure over pairs of samples, sums are kept apart by 16 rows, and added up in another order.
        torch.testing.assert_close(report[name].values, own[analyzer.name].values, rtol=1e-12, atol=0, msg=name)

    run = called(lsim.analyze, small.model(), data, NAMED, blocking=False, **options)
    run.save(tmp_path / "run")
    # Options of each are restored from the file, although its name is none of an analyzer.
    kept = lsim.load_run(tmp_path / "run")
    assert {name: repr(own) for name, own in kept.analyzers.items()} == {name: repr(own) for name, own in NAMED.items()}
    assert equal(kept.result(60), report)


def test_two_models_on_a_server(small):
    data, options = rows(12, 20), {"batch_size": 6, "remote": small.url}
    both = {"small": lsim.CKA(minibatch=8), "large": lsim.CKA(minibatch=16)}
    report = called(lsim.compare, small.model(), small.model("gpt2"), data, both, **options)
    for name, analyzer in both.items():
        own = called(lsim.compare, small.model(), small.model("gpt2"), data, analyzer, **options)
        assert torch.equal(report[name].values, own.values)
