"""The design of the light cases of a product, and the tests that `make test-tl3` runs."""

from __future__ import annotations

from itertools import product

import pytest

from ..models.tiny_models import tiny_llama
from ..models.wrapped_models import bridge
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


# Of TransformerLens, and of Hugging Face. The names of these tests say neither, as they would be marked for that.
SOURCES = {"TransformerBridge": lambda: bridge(tiny_llama()), "module": tiny_llama}


def first_source():
    return next(iter(SOURCES.values()))


@pytest.mark.parametrize("source", SOURCES)
def test_the_case_of_a_model_of_that_library_is_marked(source, request):
    assert source in SOURCES
    marked = request.node.get_closest_marker("tl3") is not None
    assert marked is (source != "module")


def test_a_test_is_marked_for_what_its_functions_build(request):
    assert callable(first_source())
    assert request.node.get_closest_marker("tl3")
