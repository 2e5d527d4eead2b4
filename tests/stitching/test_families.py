"""Every family can be entered at every layer."""

from __future__ import annotations

import pytest

import tl_layersim as lsim
from tl_layersim.remote.open_model import open_split_model

from ..models.tiny_models import FAMILIES, family
from .helpers import rows


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("name", FAMILIES)
def test_families_can_be_entered_at_every_layer(name):
    model = family(name)
    second = family(name, 1)
    masked = "Masked" in type(model).__name__
    options = {"labels": rows(4, 10).roll(1, 1)} if masked else {}

    for layer in open_split_model(model).model.layers:
        identical = lsim.stitch(model, model, rows(4, 10), at=(layer, layer), adapter="identity", **options)
        assert identical.penalty == 0.0
        assert lsim.stitch(second, model, rows(4, 10), at=(layer, layer), adapter="identity", **options).penalty != 0.0

    ragged = {"input_ids": [rows(4, 10)[i, : 10 - i].tolist() for i in range(4)]}
    if not masked:
        assert lsim.stitch(model, model, ragged, at=(0, 0), adapter="identity").penalty == 0.0
