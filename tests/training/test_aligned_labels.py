"""Labels of the aligned loss that cannot be meant."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim

from ..models.tiny_models import random_tokens, tiny_llama
from .helpers import vit


def soft_capped():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        head_dim=8,
        vocab_size=100,
        final_logit_softcapping=5.0,
    )
    return Gemma2ForCausalLM(config).eval()


@pytest.mark.parametrize("make", [tiny_llama, soft_capped])
@pytest.mark.parametrize("label", [100, -1])
def test_a_label_beyond_the_vocabulary_is_refused(make, label):
    tokens = random_tokens(1, 6)
    labels = torch.full((1, 6), -100)
    labels[0, 2:4] = torch.tensor([99, label])

    with pytest.raises(lsim.LayersimError, match="99"):
        lsim.training.aligned_loss(make(), tokens, labels)

    labels[0, 2:4] = torch.tensor([0, 99])
    assert lsim.training.aligned_loss(make(), tokens, labels).isfinite()


def test_three_labels_that_are_their_own_tokens_are_no_coincidence():
    model = tiny_llama()
    tokens = random_tokens(1, 6)
    labels = torch.full((1, 6), -100)
    labels[0, 1:3] = tokens[0, 1:3]

    assert lsim.training.aligned_loss(model, tokens, labels).isfinite()

    labels[0, 3] = tokens[0, 3]
    with pytest.raises(lsim.LayersimError, match=r"^`labels` .*`labels`"):
        lsim.training.aligned_loss(model, tokens, labels)

    labels[0, 3] = tokens[0, 3] - 1
    assert lsim.training.aligned_loss(model, tokens, labels).isfinite()


@pytest.mark.light("4-data", "-1-data", "-1-labels")
@pytest.mark.parametrize("argument", ["data", "held out", "eval_data", "labels"])
@pytest.mark.parametrize("wrong", [4, -1])
def test_a_class_that_the_head_does_not_have_is_refused_before_the_first_step(argument, wrong):
    model = vit(labels=4)
    pixels = torch.randn(40, 3, 8, 8)
    labels = torch.arange(40) % 4
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wrong_labels = labels.clone()
    where = {"held out": 39, "eval_data": 5}.get(argument, 7)
    wrong_labels[where] = wrong
    data = {"pixel_values": pixels, "labels": wrong_labels}
    options = {}
    if argument == "labels":
        data = pixels
        options = {"labels": wrong_labels}
    elif argument == "eval_data":
        options = {"eval_data": data}
        data = {"pixel_values": pixels, "labels": labels}
    lowest = min(0, wrong)
    highest = max(3, wrong)
    named = "`labels` of `eval_data`" if argument == "eval_data" else "`labels`"
    words = rf"{named} .*from {lowest} to {highest}.*0 to 3"

    with pytest.raises(lsim.LayersimError, match=words):
        lsim.finetune_aligned(model, lsim.Data(data, batch_size=2), lsim.AlignedTraining(steps=8, lr=1e-2), **options)

    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_rows_without_a_label_are_no_class():
    labels = torch.arange(12) % 4
    labels[::3] = -100
    data = {"pixel_values": torch.randn(12, 3, 8, 8), "labels": labels}

    result = lsim.finetune_aligned(vit(labels=4), lsim.Data(data, batch_size=4), lsim.AlignedTraining(steps=2))

    assert result.provenance.options["train_rows"] == 7
    assert result.plot("loss").layout.title.subtitle.text.endswith(" · 7 training rows")
    assert result.plot().layout.title.subtitle.text.endswith(f" · {result.provenance.tokens} held-out row")
