"""On real pretrained models: cosine, CKA and the sources."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from .. import oracles
from ..inputs.views import worst
from ..models.tiny_models import hidden_states
from ..running.options import called
from .files import optional_real
from .helpers import load


def test_cosine_and_cka_equal_their_oracles_on_a_real_model(stories15m, wikitext):
    batch = stories15m.tokenizer(wikitext[:4], return_tensors="pt", truncation=True, max_length=24)["input_ids"]
    states = np.concatenate([hidden_states(stories15m, row) for row in batch], axis=1)
    cosine = oracles.oracle_cosine([states])
    # One minibatch of all tokens.
    cka = oracles.oracle_cka([states - states.mean(1, keepdims=True)], rows=24)
    found = lsim.analyze(stories15m, batch, [lsim.Cosine(), lsim.CKA()])
    np.testing.assert_allclose(found["cosine"].values, cosine["values"], atol=2e-6)
    np.testing.assert_allclose(found["cosine"].norm_ratio, cosine["norm_ratio"], rtol=1e-4)
    np.testing.assert_allclose(found["cosine"].monotone_share, cosine["monotone_share"], atol=1e-9)
    np.testing.assert_allclose(found["cka"].values, cka["values"], atol=2e-5)


@pytest.mark.filterwarnings("ignore:.*few tokens decide")
def test_similarity_to_the_last_layer_rises_with_depth(stories15m, wikitext):
    found = lsim.analyze(stories15m, lsim.Data(wikitext, pack=True, max_tokens=1024), [lsim.Cosine(), lsim.CKA()])
    to_last = found["cosine"].values[:, -1]
    assert (to_last.diff() > 0).all()
    assert found["cosine"].monotone_share > 0.5
    assert (found["cka"].values[:, -1].diff() > 0).float().mean() > 0.6


def test_the_first_token_is_an_outlier(stories15m, wikitext):
    with pytest.warns(lsim.LayersimWarning, match="few tokens decide these numbers.*skip_first=1"):
        every = lsim.analyze(stories15m, lsim.Data(wikitext, max_tokens=1024), "cka")["cka"]
    without = lsim.analyze(stories15m, lsim.Data(wikitext, max_tokens=1024, skip_first=1), "cka")["cka"]
    assert (every.values - without.values).abs().max() > 0.05


@pytest.mark.filterwarnings("ignore:CKA treats rows as independent")
def test_shuffled_minibatches_are_near_the_exact_value(stories15m, wikitext):
    options = {"pack": True, "max_tokens": 2048, "skip_first": 1}
    exact = called(lsim.analyze, stories15m, wikitext, lsim.CKA(estimator="exact"), **options)["cka"]
    shuffled = called(lsim.analyze, stories15m, wikitext, lsim.CKA(), **options)["cka"]
    assert (exact.values - shuffled.values).abs().max() < 0.05
    biased = called(lsim.analyze, stories15m, wikitext, lsim.CKA(estimator="biased"), **options)["cka"]
    assert (biased.values > shuffled.values)[~torch.eye(len(exact.values), dtype=torch.bool)].all()


def test_two_runs_of_one_recipe_compare(wikitext):
    a, b = load("stories260K"), load("stories279K-xs")
    across = lsim.compare(a, b, lsim.Data(wikitext, pack=True, max_tokens=2048, skip_first=1), lsim.CKA())
    same = lsim.compare(a, a, lsim.Data(wikitext, pack=True, max_tokens=2048, skip_first=1), lsim.CKA())
    within = lsim.analyze(a, lsim.Data(wikitext, pack=True, max_tokens=2048, skip_first=1), lsim.CKA())["cka"]
    assert worst(same, within) < 1e-9
    assert same.distance() < 1e-3 < across.distance()
    # Layers of like depth are the most alike.
    assert (across.values.argmax(1).diff() >= 0).all()


def test_a_real_sentence_encoder():
    from transformers import AutoModel, AutoTokenizer

    folder = optional_real("models", "all-minilm-l6-v2")
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    model.tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [text[: 40 * number] for number, text in enumerate(lsim.demo_text()[:6], start=1)]
    whole = lsim.analyze(model, texts, [lsim.Cosine(), lsim.CKA(estimator="exact")])
    alone = lsim.analyze(model, lsim.Data(texts, batch_size=1), [lsim.Cosine(), lsim.CKA(estimator="exact")])
    for name in whole:
        # Padding inside a batch of a bidirectional model, told by its mask.
        assert (whole[name].values - alone[name].values).abs().max() < 1e-5
    assert "post-norm" in whole["cka"].provenance.basis
