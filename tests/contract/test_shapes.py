"""Tensors that users pass to public calls: shape and kind are checked by the annotation, and refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import tl_layersim as lsim
from tl_layersim.lens import ExitHeads

from ..models.tiny_models import random_tokens, tiny_llama

IDS = random_tokens(2, 6)
PIXELS = torch.randn(2, 3, 8, 8)
EYE = torch.eye(2)
HEADS = torch.zeros(2, 5, 3)
# By case: the call, the argument, its shape (None for what is no tensor), and dimensions that are expected.
CASES = {
    "ids of three dimensions": (lambda m: lsim.training.aligned_loss(m, IDS[None]), "tokens", (1, 2, 6), "batch pos"),
    "ids of one row": (lambda m: lsim.training.aligned_loss(m, IDS[0]), "tokens", (6,), "batch pos"),
    "floats of two": (lambda m: lsim.training.aligned_loss(m, IDS.float()), "tokens", (2, 6), "batch pos"),
    "floats of three": (lambda m: lsim.training.aligned_loss(m, PIXELS[0]), "tokens", (3, 8, 8), "batch channel height width"),
    "mask of the loss": (
        lambda m: lsim.training.aligned_loss(m, IDS, attention_mask=IDS[:, 1:]),
        "attention_mask",
        (2, 5),
        "pos=6",
    ),
    "ids to exit": (lambda m: lsim.EarlyExit(m).logits(IDS[0]), "tokens", (6,), "batch pos"),
    "text to exit": (lambda m: lsim.EarlyExit(m).logits("text"), "tokens", None, "batch pos"),
    "mask to exit": (lambda m: lsim.EarlyExit(m).logits(IDS, IDS[:1]), "attention_mask", (1, 6), "batch=2"),
    "prompt": (lambda m: lsim.EarlyExit(m).generate(IDS.float()), "prompt", (2, 6), "batch pos"),
    "number as prompt": (lambda m: lsim.EarlyExit(m).generate(3), "prompt", None, "batch pos"),
    "mask of a prompt": (lambda m: lsim.EarlyExit(m).generate(IDS, attention_mask=IDS[0]), "attention_mask", (6,), "batch pos"),
    "vector as weight": (lambda m: lsim.stitching.Adapter("linear", EYE[0]), "weight", (2,), "d_back d_front"),
    "integers as weight": (lambda m: lsim.stitching.Adapter("linear", EYE.long()), "weight", (2, 2), "floating-point"),
    "dict as weight": (lambda m: lsim.stitching.Adapter("linear", {}), "weight", None, "d_back d_front"),
    "array as weight": (lambda m: lsim.stitching.Adapter("linear", np.eye(2)), "weight", None, "d_back d_front"),
    "long bias": (lambda m: lsim.stitching.Adapter("affine", EYE, torch.zeros(3)), "bias", (3,), "d_back=2"),
    "number as kind": (lambda m: lsim.stitching.Adapter(3), "kind", None, "str"),
    "module as adapter": (lambda m: lsim.stitch(m, m, IDS, at=(0, 0), adapter=nn.Linear(2, 2)), "adapter", None, "Adapter"),
    "matrix as heads": (lambda m: ExitHeads(HEADS[0]), "weight", (5, 3), "layer vocabulary d_model"),
    "integers as heads": (lambda m: ExitHeads(HEADS.long()), "weight", (2, 5, 3), "floating-point"),
    "biases of heads": (lambda m: ExitHeads(HEADS, HEADS[0]), "bias", (5, 3), "layer=2"),
    "vector as centre": (lambda m: lsim.Cosine(center=EYE[0]), "center", (2,), "residual d_model"),
}


@pytest.mark.parametrize("case", CASES)
def test_an_argument_of_another_shape_is_refused_by_name_and_shape(case):
    call, argument, shape, expected = CASES[case]
    with pytest.raises(lsim.LayersimError, match=f"`{argument}`") as caught:
        call(tiny_llama())
    assert isinstance(caught.value, TypeError)
    assert shape is None or str(shape) in str(caught.value)
    assert expected in str(caught.value)
