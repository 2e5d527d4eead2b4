"""Jacobians leave a model as it was, with little memory and without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tl_layersim as lsim
from tl_layersim.activations.block_call import Widened
from tl_layersim.jacobians.jacobian_operator import Jacobian

from ..inputs.views import worst
from ..models.tiny_models import random_tokens, tiny_llama
from .helpers import MEMORY, calls_of, naive


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_little_memory_changes_nothing():
    tokens = random_tokens(2, 9)
    # All 32 directions at once, seven times five of them, and one after the other.
    much, some, little = (
        lsim.analyze(tiny_llama(), tokens, lsim.BlockCoupling(k=6, memory_mb=mb))["block_coupling"] for mb in (1000, 0.2, 1e-4)
    )
    assert worst(much, some) < 1e-5
    assert worst(much, little) < 1e-5


def test_half_precision_weights_are_widened_and_left_as_they_were():
    model = tiny_llama(dtype=torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tokens = random_tokens(1, 9)
    found = lsim.prompts.block_jacobians(model, tokens[0], layers=[1])
    call = calls_of(model, lambda: model(tokens, use_cache=False))[1]
    # Of the weights and activations as they are, in more digits than they have.
    expected = naive(call, 0, 8, 8)
    assert float((found.values[0, 0] - expected).norm() / expected.norm()) < 1e-5
    after = model.state_dict()
    assert all(after[name].dtype == torch.bfloat16 and torch.equal(after[name], value) for name, value in before.items())


def test_a_model_is_left_as_it_was_when_something_fails():
    model = tiny_llama(dtype=torch.bfloat16)
    tokens = random_tokens(2, 9)
    call = calls_of(model, lambda: model(tokens, use_cache=False))[1]
    where = torch.tensor([0])
    with pytest.raises(KeyboardInterrupt), Jacobian(call, where, where, where, MEMORY):
        raise KeyboardInterrupt
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with pytest.raises(IndexError), Jacobian(call, torch.tensor([7]), where, where, MEMORY):
        pass
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_model_is_left_as_it_was_when_memory_ends_while_it_is_widened(monkeypatch):
    model = tiny_llama(dtype=torch.bfloat16)
    call = calls_of(model, lambda: model(random_tokens(2, 9), use_cache=False))[1]
    # Distributed training listens at what accumulates gradients.
    weight = model.model.layers[1].mlp.up_proj.weight
    accumulator = weight.view_as(weight).grad_fn.next_functions[0][0]
    plain, room = Tensor.to, [3]

    def to(self, *args, **kwargs):
        room[0] -= 1
        if room[0] < 0:
            raise torch.OutOfMemoryError("no memory")
        return plain(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "to", to)
        with pytest.raises(torch.OutOfMemoryError), Widened(call.block, torch.float32):
            pass
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with Widened(call.block, torch.float32):
        assert {p.dtype for p in call.block.parameters()} == {torch.float32}
    assert weight.view_as(weight).grad_fn.next_functions[0][0] is accumulator
    assert model.model.layers[1].mlp.up_proj.weight is weight


def test_neither_gradients_nor_hooks_are_left():
    model = tiny_llama()
    lsim.analyze(model, random_tokens(2, 9), lsim.BlockCoupling(k=4))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_under_inference_mode():
    model, tokens = tiny_llama(), random_tokens(2, 9)
    expected = lsim.analyze(model, tokens, lsim.BlockCoupling(k=4))["block_coupling"]
    with torch.inference_mode():
        assert worst(expected, lsim.analyze(model, tokens, lsim.BlockCoupling(k=4))["block_coupling"]) < 1e-6
        found = lsim.prompts.block_jacobians(model, tokens[0])
    torch.testing.assert_close(found.values, lsim.prompts.block_jacobians(model, tokens[0]).values)
    # On whole rows too, which a hook asks for.
    model.model.layers[1].mlp.register_forward_hook(lambda m, a, o: None)
    with torch.inference_mode():
        whole = lsim.prompts.block_jacobians(model, tokens[0])
    torch.testing.assert_close(found.values, whole.values, rtol=1e-4, atol=1e-5)


def test_the_end_of_memory_is_no_reason_to_take_more(monkeypatch):
    from tl_layersim.activations.block_call import FewTokens

    def block(self, n):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(FewTokens, "block", block)
    with pytest.raises(lsim.LayersimError, match=r"`seq_len`.*memory") as caught:
        lsim.prompts.block_jacobians(tiny_llama(), random_tokens(1, 5)[0])
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
