"""Inputs that a model of images or of texts cannot take are refused with what was given, what was expected and what to do."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim

from ..input_models import image_vit, pair_bert, pixels
from ..tiny_models import random_tokens
from .helpers import nnsight

EVERY = pytest.mark.parametrize("wrap", [lambda model: model, nnsight], ids=["module", "nnsight"])


@EVERY
@pytest.mark.parametrize(
    ("shape", "given", "do"),
    [
        ((2, 3, 12, 12), "3 x 12 x 12", "tokenizer=processor"),
        ((2, 1, 8, 8), "1 x 8 x 8", "tokenizer=processor"),
        ((2, 8, 8, 3), "8 x 8 x 3", r"movedim\(-1, 1\), which puts channels first"),
    ],
)
def test_images_of_another_size(wrap, shape, given, do):
    with pytest.raises(
        lsim.LayersimError, match=rf"`pixel_values` do not have the size(.|\n)*{given}(.|\n)*3 x 8 x 8(.|\n)*{do}"
    ):
        lsim.analyze(wrap(image_vit()), torch.randn(shape), "cosine")


def test_texts_and_images_for_the_other_kind_of_model():
    with pytest.raises(lsim.LayersimError, match=r"takes `pixel_values`, and the data are texts(.|\n)*tokenizer=processor"):
        lsim.analyze(image_vit(), ["a text", "another"], "cosine")
    with pytest.raises(lsim.LayersimError, match=r"takes `pixel_values`, and the data are tokens"):
        lsim.analyze(image_vit(), random_tokens(), "cosine")
    with pytest.raises(lsim.LayersimError, match=r"images, features or embeddings, and BertForSeq(.|\n)*takes token ids"):
        lsim.analyze(pair_bert(), pixels(), "cosine")
    with pytest.raises(lsim.LayersimError, match=r"takes `pixel_values`, and the data are tokens"):
        lsim.compare(pair_bert(), image_vit(), random_tokens(), lsim.CKA(minibatch=16), positions="all")


@pytest.mark.parametrize("wrong", [3, -1])
def test_labels_that_are_no_classes(wrong):
    labels = torch.full((6,), wrong)
    for data, own in ((pixels(), labels), ({"pixel_values": pixels(), "labels": labels}, "data")):
        with pytest.raises(lsim.LayersimError, match=rf"cannot predict(.|\n)*from {wrong} to {wrong}(.|\n)*0 to 2"):
            lsim.analyze(image_vit(), data, lsim.LogitLens(labels=own))
    with pytest.raises(lsim.LayersimError, match=r"no classes(.|\n)*from -1 to -1(.|\n)*numbered from 0"):
        lsim.analyze(image_vit(), pixels(), lsim.NeuralCollapse(labels=torch.full((6,), -1)))
