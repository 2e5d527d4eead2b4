"""The lens in every precision: overflow, digits, ids that cannot be said."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.architectures.unembed import Unembed

from .. import oracles
from ..tiny_models import random_tokens, tiny_gpt2, tiny_llama
from ..views import from_views, own_head, residuals, view
from ..wrapped_models import LENSES, nnsight, read_logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_the_models_own(dtype):
    """Logits are what the model would give; what is made of them is float32."""
    model, tokens = tiny_llama(dtype=dtype), random_tokens(4, 12)
    with torch.no_grad():
        logits = model(tokens).logits
    assert logits.dtype == dtype
    own = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten())
    found = lsim.analyze(model, lsim.Data(tokens, batch_size=4), lsim.LogitLens())["logit_lens"]
    np.testing.assert_allclose(found.cross_entropy[-1], own, rtol=1e-5 if dtype == torch.float16 else 2e-2)
    assert found.kl_to_final[-1] == 0


def test_logits_that_overflow_are_named_with_their_layer():
    model = tiny_llama(dtype=torch.float16)
    with torch.no_grad():
        model.lm_head.weight.mul_(3000)
        model.model.norm.weight.mul_(3000)
    with pytest.raises(lsim.LayersimError, match=r"Logits are NaN or infinite(.|\n)*blocks\.0\.hook_resid_post(.|\n)*bfloat16"):
        lsim.analyze(model, random_tokens(4, 12), lsim.LogitLens())


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
def test_large_logits_do_not_overflow(offset):
    """A common offset of all logits says nothing: it must change nothing."""
    x = residuals(1)
    weight = oracles.HEAD * 3
    head = torch.nn.Linear(8, oracles.WORDS, dtype=torch.float64)
    head.weight.data, head.bias.data = torch.as_tensor(weight), torch.full((oracles.WORDS,), offset, dtype=torch.float64)
    unembed = Unembed(torch.nn.LayerNorm(8, elementwise_affine=False), (head,), "every", 1.0, None, torch.float64, None, head)
    found = from_views(lsim.LogitLens(), [view(x, unembed=unembed)])
    expected = oracles.oracle_logit_lens([x], head=weight)
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(found, name), value, atol=1e-8, rtol=1e-8, err_msg=name)


def test_ids_that_cannot_be_said_have_no_weight():
    """Vocabulary padding that is masked with -inf, and padding that simply has low logits."""
    x = residuals(2)
    expected = oracles.oracle_logit_lens([x])
    for low in (-math.inf, -1e9):
        head = torch.nn.Linear(8, oracles.WORDS + 28, dtype=torch.float64)
        head.weight.data = torch.cat([torch.as_tensor(oracles.HEAD), torch.zeros(28, 8)]).double()
        head.bias.data = torch.cat([torch.zeros(oracles.WORDS), torch.full((28,), low)]).double()
        for linear in (head, None):
            norm = torch.nn.LayerNorm(8, elementwise_affine=False)
            unembed = Unembed(norm, (head,), "every", 1.0, None, torch.float64, None, linear)
            found = from_views(lsim.LogitLens(), [view(x, unembed=unembed)])
            for name, value in expected.items():
                np.testing.assert_allclose(getattr(found, name), value, atol=1e-8, rtol=1e-8, err_msg=name)


def test_own_heads_are_checked_in_the_oracles_tests_too():
    unembed = own_head()
    x = torch.as_tensor(residuals(0)[2])
    expected = oracles.layer_norm(x.numpy()) @ oracles.HEAD.T
    np.testing.assert_allclose(unembed(x).detach(), expected, atol=1e-12)
    spare = torch.empty(40, oracles.WORDS, dtype=torch.float64)
    with torch.no_grad():
        np.testing.assert_allclose(unembed(x, True, spare), expected, atol=1e-12)


@pytest.mark.parametrize("wrap", [lambda m: m, nnsight], ids=["hooked", "nnsight"])
def test_every_lens_refuses_logits_that_are_not_finite(wrap):
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    for lens in LENSES:
        with pytest.raises(lsim.LayersimError, match=r"Logits are NaN or infinite"):
            lsim.analyze(wrap(model), random_tokens(4, 12), lens())
    with pytest.raises(lsim.LayersimError, match=r"Logits are NaN or infinite"):
        lsim.prompts.prediction_grid(wrap(model), random_tokens(1, 12)[0])


@pytest.mark.parametrize("factor", [1.05, 0.9])
def test_in_half_precision_a_head_that_is_five_percent_off_is_refused(factor):
    model, tokens = tiny_llama(dtype=torch.bfloat16), random_tokens(2, 12)
    assert lsim.analyze(model, tokens, lsim.Saturation())
    model.lm_head.register_forward_hook(lambda _m, _x, out: factor * out)
    with pytest.raises(lsim.LayersimError, match="does not give the model's own logits"):
        lsim.analyze(model, tokens, lsim.Saturation())


def test_a_norm_in_another_dtype_than_the_head():
    model = tiny_gpt2().to(torch.bfloat16)
    head = model.lm_head

    class Upcast(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(head.weight.detach().float())

        def forward(self, x):
            return torch.nn.functional.linear(x.float(), self.weight)

    model.lm_head = Upcast()
    assert lsim.analyze(model, random_tokens(2, 9), lsim.LogitLens())


@pytest.mark.parametrize("offset", [-101.0, -75.0, 70.0, 85.0])
def test_float32_keeps_its_digits_near_overflow_and_underflow(offset):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, 3, 200))
    target = torch.arange(5)
    exact, found = read_logits(logits, target), read_logits((logits + offset).astype(np.float32), target)
    for name in ("best_prob", "target_log_prob", "entropy", "kl"):
        np.testing.assert_allclose(found[name], exact[name], atol=2e-4, err_msg=name)
