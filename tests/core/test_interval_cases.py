"""95 % intervals of statistics for which intervals are hard, of 1000 simulations: the error of a share is 0.7 %."""

from __future__ import annotations

import functools

import pytest

from .interval_cases import CASES, Coverage, coverage_of

RARE = "fraction of .001"
DRIFT = [name for name in CASES if "drift" in name]
# Where 44 and 19 % of samples have no text with a large loss, nothing in the sample shows that there are any.
UNSEEN = {f"losses of 10 in 5 % of texts, {texts} texts": 1 - 0.95**texts for texts in (16, 32)}


@functools.cache
def simulated(name: str) -> Coverage:
    return coverage_of(name, 1000)


@pytest.mark.light(
    "fraction of .3",
    "fraction of .001, 64 texts",
    "normal numbers, 64 texts",
    "difference of .35 and .3",
    "losses of 10 in 5 % of texts, 64 texts",
)
@pytest.mark.parametrize("name", [name for name in CASES if name not in (*DRIFT, *UNSEEN)])
def test_intervals_of_hard_statistics_cover_the_true_value(name):
    # The aim is .92, and twice the error of a share of .92 of 1000 simulations is .017.
    # Where a quarter of the data sets have no event, their intervals are longer than need be.
    assert 0.903 <= simulated(name).now <= (0.99 if name.startswith(RARE) else 0.98)


@pytest.mark.parametrize("name", UNSEEN)
def test_what_no_text_shows_is_not_covered(name):
    assert UNSEEN[name] - 0.06 < simulated(name).now < UNSEEN[name] + 0.04


def test_symmetric_intervals_of_rare_events_cover_too_seldom():
    assert simulated(RARE).symmetric < 0.88


def test_drift_between_few_texts_is_warned_of():
    # Blocks of four texts: what one text shares with the next makes intervals far too short.
    strong, weak = (coverage_of(f"drift of {rho} between texts, 64 texts", 5000) for rho in (".95", ".8"))
    assert strong.now < weak.now < 0.8
    assert strong.warned > 0.85
    # The true share is .507, with an error of .7 % of 5000 simulations.
    assert weak.warned > 0.48


def test_independent_texts_are_seldom_warned_of():
    for name in CASES:
        if name not in DRIFT:
            assert simulated(name).warned < 0.05, name


def test_blocks_of_many_texts_hold_what_drifts():
    many = simulated("drift of .8 between texts, 512 texts")
    assert many.now > 0.9
    assert many.warned < 0.08
