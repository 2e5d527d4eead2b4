"""A source of one's own: what it must implement, and what is refused if it implements no more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.remote.open_model import open_source
from tl_layersim.sources import Source

from ..models.tiny_models import random_tokens, tiny_llama


class Own(Source):
    """A source with `model` and `run` alone."""

    def __init__(self, **described) -> None:
        self._inner = open_source(tiny_llama())
        self._described = described

    @property
    def model(self):
        return replace(self._inner.model, **({"head": None, "calls": "none", "source": "Own"} | self._described))

    def run(self, batch, kernels):
        return self._inner.run(batch, kernels)


def test_model_and_run_are_enough():
    assert Source.__abstractmethods__ == {"model", "run"}
    own, expected = (lsim.analyze(model, random_tokens(6, 20), [lsim.Cosine(), lsim.CKA()]) for model in (Own(), tiny_llama()))
    for name in ("cosine", "cka"):
        np.testing.assert_array_equal(own[name].values, expected[name].values)
    assert own["cka"].provenance.source == "Own"


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda data: lsim.compare(Own(), tiny_llama(), data, lsim.CKA()), "Own"),
        (lambda data: lsim.analyze(Own(), data, [lsim.CKA()], at="attn_out"), "`at` is 'attn_out'"),
        (lambda data: lsim.analyze(Own(), data, [lsim.Contribution()]), "Contribution reads"),
        (lambda data: lsim.analyze(Own(), data, [lsim.LogitLens()]), "LogitLens"),
        (lambda data: lsim.analyze(Own(head=open_source(tiny_llama()).model.head), data, [lsim.LogitLens()]), "CanUnembed"),
        (lambda data: lsim.analyze(Own(), data, [lsim.SkipEffect()]), "SkipEffect"),
        (lambda data: lsim.analyze(Own(calls="gradients"), data, [lsim.SkipEffect()]), "`calls`.*'gradients'"),
        (lambda data: lsim.analyze(Own(), {"pixel_values": torch.randn(2, 3, 8, 8)}, [lsim.CKA()]), "pixel_values"),
        (lambda data: lsim.attach(Own(), [lsim.CKA()]), "Own"),
    ],
)
def test_what_a_source_cannot_do_is_refused(call, named):
    with pytest.raises(lsim.LayersimError, match=named.replace("[", r"\[")):
        call(random_tokens(6, 20))
