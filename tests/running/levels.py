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

import functools
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType

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


# Names of models of TransformerLens; `HookedSource` is a class of this package.
TRANSFORMER_LENS = re.compile(r"transformer_?lens|hooked_?(transformer|encoder)|bridge", re.IGNORECASE)


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


def mark_transformer_lens(items: Iterable[pytest.Item]) -> None:
    """Mark tests that build a model of TransformerLens: those that `make test-tl3` runs with version 3."""
    for item in items:
        if isinstance(item, pytest.Function) and builds_transformer_lens(item):
            item.add_marker(pytest.mark.tl3)


def builds_transformer_lens(test: pytest.Function) -> bool:
    """Whether a test, its fixtures, a value of its case or a function of the tests that these call name TransformerLens.

    The models of a collection, such as all sources, count for a test that does not take one of them as a parameter.
    """
    values = list(_parameters(test).values())
    if TRANSFORMER_LENS.search(test.name) or any(_leads_to_transformer_lens(value) for value in values):
        return True
    fixtures = [definitions[-1].func for definitions in test._fixtureinfo.name2fixturedefs.values()]
    for function in (test.function, *fixtures):
        named, collections = _reached_by(function)
        if named:
            return True
        for collection in collections:
            chosen = isinstance(collection, Mapping) and any(isinstance(key, str) and key in collection for key in values)
            if not chosen and _leads_to_transformer_lens(collection):
                return True
    return False


@functools.cache
def _reached_by(function: FunctionType) -> tuple[bool, list[Mapping | Sequence]]:
    """Whether a function or one of the tests that it calls names TransformerLens, and the collections that they use."""
    collections: dict[int, Mapping | Sequence] = {}
    waiting, seen = [function], set()
    while waiting:
        reached = waiting.pop()
        if reached in seen or not isinstance(reached, FunctionType) or not reached.__module__.startswith("tests."):
            continue
        seen.add(reached)
        names = set(_names(reached.__code__))
        if any(TRANSFORMER_LENS.search(name) for name in names):
            return True, []
        for value in (reached.__globals__[name] for name in names if name in reached.__globals__):
            if isinstance(value, FunctionType):
                waiting.append(value)
            elif isinstance(value, Mapping | list | tuple):
                collections[id(value)] = value
            elif isinstance(value, str) and TRANSFORMER_LENS.search(value):
                return True, []
    return False, list(collections.values())


# By the address of a collection: collections of modules and of cases live as long as the tests.
_leading: dict[int, bool] = {}


def _leads_to_transformer_lens(value: object) -> bool:
    """Whether a string, a function or a part of a collection names TransformerLens."""
    if isinstance(value, str):
        return TRANSFORMER_LENS.search(value) is not None
    if isinstance(value, FunctionType):
        named, collections = _reached_by(value)
        return named or any(_leads_to_transformer_lens(collection) for collection in collections)
    if not isinstance(value, Mapping | list | tuple):
        return False
    if id(value) not in _leading:
        # A collection may hold itself.
        _leading[id(value)] = False
        parts = [*value, *value.values()] if isinstance(value, Mapping) else value
        _leading[id(value)] = any(_leads_to_transformer_lens(part) for part in parts)
    return _leading[id(value)]


def _names(code: CodeType) -> Iterator[str]:
    """Names that code uses, and its strings; of nested functions too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _names(constant)
