"""Hugging Face models read by hooks."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim

from ..tiny_models import random_tokens, tiny_llama
from ..wrapped_models import bridge


def test_one_layer_and_one_row():
    analyzers = [lsim.Cosine(), lsim.CKA(minibatch=16, unit="token"), lsim.LogitLens()]
    found = lsim.analyze(tiny_llama(layers=1), random_tokens(1, 20), analyzers)
    assert float(found["cka"].values[0, 0]) == pytest.approx(1)
    assert found["cosine"].values.shape == (2, 2)
    assert found["cosine"].norm_ratio.shape == (1,)


def test_dropout_that_a_bridge_does_not_list_is_off_too():
    """GPT-2's embedding dropout belongs to the model inside."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    inner = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100, n_positions=64, embd_pdrop=0.5))
    model = bridge(inner).train()
    first, second = (lsim.analyze(model, random_tokens(), "cosine")["cosine"].values for _ in range(2))
    assert torch.equal(first, second)
    assert model.original_model.transformer.drop.training
