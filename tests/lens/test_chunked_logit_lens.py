"""Logits of layers: ties, memory, walking down."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tl_layersim as lsim
from tl_layersim.activations import View
from tl_layersim.activations.view import targets
from tl_layersim.architectures.unembed import Unembed
from tl_layersim.data.labels import NO_LABEL
from tl_layersim.lens.statistics import read_lens, saturation_layers

from .. import oracles
from ..inputs.views import from_views, own_head, residuals, view, worst
from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama
from ..models.wrapped_models import LENSES, nnsight, read_logits


@pytest.mark.heavy("seconds, where faster tests reach the same")
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), words=st.sampled_from([5, 64, 255, 256, 257, 700]), levels=st.integers(1, 4))
def test_ties_go_to_the_lower_id(seed, words, levels):
    """Logits of a few levels only, so that nearly all of them are tied with others."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, levels, size=(6, 3, words)).astype(np.float64)  # token layer vocabulary
    target = torch.as_tensor(rng.integers(0, words, size=6))

    statistics = read_logits(logits, target)

    for t in range(6):
        for layer in range(3):
            z = logits[t, layer]
            order = sorted(range(words), key=lambda v, z=z: (-z[v], v))
            assert statistics["best"][layer, t] == order[0] == int(np.argmax(z))
            assert statistics["before"][layer, t] == min(order.index(int(target[t])), 10)


@pytest.mark.parametrize("top", [1, 4, 9, 11, 12, 30])
def test_ties_over_more_groups_than_are_looked_into(top):
    """The largest logit stands once in each of many groups of 256; the target is one of them."""
    logits = np.zeros((2, 3, 256 * 40))
    places = 256 * np.arange(top) + 3
    logits[..., places] = 5.0

    for at in {0, top // 2, top - 1}:
        statistics = read_logits(logits, torch.tensor([places[at], places[at]]))
        assert (statistics["before"] == min(at, 10)).all()
        assert (statistics["best"] == places[0]).all()

    logits[..., 7] = 1.0
    assert (read_logits(logits, torch.tensor([7, 7]))["before"] == min(top, 10)).all()


def test_the_last_id_of_a_group_that_is_not_full_counts_once():
    logits = np.zeros((1, 2, 300))
    logits[..., -1] = 5.0
    assert (read_logits(logits, torch.tensor([3]))["before"] == 4).all()


@pytest.mark.heavy("seconds, where faster tests reach the same")
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), memory=st.sampled_from([0.001, 0.02, 128.0]), levels=st.sampled_from([2, 5, 1000]))
def test_walking_down_finds_what_the_full_lens_finds(seed, memory, levels):
    """Token by token, with ties and without."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, levels, size=(20, 5, 40)).astype(np.float64)
    # Half of the tokens keep their answer from some layer on.
    for t in range(0, 20, 2):
        logits[t, rng.integers(0, 5) :, 7] = levels + 1
    flat = torch.as_tensor(logits).reshape(-1, 40)

    class Table(torch.nn.Module):
        def forward(self, x):
            return flat[x[..., 0].long()]

    index = torch.arange(100, dtype=torch.float64).reshape(20, 5).T[..., None]
    residual = torch.cat([torch.zeros(1, 20, 1, dtype=torch.float64), index])
    unembed = Unembed(None, (Table(),), "every", 1.0, None, None, None)

    def fresh() -> View:
        where = torch.arange(20)
        return View(residual, where, where * 0, where, unembed=unembed)

    walked, bad = saturation_layers(fresh(), True, memory)

    assert not bad.any()

    full = fresh()
    read_lens(full, torch.full((20,), NO_LABEL), True, memory, 5, "t")
    assert torch.equal(walked, saturation_layers(full, True, memory)[0])

    predicted = logits.argmax(-1)
    saturated = []
    for row in predicted:
        saturated.append(min(k for k in range(5) if (row[k:] == row[-1]).all()))
    assert walked.tolist() == saturated


@pytest.mark.parametrize("layer", [0, 1, 4])
def test_walking_down_counts_logits_that_are_not_finite_where_they_are(layer):
    logits = torch.zeros(5, 3, 7, dtype=torch.float64)
    logits[..., 2] = 1
    logits[layer, 0, 4] = torch.nan

    class Table(torch.nn.Module):
        def forward(self, x):
            return logits.flatten(0, 1)[x[..., 0].long()]

    residual = torch.cat([torch.zeros(1, 3, 1), torch.arange(15.0).view(5, 3, 1)]).double()
    where = torch.arange(3)
    view = View(residual, where, where * 0, where, unembed=Unembed(None, (Table(),), "every", 1.0, None, None, None))

    assert saturation_layers(view, True, 64)[1].tolist() == [int(number == layer) for number in range(5)]


@pytest.mark.parametrize("memory", [1e-6, 0.01, 0.1, 64])
def test_the_memory_budget_changes_no_number(memory):
    x = residuals(4, tokens=50)
    expected = from_views(lsim.LogitLens(), [view(x)])

    assert worst(from_views(lsim.LogitLens(lens_memory_mb=memory), [view(x)]), expected) < 1e-10
    assert worst(from_views(lsim.Saturation(lens_memory_mb=memory), [view(x)]), from_views(lsim.Saturation(), [view(x)])) == 0


@pytest.mark.parametrize("memory", [0, -1, math.inf, math.nan])
def test_a_budget_that_is_none_is_refused(memory):
    for lens in LENSES:
        with pytest.raises(lsim.LayersimError, match=f"`lens_memory_mb`.* is {memory},"):
            lens(lens_memory_mb=memory)


def test_what_a_lens_calls_has_neither_hooks_nor_dropout():
    from tl_layersim.architectures.output_heads import Quiet

    head = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(8, 8)).train()
    x = torch.ones(3, 8)
    calls = []
    head[1].register_forward_hook(lambda *_: calls.append(1))
    state = torch.get_rng_state()
    first = Quiet(head)(x)
    repeated = Quiet(head)(x)

    assert torch.equal(first, repeated)
    assert torch.equal(torch.get_rng_state(), state)
    assert not calls
    assert head[0].training

    head(x)
    assert calls == [1]

    head[1].register_forward_pre_hook(lambda *_: 1 / 0)
    Quiet(head)(x)
    with pytest.raises(RuntimeError):
        Quiet(head)(torch.ones(3, 7))
    assert head[0].training
    with pytest.raises(ZeroDivisionError):
        head(x)


def test_a_source_that_names_no_next_token_is_read_from_neighbours():
    tokens = torch.tensor([5, 6, 7, 8, 9])
    row = torch.tensor([0, 0, 0, 1, 1])
    tokens_view = View(torch.zeros(2, 5, 3), tokens, row, torch.tensor([0, 1, 3, 0, 1]))

    assert targets(tokens_view, "next_token").tolist() == [6, NO_LABEL, NO_LABEL, 9, NO_LABEL]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_the_models_own(dtype):
    """Logits are what the model would give; what is made of them is float32."""
    model = tiny_llama(dtype=dtype)
    tokens = random_tokens(4, 12)
    with torch.no_grad():
        logits = model(tokens).logits

    assert logits.dtype == dtype

    model_loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten())
    result = lsim.analyze(model, lsim.Data(tokens, batch_size=4), lsim.LogitLens())["logit_lens"]
    np.testing.assert_allclose(result.cross_entropy[-1], model_loss, rtol=1e-5 if dtype == torch.float16 else 2e-2)
    assert result.kl_to_final[-1] == 0


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
    head.weight.data = torch.as_tensor(weight)
    head.bias.data = torch.full((oracles.WORDS,), offset, dtype=torch.float64)
    unembed = Unembed(torch.nn.LayerNorm(8, elementwise_affine=False), (head,), "every", 1.0, None, torch.float64, None, head)

    result = from_views(lsim.LogitLens(), [view(x, unembed=unembed)])
    expected = oracles.oracle_logit_lens([x], head=weight)

    for name, value in expected.items():
        np.testing.assert_allclose(getattr(result, name), value, atol=1e-8, rtol=1e-8, err_msg=name)


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
            result = from_views(lsim.LogitLens(), [view(x, unembed=unembed)])
            for name, value in expected.items():
                np.testing.assert_allclose(getattr(result, name), value, atol=1e-8, rtol=1e-8, err_msg=name)


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
    model = tiny_llama(dtype=torch.bfloat16)
    tokens = random_tokens(2, 12)

    assert lsim.analyze(model, tokens, lsim.Saturation())

    model.lm_head.register_forward_hook(lambda _m, _x, out: factor * out)
    with pytest.raises(lsim.LayersimError, match=r"lm_head\(model\.norm.* \d.*unembed="):
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

    exact = read_logits(logits, target)
    statistics = read_logits((logits + offset).astype(np.float32), target)

    for name in ("best_prob", "target_log_prob", "entropy", "kl"):
        np.testing.assert_allclose(statistics[name], exact[name], atol=2e-4, err_msg=name)
