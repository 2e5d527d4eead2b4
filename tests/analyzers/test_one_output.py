"""Heads with one output: a softmax over it is 1, so what reads probabilities refuses them, on every way to it."""

from __future__ import annotations

import math

import pytest
import torch

import tl_layersim as lsim

from ..models.input_models import image_vit, pair_bert, pair_data, pixels
from ..models.wrapped_models import nnsight

ROWS = 6
SAYS = r"head has one output(.|\n)*TaskMetrics\(labels=scores\)"
CLASSES = torch.zeros(ROWS, dtype=torch.long)


@pytest.mark.parametrize(
    "analyzer",
    [lsim.LogitLens(labels="none"), lsim.LogitLens(labels=CLASSES), lsim.Saturation(), lsim.ExitCurve(labels="none")],
    ids=lambda analyzer: type(analyzer).__name__,
)
def test_measures_of_probabilities_refuse_it(analyzer):
    with pytest.raises(lsim.LayersimError, match=SAYS):
        lsim.analyze(pair_bert(labels=1), pair_data(ROWS), analyzer)


def test_it_is_refused_on_a_server():
    with pytest.raises(lsim.LayersimError, match="head has one output"):
        lsim.analyze(lsim.open_model(nnsight(pair_bert(labels=1)), remote="local"), pair_data(ROWS), lsim.Saturation())


@pytest.mark.parametrize(("rule", "threshold"), [("max-prob", 0.9), ("margin", 0.9), ("patience", 2)])
def test_early_exit_by_predictions_refuses_it(rule, threshold):
    with pytest.raises(lsim.LayersimError, match=SAYS):
        lsim.EarlyExit(pair_bert(labels=1), threshold, rule=rule)


def test_early_exit_by_residuals_takes_it():
    model = pair_bert(labels=1)
    inputs = pair_data(ROWS)
    exits = lsim.EarlyExit(model, 1.0, rule="cosine").logits(inputs["input_ids"], inputs["attention_mask"])

    assert exits.logits.shape == (ROWS, 1)


@pytest.mark.parametrize("objective", ["aligned", "multi-head"])
def test_training_refuses_it(objective):
    settings = lsim.AlignedTraining(steps=1, objective=objective)
    with pytest.raises(lsim.LayersimError, match=SAYS):
        lsim.finetune_aligned(pair_bert(labels=1), pair_data(ROWS) | {"labels": CLASSES}, settings)


def test_the_aligned_loss_and_the_layers_of_two_models_refuse_it():
    model = pair_bert(labels=1)
    inputs = pair_data(ROWS)
    ids = inputs.pop("input_ids")
    mask = inputs.pop("attention_mask")

    with pytest.raises(lsim.LayersimError, match=SAYS):
        lsim.training.aligned_loss(model, ids, labels=CLASSES, attention_mask=mask, inputs=inputs)
    with pytest.raises(lsim.LayersimError, match=SAYS):
        lsim.evaluate_layers(model, pair_bert(labels=1), pair_data(ROWS) | {"labels": CLASSES})


def test_a_skipped_block_has_no_effect_on_its_probabilities():
    result = lsim.analyze(image_vit(labels=1), pixels(4), lsim.SkipEffect())["skip_effect"]
    assert all(math.isnan(value) for value in result.probability_change.tolist())
    assert bool((result.values.nan_to_num() > 0).any())


def test_scores_beside_the_rows_are_to_be_passed_as_a_tensor():
    with pytest.raises(lsim.LayersimError, match=SAYS.replace("head has one output", "`labels` in the data")):
        lsim.analyze(pair_bert(labels=1), pair_data(ROWS) | {"label": torch.rand(ROWS)}, lsim.TaskMetrics(labels="data"))
