"""On real pretrained models: linear probes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from .. import oracles
from .files import optional_real


@pytest.fixture(scope="module")
def minilm():
    from transformers import AutoModel, AutoTokenizer

    folder = optional_real("models", "all-minilm-l6-v2")
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    model.tokenizer = AutoTokenizer.from_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def sst2() -> tuple[list[str], list[int]]:
    lines = optional_real("sets", "sst2/test.tsv").read_text().splitlines()[1:101]
    texts, labels = zip(*(line.split("\t") for line in lines), strict=True)
    return list(texts), [int(label) for label in labels]


def means(model, texts) -> np.ndarray:
    """`layer text width`: the mean over the tokens of each text, by the model's own `hidden_states`."""
    parts = []
    for text in texts:
        with torch.no_grad():
            states = model(**model.tokenizer(text, return_tensors="pt"), output_hidden_states=True).hidden_states
        parts.append(torch.stack([state[0].double().mean(0) for state in states]))
    return torch.stack(parts, dim=1).numpy()


def test_sentiment_is_read_from_a_sentence_encoder_above_chance(minilm, sst2):
    texts, labels = sst2
    found = lsim.linear_probe(minilm, lsim.Data(texts, positions="mean"), lsim.LinearProbe(labels=labels))
    x = means(minilm, texts)
    expected = oracles.oracle_linear_probe([x], labels, list(range(100)))
    # Float32 activations: a score near a tie may fall to either side.
    np.testing.assert_allclose(found.accuracy, expected["values"], atol=1.5 / float(found.test_samples.sum()))
    np.testing.assert_allclose(found.train_accuracy, expected["train_accuracy"], atol=1.5 / float(found.samples.sum()))
    assert found.accuracy.max() > found.majority
    # As many dimensions as samples: the probe fits what it does not predict.
    assert (found.train_accuracy > found.accuracy).all()


def test_a_probe_is_fitted_on_one_part_of_sst2_and_tested_on_the_other(minilm, sst2):
    texts, labels = sst2
    data = lsim.Data({"text": texts[:60], "label": labels[:60]}, positions="mean")
    test = {"text": texts[60:], "label": labels[60:]}
    ridge, logistic = (
        lsim.linear_probe(minilm, data, probe(labels="data"), test_data=test)
        for probe in (lsim.LinearProbe, lsim.LogisticProbe)
    )
    assert ridge.test_samples.sum() == logistic.test_samples.sum() == 40
    np.testing.assert_allclose(ridge.accuracy, logistic.accuracy, atol=0.2)
    other = data.like({"text": texts[:60], "label": labels[30:60] + labels[:30]})
    guess = lsim.linear_probe(minilm, other, test_data=test)
    assert guess.accuracy.mean() < ridge.accuracy.mean()
