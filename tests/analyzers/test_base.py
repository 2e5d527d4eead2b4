"""Analyzers of a user's own: what is wrong with one is named."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analyzers import Analyzer

from ..models.tiny_models import random_tokens, tiny_llama


def analyzer(**parts):
    """An analyzer made of a kernel and a compute, as a user might write it badly."""
    body = {"name": "mine", "kernel": lambda self, first: parts["give"], "compute": lambda self, sums, run: parts.get("back")}
    return dataclasses.dataclass(frozen=True)(type("Mine", (Analyzer,), body | parts.get("body", {})))()


def grows(view):
    return {"x": view.activations.sum((0, 2))}


BAD_ANALYZERS = {
    "a class": (lambda: lsim.CKA, "`analyzers`.* CKA"),
    "a kernel of numbers": (lambda: analyzer(give=lambda v: {"x": 1.0}), "'mine'.*'x'.*float"),
    "a name of numbers": (lambda: analyzer(give=grows, body={"name": 3}), "`name`.*Mine is 3"),
    "a slash in its name": (lambda: analyzer(give=grows, body={"name": "a/b"}), "`name`.*Mine is 'a/b'"),
    "no result": (
        lambda: analyzer(give=lambda v: {"n": torch.tensor(1)}, back=torch.zeros(3)),
        "Mine.compute returned a tensor",
    ),
    "sums that grow": (lambda: analyzer(give=grows), r"'x'.*\(18,\).*\(5,\)"),
    "a set of options": (
        lambda: analyzer(give=grows, body={"__annotations__": {"which": set}, "which": frozenset({1})}),
        "`which` is frozenset",
    ),
    "an option of the data": (
        lambda: analyzer(give=grows, body={"__annotations__": {"pack": bool}, "pack": True}),
        "Mine has the option pack",
    ),
}


@pytest.mark.parametrize("case", BAD_ANALYZERS)
def test_a_bad_analyzer_is_named(case):
    make, text = BAD_ANALYZERS[case]
    with pytest.raises((lsim.LayersimError, ValueError), match=text):
        lsim.analyze(tiny_llama(), lsim.Data([*random_tokens(2, 9), random_tokens(1, 5)[0]], batch_size=2), [make()])
