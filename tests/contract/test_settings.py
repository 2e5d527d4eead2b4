"""Numbers of every class of settings that is discovered: NaN, infinities and negative numbers are refused by name."""

from __future__ import annotations

import math
from dataclasses import MISSING, fields, is_dataclass
from typing import get_args, get_type_hints

import pytest

import tl_layersim as lsim
from tl_layersim.analyzers import find_analyzers
from tl_layersim.engine.fit_linear_probes import LogisticProbe

# Limits that may be infinite, for none.
LIMITS = ("clip", "max_memory_gb")
# Settings of one objective.
OBJECTIVES = {"beta": "cosine-reg", "kl": "multi-head"}
# Settings that are functions.
FUNCTIONS = {"Similarity": {"function": max}}


def numbers_of(cls) -> dict[str, set[type]]:
    """Fields that are numbers, and their types; tuples of numbers count as their numbers."""
    types_of_fields = {}
    for field, hint in get_type_hints(cls).items():
        parts = set()
        for member in get_args(hint) or (hint,):
            parts |= {part for part in get_args(member) or (member,) if part in (int, float)}
        if field in {declared.name for declared in fields(cls)} and parts:
            types_of_fields[field] = parts
    return types_of_fields


OF_PACKAGES = (LogisticProbe, lsim.early_exit.ExitCosts, lsim.stitching.StitchTraining, lsim.training.Continuations)
PUBLIC = [getattr(lsim, name) for name in lsim.__all__]
SETTINGS = {
    cls.__name__: cls
    for cls in (*PUBLIC, *OF_PACKAGES, *find_analyzers().values())
    if is_dataclass(cls) and not issubclass(cls, lsim.Result) and numbers_of(cls)
}
CASES = [(name, field, kinds) for name, cls in SETTINGS.items() for field, kinds in numbers_of(cls).items()]


@pytest.mark.parametrize(("name", "field", "kinds"), CASES, ids=[f"{name}-{field}" for name, field, _ in CASES])
def test_a_number_out_of_bounds_is_refused_by_name(name, field, kinds):
    cls = SETTINGS[name]
    needed = [declared.name for declared in fields(cls) if declared.init and declared.default is MISSING]
    required = {setting: 1 if setting in numbers_of(cls) else "" for setting in needed} | FUNCTIONS.get(name, {})
    objective = {"objective": OBJECTIVES[field]} if name == "AlignedTraining" and field in OBJECTIVES else {}
    refused: list[float] = [-5]
    if float in kinds:
        refused += [-5.0, math.nan, -math.inf] + [math.inf] * (field not in LIMITS)

    for value in refused:
        with pytest.raises(lsim.LayersimError, match=f"`{field}`") as caught:
            cls(**required | objective | {field: value})
        assert str(value) in str(caught.value)

    if field in LIMITS:
        assert getattr(cls(**required | {field: math.inf}), field) == math.inf


def test_settings_are_found():
    assert {"AlignedTraining", "CKA", "ExitCosts", "LinearProbe", "LogisticProbe", "StitchTraining"} <= set(SETTINGS)
    assert len(CASES) > 80
