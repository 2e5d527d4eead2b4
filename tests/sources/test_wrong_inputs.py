"""Inputs that a model of images or of texts cannot take are refused with what was given, what was expected and what to do."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim

from ..models.input_models import image_vit, pair_bert, pixels
from ..models.tiny_models import random_tokens, tiny_llama
from ..running.options import called


@pytest.mark.parametrize("shape", [(2, 3, 12, 12), (2, 8, 8, 3)])
def test_images_of_another_size(shape):
    with pytest.raises(lsim.LayersimError, match=r"ViTForImageClassification.*pixel_values"):
        lsim.analyze(image_vit(), torch.randn(shape), "cosine")


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_texts_and_images_for_the_other_kind_of_model():
    with pytest.raises(lsim.LayersimError, match=r"`data`.*ViTForImageClassification.*`pixel_values`"):
        lsim.analyze(image_vit(), ["a text", "another"], "cosine")
    with pytest.raises(lsim.LayersimError, match=r"takes `pixel_values`, but the data are tokens"):
        lsim.analyze(image_vit(), random_tokens(), "cosine")
    with pytest.raises(lsim.LayersimError, match=r"`data`.*\(6, 3, 8, 8\).*BertForSeq.*`input_ids`"):
        lsim.analyze(pair_bert(), pixels(), "cosine")
    with pytest.raises(lsim.LayersimError, match=r"torch\.float32 of shape \(6, 20\).*no token ids.*`input_ids`"):
        lsim.analyze(tiny_llama(), {"input_ids": torch.rand(6, 20)}, "cosine")
    with pytest.raises(lsim.LayersimError, match=r"`data`.*\['x'\].*`pixel_values`"):
        lsim.analyze(image_vit(), {"x": pixels()}, "cosine")
    with pytest.raises(lsim.LayersimError, match=r"`data`.*\['pixel_values'\]"):
        lsim.analyze(tiny_llama(), {"pixel_values": pixels()}, "cosine")
    with pytest.raises(lsim.LayersimError, match=r"takes `pixel_values`, but the data are tokens"):
        lsim.compare(pair_bert(), image_vit(), lsim.Data(random_tokens(), positions="all"), lsim.CKA(minibatch=16))


@pytest.mark.parametrize("wrong", [3, -1])
def test_labels_that_are_no_classes(wrong):
    labels = torch.full((6,), wrong)
    for data, own in ((pixels(), labels), ({"pixel_values": pixels(), "labels": labels}, "data")):
        with pytest.raises(lsim.LayersimError, match=rf"`labels` .* {wrong} to {wrong}\b.*0 to 2"):
            lsim.analyze(image_vit(), data, lsim.LogitLens(labels=own))
    with pytest.raises(lsim.LayersimError, match=r"`labels`.* -1 to -1"):
        lsim.analyze(image_vit(), pixels(), lsim.NeuralCollapse(labels=torch.full((6,), -1)))


def conv():
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(4, 3)).eval().double()


@pytest.mark.parametrize(
    ("make", "name", "options"),
    [(image_vit, "pixel_values", {}), (conv, "input", {"at": ["0", "1"], "positions": "mean"})],
    ids=["vit", "cnn"],
)
def test_images_by_another_name_or_without_a_name(make, name, options):
    cosine = lsim.Cosine(center="none")
    model, x, y = make(), pixels(), torch.arange(6) % 3
    expected = called(lsim.analyze, model, {name: x}, cosine, **options)["cosine"].values
    with pytest.raises(lsim.LayersimError, match=r"`data`.*'x', 'label'") as error:
        called(lsim.analyze, model, {"x": x, "label": y}, cosine, **options)
    assert name in str(error.value)
    named = called(lsim.analyze, model, {"x": x, "label": y}, cosine, column="x", **options)["cosine"].values
    assert torch.equal(named, expected)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=3)
    for data in ((x, y), loader):
        with pytest.raises(lsim.LayersimError, match=r"`data`.* 2 unnamed") as error:
            called(lsim.analyze, model, data, cosine, **options)
        assert f"'{name}'" in str(error.value)
        assert "token" not in str(error.value)
    batches = [{name: a, "label": b} for a, b in loader]
    torch.testing.assert_close(called(lsim.analyze, model, batches, cosine, **options)["cosine"].values, expected)


def test_images_of_bytes_for_a_model_without_a_processor():
    images = torch.randint(0, 256, (4, 8, 8, 3), dtype=torch.uint8)
    for data in (images, images.numpy(), images.long()):
        with pytest.raises(lsim.LayersimError, match=r"`data`.*\(4, 8, 8, 3\).*`input`"):
            lsim.analyze(conv(), data, "cosine", at=["0"])
    found = lsim.analyze(conv(), lsim.Data(images.float().div(255).movedim(-1, -3), positions="mean"), "cosine", at=["0"])
    assert found["cosine"].provenance.sequences == 4
