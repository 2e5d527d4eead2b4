"""Labels of the aligned loss that cannot be meant."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim

from ..tiny_models import random_tokens, tiny_llama


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
        lsim.aligned_loss(make(), tokens, labels)
    labels[0, 2:4] = torch.tensor([0, 99])
    assert lsim.aligned_loss(make(), tokens, labels).isfinite()


def test_three_labels_that_are_their_own_tokens_are_no_coincidence():
    model, tokens = tiny_llama(), random_tokens(1, 6)
    labels = torch.full((1, 6), -100)
    labels[0, 1:3] = tokens[0, 1:3]
    assert lsim.aligned_loss(model, tokens, labels).isfinite()
    labels[0, 3] = tokens[0, 3]
    with pytest.raises(lsim.LayersimError, match="input tokens at the same positions"):
        lsim.aligned_loss(model, tokens, labels)
    labels[0, 3] = tokens[0, 3] - 1
    assert lsim.aligned_loss(model, tokens, labels).isfinite()
