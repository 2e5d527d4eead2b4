"""The two levels of tests: `make test` runs the light ones, `make test-all` the heavy ones too.

A test that uses a fixture of `HEAVY_FIXTURES` is heavy, and so is an example of a docstring that runs a model. Three markers
say it of other tests:

    @pytest.mark.heavy("a simulation")  # all of its cases; of a module: pytestmark = pytest.mark.heavy(...)

    @pytest.mark.light("cka", "rsa")  # all cases but those with these ids; without an id none, whatever the fixtures
    @pytest.mark.parametrize("name", MEASURES)

    @pytest.mark.covering  # light: every source and every analyzer once; heavy: all other pairs
    @pytest.mark.parametrize("source", SOURCES)
    @pytest.mark.parametrize("name", MEASURES)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence

import pytest
from _pytest.doctest import DoctestItem

# The fixture, and why the tests that use it are heavy.
HEAVY_FIXTURES = {
    "small": "a server with a socket",
    "cluster": "Ray",
    "site": "the built documentation",
    "browser": "a browser",
    "gallery": "executed documentation",
}


def covering_design(cases: Sequence[frozenset[Hashable]]) -> set[int]:
    """Indices of cases that together have every value of all cases; greedy, the first of equals.

    Examples:
        >>> covering_design([frozenset(case) for case in ("ax", "ay", "bx", "by", "cx", "cy")])
        {0, 3, 4}
    """
    missing = set().union(*cases)
    chosen = set()
    while missing:
        best = max(range(len(cases)), key=lambda index: len(cases[index] & missing))
        chosen.add(best)
        missing -= cases[best]
    return chosen


def mark_heavy_cases(items: Iterable[pytest.Item]) -> None:
    """Mark tests with a heavy fixture, examples that run models, and the cases that `light` and `covering` leave out."""
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("light") or item.get_closest_marker("covering"):
            tests[item.nodeid.partition("[")[0]].append(item)
            continue
        if isinstance(item, DoctestItem) and any("model" in example.source for example in item.dtest.examples):
            item.add_marker(pytest.mark.heavy("executed documentation"))
        for fixture in HEAVY_FIXTURES.keys() & _fixtures(item):
            item.add_marker(pytest.mark.heavy(HEAVY_FIXTURES[fixture]))
    for name, every_case in tests.items():
        # HookedTransformer is of TransformerLens 3: `make test-tl3` runs its cases, and all others skip them at once.
        cases = [case for case in every_case if not _is_hooked_transformer(case)]
        if not cases:
            continue
        light = _named_cases(name, cases) if cases[0].get_closest_marker("light") else covering_design([*map(_values, cases)])
        for index, case in enumerate(cases):
            if index not in light:
                case.add_marker(pytest.mark.heavy("a further case"))


def _fixtures(item: pytest.Item) -> set[str]:
    """Names of the fixtures that a test uses, without those of its parameters."""
    return set(getattr(item, "fixturenames", ())) - set(_parameters(item))


def _parameters(item: pytest.Item) -> Mapping[str, object]:
    """Names and values of the parameters of a case."""
    return item.callspec.params if hasattr(item, "callspec") else {}


def _is_hooked_transformer(case: pytest.Item) -> bool:
    # A value may be an array, which has no single truth.
    return any(isinstance(value, str) and value == "HookedTransformer" for value in _parameters(case).values())


def _named_cases(name: str, cases: list[pytest.Function]) -> set[int]:
    ids = cases[0].get_closest_marker("light").args
    if not ids:
        return set(range(len(cases)))
    light = {index for index, case in enumerate(cases) if case.callspec.id in ids}
    # A run of chosen cases may lack those that are named.
    if not light and len(cases) > len(ids):
        raise pytest.UsageError(f"`light` of {name} names {ids}, which are no cases.")
    return light


def _values(case: pytest.Function) -> frozenset[Hashable]:
    """Name and value of each parameter that the marker names, or of each parameter if it names none."""
    parameters = _parameters(case)
    names = case.get_closest_marker("covering").args or parameters
    return frozenset((name, _key(parameters[name])) for name in names)


def _key(value: object) -> Hashable:
    return value if isinstance(value, str | int | float | None) else id(value)
