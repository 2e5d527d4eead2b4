"""95 % intervals contain the true value in 92 to 97 % of simulations with dependent tokens (CKA: 89 to 97 %)."""

from __future__ import annotations

import pytest

from .coverage_simulation import coverage, lengths_of

pytestmark = pytest.mark.heavy("a simulation")


@pytest.fixture(scope="module", params=[False, True], ids=["equal texts", "texts of 8 to 120 tokens"])
def found(request):
    return coverage(lengths_of(24, 4, request.param), simulations=500, seed=1)


def test_intervals_of_a_mean_a_ratio_and_a_quantile_cover_the_true_value(found):
    for name in ("mean", "CKA", "median"):
        # CKA of few short texts a batch is skewed: docs/intervals.md says how much is covered. The error here is 1.2 %.
        least = 0.89 if name == "CKA" else 0.92
        assert least <= found[name]["coverage"] <= 0.97, (name, found[name])
        assert 0.9 <= found[name]["ratio"] <= 1.1, (name, found[name])
        assert found[name]["blocks"] == 24


def test_intervals_that_take_tokens_for_independent_do_not(found):
    assert found["mean"]["naive"] < 0.65
    assert found["median"]["naive"] < 0.7
