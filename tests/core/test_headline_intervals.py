"""The margins of headline numbers, without a model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from scipy import stats

from tl_layersim.core.intervals import headline_margins, headline_texts


def headlines(whole: float, *without: float) -> SimpleNamespace:
    each = [SimpleNamespace(headline=lambda x=x: {"x": x}) for x in without]
    return SimpleNamespace(
        has_intervals=True, replicates=each, block_tokens=(1,) * len(each), headline=lambda: {"x": whole}, untrained=()
    )


def test_a_margin_is_half_the_width_of_the_interval():
    # About the mean of 1.2, 1.5 and 1.7, whatever the number of all data is.
    error = (2 / 3 * ((1.2 - 4.4 / 3) ** 2 + (1.5 - 4.4 / 3) ** 2 + (1.7 - 4.4 / 3) ** 2)) ** 0.5
    margin = headline_margins(headlines(1.5, 1.2, 1.5, 1.7))["x"]
    assert margin == pytest.approx(stats.t.ppf(0.975, 2) * error, rel=1e-12)


def test_counts_alone_have_no_margin():
    assert headline_texts(headlines(4.0, 3.0, 5.0, 4.0)) == {"x": "4"}
    # Whole on all data, or on each part, is not whole on both.
    assert " ± " in headline_texts(headlines(4.0, 3.5, 4.5, 4.0))["x"]
    assert " ± " in headline_texts(headlines(4.5, 4.0, 5.0, 5.0))["x"]


def test_a_margin_that_is_rounding_is_not_shown():
    assert headline_texts(headlines(0.5, 0.5 + 1e-15, 0.5, 0.5)) == {"x": "0.5"}
    assert headline_texts(headlines(0.5, 0.5, 0.5, 0.5)) == {"x": "0.5"}
    assert headline_texts(headlines(0.0, 0.0, 0.0)) == {"x": "0"}
    assert " ± " in headline_texts(headlines(0.5, 0.5 + 1e-9, 0.5, 0.5))["x"]
