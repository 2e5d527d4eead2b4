"""The vision models that ship: small, trained as their README says, and better in shallow layers after aligned training."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

import tl_layersim as lsim
from tl_layersim import demo
from tl_layersim.demo import demo_images, demo_vision_model

FOLDER = Path(demo.__file__).parent / "vision"


@pytest.fixture(scope="module")
def lenses():
    """The lens of the usual and of the aligned model."""
    images = demo_images()
    models = [demo_vision_model(aligned) for aligned in (False, True)]
    return [
        lsim.analyze(model, lsim.Data(images, batch_size=100), lsim.LogitLens(labels="data"))["logit_lens"] for model in models
    ]


def test_both_are_small_and_complete():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 1e6
    for folder in (FOLDER, FOLDER / "aligned"):
        assert (folder / "config.json").is_file()


def test_train_and_test_images_are_all_digits_once():
    train, test = demo_images("train"), demo_images("test")
    assert len(train["labels"]) + len(test["labels"]) == 1797
    assert torch.equal(test["pixel_values"], demo_images()["pixel_values"])
    assert float(train["pixel_values"].min()) == -1.0
    assert float(train["pixel_values"].max()) == 1.0


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("aligned", [False, True])
def test_accuracy_of_each_block_is_what_the_readme_says(lenses, aligned):
    with (FOLDER / "aligned" / "accuracy.csv" if aligned else FOLDER / "accuracy.csv").open() as file:
        rows = list(csv.DictReader(file))
    last = max(int(row["look"]) for row in rows)
    recorded = [float(row["accuracy"]) for row in rows if int(row["look"]) == last]
    # Weights were rounded to float16 after the evaluation.
    assert lenses[aligned].accuracy.tolist() == pytest.approx(recorded, abs=0.005)


@pytest.mark.heavy("a training")
def test_aligned_training_helps_shallow_blocks(lenses):
    usual, aligned = (lens.accuracy for lens in lenses)
    assert float(usual[-1]) > 0.9
    assert float(aligned[-1]) > 0.9
    assert bool((aligned[:3] > usual[:3]).all())


def test_predictions_are_those_of_the_whole_model(lenses):
    images = demo_images()
    with torch.no_grad():
        hits = demo_vision_model()(images["pixel_values"]).logits.argmax(-1) == images["labels"]
    assert float(hits.double().mean()) == pytest.approx(float(lenses[0].accuracy[-1]))
