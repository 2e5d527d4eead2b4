"""95 % intervals contain the true value in 92 to 97 % of simulations with dependent tokens (CKA: 89 to 97 %)."""

from __future__ import annotations

import pytest

from .coverage_simulation import coverage, lengths_of
from .interval_cases import CASES, coverage_of


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


@pytest.mark.parametrize("name", [name for name in CASES if "drift" not in name])
def test_intervals_of_hard_statistics_cover_the_true_value(name):
    """Of rare fractions, values near a bound, and statistics of few blocks. The error of a share here is 0.7 %."""
    # Where the data have no event in a quarter of the simulations, their intervals are longer than need be.
    assert 0.91 <= coverage_of(name, 1000).now <= (0.99 if name == "fraction of .001, 64 texts" else 0.97)


def test_symmetric_intervals_of_rare_fractions_do_not():
    assert coverage_of("fraction of .001", 1000).symmetric < 0.88


def test_drift_between_texts_is_warned_of():
    assert coverage_of("drift of .95 between texts, 64 texts", 500).warned > 0.6
    assert coverage_of("mean of skewed numbers", 500).warned < 0.04
