"""Every input of a model reaches it, in every kind of source: float64 oracles of pairs, images, embeddings and vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from .. import oracles
from ..models.input_models import (
    VectorModel,
    alone,
    bert_blocks,
    image_vit,
    pair_bert,
    pair_data,
    pixels,
    states,
    vit_blocks,
)
from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama
from ..models.wrapped_models import bridge, hooked_transformer, nnsight
from ..running.options import called

STEPS = ["steps.0", "steps.1", "steps.2"]
EVERY = {"positions": "all"}


def pairs_by_hand(model, data=None) -> list[np.ndarray]:
    data = pair_data() if data is None else data
    return [states(model, bert_blocks(model), **alone(data, row)) for row in range(len(data["input_ids"]))]


SOURCES = {
    "module": (lambda m: m, {}),
    "NNsight": (nnsight, {}),
    "NNsight remote=local": (nnsight, {"remote": "local"}),
}


@pytest.mark.light("right-module", "left-NNsight remote=local")
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_sentence_pairs(source, left):
    model, data = pair_bert(), pair_data(left=left)
    expected = oracles.oracle_cosine(pairs_by_hand(model, data))
    wrap, options = SOURCES[source]
    found = called(lsim.analyze, wrap(model), data, lsim.Cosine(), batch_size=4, **EVERY, **options)["cosine"]
    np.testing.assert_allclose(found.values, expected["values"], atol=1e-12)
    dropped = called(lsim.analyze, wrap(model), data | {"token_type_ids": None}, lsim.Cosine(), **EVERY, **options)["cosine"]
    assert np.abs(dropped.values.numpy() - expected["values"]).max() > 1e-3


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("source", SOURCES)
def test_images(source):
    model, images = image_vit(), pixels()
    expected = oracles.oracle_cosine([states(model, vit_blocks(model), pixel_values=images)])
    wrap, options = SOURCES[source]
    runs = [
        called(lsim.analyze, wrap(model), data, lsim.Cosine(), batch_size=size, **EVERY, **options)["cosine"]
        for data, size in ((images, 4), ({"pixel_values": images}, 2), ([{"pixel_values": x} for x in images.flip(0)], 6))
    ]
    for found in runs:
        np.testing.assert_allclose(found.values, expected["values"], atol=1e-12)
        assert found.provenance.tokens == 6 * 5
    assert runs[0].provenance.data == runs[1].provenance.data != runs[2].provenance.data
    classes = called(lsim.analyze, wrap(model), images, lsim.Cosine(center="none"), **options)["cosine"]
    assert classes.provenance.tokens == 6
    assert classes.provenance.options["positions"] == "first"


@pytest.mark.light("module")
@pytest.mark.parametrize("source", SOURCES)
def test_vectors_of_a_module_of_ones_own(source):
    model, x = VectorModel(), torch.randn(7, 6, dtype=torch.float64)
    shift = torch.randn(7, 8, dtype=torch.float64)
    wrap, options = SOURCES[source]
    for data, inputs in ((x, {"x": x}), ({"x": x, "shift": shift}, {"x": x, "shift": shift})):
        expected = oracles.oracle_cosine([states(model, list(model.steps), **inputs)])
        found = called(lsim.analyze, wrap(model), data, lsim.Cosine(), layers=STEPS, batch_size=3, **options)["cosine"]
        np.testing.assert_allclose(found.values, expected["values"], atol=1e-12)
        assert found.provenance.tokens == 7
    half = called(lsim.analyze, wrap(model), x.numpy().astype(np.float32), lsim.Cosine(), layers=STEPS, **options)["cosine"]
    assert half.provenance.tokens == 7


@pytest.mark.light("module", "TransformerBridge")
@pytest.mark.parametrize("source", [*SOURCES, "TransformerBridge"])
def test_embeddings_are_read_as_the_tokens_that_they_embed(source):
    model = tiny_llama(dtype=torch.float64)
    tokens, mask = random_tokens(4, 9), torch.ones(4, 9, dtype=torch.long)
    mask[1, 6:], mask[2, :2] = 0, 0
    expected = lsim.analyze(model, {"input_ids": tokens, "attention_mask": mask}, lsim.Cosine(center="none"))["cosine"]
    data = {"inputs_embeds": model.model.embed_tokens(tokens).detach(), "attention_mask": mask}
    wrap, options = (bridge, {}) if source == "TransformerBridge" else SOURCES[source]
    found = called(lsim.analyze, wrap(model), data, lsim.Cosine(center="none"), batch_size=3, **options)["cosine"]
    np.testing.assert_allclose(found.values, expected.values, atol=1e-12)
    assert found.provenance.tokens == 36 - 5


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_bridges_take_pairs_and_images():
    from transformers import BertForMaskedLM

    hf = pair_bert()
    masked = BertForMaskedLM(hf.config).eval().double()
    data = pair_data()
    rows = [states(masked, bert_blocks(masked), **alone(data, row)) for row in range(6)]
    found = lsim.analyze(bridge(masked), lsim.Data(data, batch_size=4), lsim.Cosine())["cosine"]
    np.testing.assert_allclose(found.values, oracles.oracle_cosine(rows)["values"], atol=1e-12)
    vit = image_vit()
    expected = oracles.oracle_cosine([states(vit, vit_blocks(vit), pixel_values=pixels())])
    for data in (pixels(), {"pixel_values": pixels()}):
        found = called(lsim.analyze, bridge(image_vit()), data, lsim.Cosine(), batch_size=4, **EVERY)["cosine"]
        np.testing.assert_allclose(found.values, expected["values"], atol=1e-12)


def test_two_models_are_compared_on_pairs_and_on_images():
    a, b, data = pair_bert(0), pair_bert(1), pair_data(8)
    size = int(data["attention_mask"].sum())
    expected = oracles.oracle_cka(pairs_by_hand(a, data), pairs_by_hand(b, data), exact=True, rows=1000)
    found = called(lsim.compare, a, b, data, lsim.CKA(estimator="exact"), batch_size=3, **EVERY)
    np.testing.assert_allclose(found.values, expected["values"], atol=1e-9)
    assert found.provenance.tokens == size
    first, second = image_vit(0), image_vit(1)
    images = [[states(model, vit_blocks(model), pixel_values=pixels())] for model in (first, second)]
    found = called(lsim.compare, first, second, pixels(), lsim.CKA(estimator="exact"), batch_size=4, **EVERY)
    np.testing.assert_allclose(found.values, oracles.oracle_cka(*images, exact=True, rows=5)["values"], atol=1e-9)
    with pytest.raises(lsim.LayersimError, match=r"different numbers of positions(.|\n)*5 in(.|\n)*17 in"):
        lsim.compare(first, image_vit(1, patch=2), pixels(), lsim.CKA(estimator="exact"))


def test_the_head_of_a_model_of_images_is_read():
    model, labels = image_vit(), torch.tensor([0, 1, 2, 0, 1, 2])
    lens = lsim.analyze(
        model, lsim.Data({"pixel_values": pixels(), "labels": labels}, batch_size=4), lsim.LogitLens(labels="data")
    )
    with torch.no_grad():
        logits = model(pixel_values=pixels()).logits
    expected = float(torch.nn.functional.cross_entropy(logits, labels))
    assert float(lens["logit_lens"].cross_entropy[-1]) == pytest.approx(expected, abs=1e-9)
    tensor = lsim.analyze(model, lsim.Data(pixels(), batch_size=4), lsim.LogitLens(labels=labels))
    assert torch.equal(tensor["logit_lens"].cross_entropy, lens["logit_lens"].cross_entropy)
    with pytest.raises(lsim.LayersimError, match="classifies whole rows"):
        lsim.analyze(model, pixels(), lsim.LogitLens())


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_rules_of_positions_hold_for_images():
    model, images = image_vit(), pixels()
    whole = states(model, vit_blocks(model), pixel_values=images).reshape(4, 6, 5, 32)
    model.train()
    for rule, picked in (("first", whole[:, :, :1]), ("last", whole[:, :, -1:]), (slice(1, 3), whole[:, :, 1:3])):
        expected = oracles.oracle_cosine([picked.reshape(4, -1, 32)], center="none")
        found = lsim.analyze(model, lsim.Data(images, positions=rule), lsim.Cosine(center="none"))["cosine"]
        np.testing.assert_allclose(found.values, expected["values"], atol=1e-12)
    mean = lsim.analyze(model, lsim.Data(images, positions="mean", skip_first=1), lsim.Cosine())["cosine"]
    np.testing.assert_allclose(mean.values, oracles.oracle_cosine([whole[:, :, 1:].mean(2)])["values"], atol=1e-12)
    # Counting the positions of an image leaves the model as it was.
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.filterwarnings("ignore:HookedTransformer is deprecated")
def test_a_hooked_transformer_takes_tokens_alone(caplog):
    model, tokens = hooked_transformer(tiny_gpt2()), random_tokens(4, 9)
    data = {"input_ids": tokens, "token_type_ids": torch.ones_like(tokens)}
    found = lsim.analyze(model, data, "cosine")["cosine"]
    assert "not read: token_type_ids" in caplog.text
    assert torch.equal(found.values, lsim.analyze(model, tokens, "cosine")["cosine"].values)
    with pytest.raises(lsim.LayersimError, match=r"`data`.*\['inputs_embeds'\]"):
        lsim.analyze(model, {"inputs_embeds": torch.randn(4, 9, 32)}, "cosine")
