"""The margins of headline numbers, without a model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from tl_layersim.core import Result, axes
from tl_layersim.core.errors import LayersimError
from tl_layersim.core.intervals import function_interval, headline_margins, headline_texts, interval_of

from ..inputs.views import provenance
from ..oracles import skewness


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Headlines(Result):
    """A result with a headline number and a field of fractions."""

    numbers: dict[str, float]
    values: torch.Tensor = axes()
    curve: torch.Tensor = axes("layer", within=(0, 1))

    def headline(self):
        return self.numbers


def headlines(whole: float, *without: float, name: str = "x", curves: tuple = ()) -> Headlines:
    curves = curves or (torch.full((2,), 0.123).double(),) * (1 + len(without))
    fields = {"values": torch.tensor(math.nan), "layers": ("a", "b", "c"), "provenance": provenance()}
    replicates = tuple(
        Headlines(numbers={name: x}, curve=curve, **fields) for x, curve in zip(without, curves[1:], strict=True)
    )
    return Headlines(
        numbers={name: whole}, curve=curves[0], replicates=replicates, block_tokens=(1,) * len(replicates), **fields
    )


def test_an_entry_of_a_field_has_the_interval_of_the_field():
    curves = tuple(torch.tensor([0.9, 0.02 + 0.004 * j]).double() for j in (0, -2, -1, 1, 2))
    result = headlines(*(float(curve[1]) for curve in curves), curves=curves)

    ends = function_interval(result, lambda headline: headline.curve[1], 0.95)
    expected = interval_of(result, "curve", 0.95)

    assert (float(ends.low), float(ends.high)) == (float(expected.low[1]), float(expected.high[1]))
    assert float(ends.low) > 0
    assert headline_margins(result)["x"] == pytest.approx(float(ends.high - ends.low) / 2)


def test_maxima_and_places_have_no_interval():
    curves = tuple(torch.tensor([0.5 + 0.01 * (j % 2), 0.505]).double() for j in range(5))
    result = headlines(*(float(curve.max()) for curve in curves), curves=curves)
    assert headline_texts(result)["x"] == "0.505"
    for place in (torch.max, torch.argmax):
        assert function_interval(result, lambda headline, place=place: place(headline.curve), 0.95) is None
        with pytest.raises(LayersimError, match="`interval`"):
            interval_of(result, lambda headline, place=place: place(headline.curve), 0.95)
    # A place that is the same in all replicates.
    assert function_interval(result, lambda headline: (headline.curve < 1).sum(), 0.95) is None
    assert function_interval(result, lambda headline: headline.curve.mean(), 0.95) is not None
    assert headline_texts(headlines(0.5, 0.4, 0.6, 0.55, name="highest accuracy, at x")) == {"highest accuracy, at x": "0.5"}


def test_a_margin_is_half_the_width_of_the_interval():
    # About the mean of 1.2, 1.5 and 1.7, whatever the number of all data is.
    error = (2 / 3 * ((1.2 - 4.4 / 3) ** 2 + (1.5 - 4.4 / 3) ** 2 + (1.7 - 4.4 / 3) ** 2)) ** 0.5
    margin = headline_margins(headlines(1.6, 1.2, 1.5, 1.7))["x"]
    expected_error, skew, effective = skewness.moments([1.2, 1.5, 1.7])
    assert expected_error == pytest.approx(error, rel=1e-12)

    low, high = skewness.ends(1.6, error, 2, skew, effective)
    assert margin == pytest.approx((high - low) / 2, rel=1e-9)


def test_counts_alone_have_no_margin():
    assert headline_texts(headlines(4.0, 3.0, 5.0, 4.0)) == {"x": "4"}
    # Whole on all data, or on each part, is not whole on both.
    assert " ± " in headline_texts(headlines(4.0, 3.5, 4.5, 4.0))["x"]
    assert " ± " in headline_texts(headlines(4.5, 4.0, 5.0, 5.0))["x"]


def test_a_number_that_no_block_changes_has_no_margin():
    assert headline_margins(headlines(0.5, 0.5, 0.5, 0.5)) == {}
    assert headline_margins(headlines(4.0, 4.0, 4.0, 4.0)) == {}
    assert list(headline_margins(headlines(0.5, 0.4, 0.6, 0.55))) == ["x"]


def test_a_margin_that_is_rounding_is_not_shown():
    assert headline_texts(headlines(0.5, 0.5 + 1e-15, 0.5, 0.5)) == {"x": "0.5"}
    assert headline_texts(headlines(0.5, 0.5, 0.5, 0.5)) == {"x": "0.5"}
    assert headline_texts(headlines(0.0, 0.0, 0.0)) == {"x": "0"}
    assert " ± " in headline_texts(headlines(0.5, 0.5 + 1e-9, 0.5 - 1e-9, 0.5))["x"]
