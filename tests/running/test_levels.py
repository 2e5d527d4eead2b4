"""The design of the light cases of a product."""

from __future__ import annotations

from itertools import product

import pytest

from .levels import covering_design


@pytest.mark.parametrize("kept", [lambda case: True, lambda case: case[0] < case[1]], ids=["whole product", "a part of it"])
def test_every_value_is_in_a_light_case(kept):
    cases = [frozenset(enumerate(case)) for case in product(range(4), range(6), range(3)) if kept(case)]
    light = covering_design(cases)
    assert set().union(*(cases[index] for index in light)) == set().union(*cases)
    # As many cases as the longest axis has values, or little more where values do not meet.
    assert len(light) <= 7


def test_the_case_of_one_parameter_is_light():
    assert covering_design([frozenset({("name", name)}) for name in "abc"]) == {0, 1, 2}
