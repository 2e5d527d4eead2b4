"""attach: the lens in a user's own loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from ..runs import each_model, lenses
from ..tiny_models import random_tokens, tiny_llama
from ..views import worst


@each_model
def test_the_lens_in_a_loop_equals_the_lens_of_a_run(make):
    tokens = random_tokens(4, 12)
    expected = lsim.analyze(make(), lsim.Data(tokens, batch_size=2), lenses())
    model = make()
    with torch.no_grad(), lsim.attach(model, lenses()) as probe:
        for part in tokens.split(2):
            model(part)
    found = probe.results()
    for name in expected:
        np.testing.assert_allclose(found[name].values, expected[name].values, rtol=1e-6, atol=1e-6)


def test_the_lens_uses_the_weights_of_the_pass_and_not_of_a_later_one():
    """The optimizer changes the head before a probe that gathers tokens would have asked it."""
    model, tokens = tiny_llama(), random_tokens(2, 12)
    expected = lsim.analyze(model, tokens, lsim.LogitLens())["logit_lens"]
    with lsim.attach(model, lsim.LogitLens()) as probe:
        model(tokens)
        with torch.no_grad():
            model.lm_head.weight.mul_(0)
    assert worst(probe.results()["logit_lens"], expected) < 1e-5


def test_the_lens_under_autocast_is_compared_with_what_autocast_explains():
    model, tokens = tiny_llama(), random_tokens(2, 12)
    with torch.no_grad(), lsim.attach(model, lsim.Saturation()) as probe, torch.autocast("cpu", dtype=torch.bfloat16):
        model(tokens)
    assert probe.results()["saturation"].counts.sum() == 24


def test_a_head_that_says_something_else_is_refused_in_a_loop():
    model, tokens = tiny_llama(), random_tokens(2, 12)
    model.lm_head.register_forward_hook(lambda _m, _x, out: 2 * out)
    with torch.no_grad(), lsim.attach(model, lsim.LogitLens()) as probe:
        model(tokens)
    with pytest.raises(lsim.LayersimError, match="does not give the model's own logits"):
        probe.results()


def test_a_stack_without_its_head_cannot_be_checked():
    model, tokens = tiny_llama(), random_tokens(2, 12)
    with torch.no_grad(), lsim.attach(model, lsim.LogitLens()) as probe:
        model.model(tokens)
    with pytest.raises(lsim.LayersimError, match=r"\b1\b.*`with`"):
        probe.results()


def test_the_lens_while_the_model_generates():
    """Single steps have a prediction and no next token yet."""
    model, tokens = tiny_llama(), random_tokens(2, 6)
    with torch.no_grad(), lsim.attach(model, [lsim.Saturation(), lsim.LogitLens()]) as probe:
        model.generate(tokens, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=2)
    found = probe.results()
    assert found["saturation"].counts.sum() == 2 * (6 + 4)
    assert (found["logit_lens"].positions, found["logit_lens"].targets) == (20, 10)


def test_a_lens_beside_other_sites_is_that_of_analyze():
    model, tokens = tiny_llama(), random_tokens(4, 12)
    with torch.no_grad(), lsim.attach(model, [lsim.LogitLens(), lsim.Contribution()]) as probe:
        model(tokens)
    expected = lsim.analyze(model, tokens, [lsim.LogitLens(), lsim.Contribution()])
    found = probe.results()
    assert torch.equal(found["logit_lens"].cross_entropy, expected["logit_lens"].cross_entropy)
    assert torch.equal(found["contribution"].relative_norm, expected["contribution"].relative_norm)
