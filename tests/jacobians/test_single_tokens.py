"""When a block may be called on single tokens, and when it sees whole rows."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.activations.block_call import BlockCall
from tl_layersim.jacobians.jacobian_products import TokenProducts, TokenReplayMismatch

from ..models.tiny_models import random_tokens, tiny_llama
from .helpers import calls_of, naive


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_row_s_jacobians_do_not_depend_on_its_neighbours():
    model, rows = tiny_llama(), [random_tokens(1, n, seed=n)[0] for n in (4, 9, 17)]
    together = lsim.analyze(model, rows, lsim.BlockCoupling(k=4))["block_coupling"]
    alone = [lsim.analyze(model, [row], lsim.BlockCoupling(k=4))["block_coupling"].values for row in rows]
    torch.testing.assert_close(together.values, torch.stack(alone).mean(0), rtol=0, atol=1e-5)


def test_hooks_on_positions_see_whole_rows():
    model = tiny_llama()

    def ablate(_module, _args, output):
        output = output.clone()
        output[:, -1] = 0
        return output

    tokens = random_tokens(1, 9)
    model.model.layers[1].mlp.register_forward_hook(ablate)
    found = lsim.prompts.block_jacobians(model, tokens[0], layers=[1], positions=[8, 3])
    call = calls_of(model, lambda: model(tokens, use_cache=False))[1]
    for number, t in enumerate((8, 3)):
        expected = naive(call, 0, t, t)
        assert float((found.values[0, number] - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_hooks_of_a_bridge_see_whole_rows():
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    model = tiny_llama()
    bridge = build_bridge_from_module(model, "LlamaForCausalLM", hf_config=model.config)

    def ablate(x, hook):
        x = x.clone()
        x[:, -1] = 0
        return x

    tokens = random_tokens(1, 9)[0]
    with bridge.hooks([("blocks.1.hook_mlp_out", ablate)]):
        exact, near = (lsim.prompts.block_jacobians(bridge, tokens, method=method) for method in ("dense", "finite-difference"))
    assert float((exact.values - near.values)[1].norm() / near.values[1].norm()) < 3e-3


def test_hooks_that_change_what_enters_a_block_are_applied_once():
    model = tiny_llama()
    push = torch.randn(32, generator=torch.Generator().manual_seed(0))
    model.model.layers[1].register_forward_pre_hook(lambda m, a: (a[0] + push, *a[1:]))
    tokens = random_tokens(1, 9)
    found = lsim.prompts.block_jacobians(model, tokens[0], layers=[1])
    before, after = [], []
    model.model.layers[0].register_forward_hook(lambda m, a, o: before.append(o))
    with torch.no_grad():
        model(tokens, use_cache=False)
    plain = tiny_llama()
    call = calls_of(plain, lambda: plain(tokens, use_cache=False))[1]
    given = BlockCall(call.block, (before[0] + push,), dict(call.kwargs), 0, after)
    expected = naive(given, 0, 8, 8)
    assert float((found.values[0, 0] - expected).norm() / expected.norm()) < 1e-5


def test_more_copies_than_a_window_or_a_table_has_room_for():
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    torch.manual_seed(0)
    kinds = [[["global", "local"], 1]]
    config = GPTNeoConfig(
        vocab_size=100,
        hidden_size=48,
        num_layers=2,
        num_heads=4,
        max_position_embeddings=40,
        attention_types=kinds,
        window_size=20,
    )
    model = GPTNeoForCausalLM(config).eval().double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_proj" in name:
                parameter.mul_(6)
    tokens = random_tokens(1, 19)
    calls = calls_of(model, lambda: model(tokens, use_cache=False))
    found = lsim.prompts.block_jacobians(model, tokens[0])
    for layer, call in enumerate(calls):
        expected = naive(call, 0, 18, 18)
        assert float((found.values[layer, 0] - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_window_that_copies_would_outgrow():
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    torch.manual_seed(0)
    small = {"vocab_size": 100, "hidden_size": 48, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 512}
    model = GPTNeoForCausalLM(GPTNeoConfig(**small, attention_types=[[["global", "local"], 1]], window_size=24)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_proj" in name:
                parameter.mul_(6)
    tokens = random_tokens(2, 22)
    calls = calls_of(model, lambda: model(tokens, use_cache=False))
    found = lsim.analyze(model, tokens, lsim.BlockCoupling(k=4))["block_coupling"]
    assert found.whole_rows.tolist() == [0, 1]
    for layer, call in enumerate(calls):
        expected = np.mean([np.linalg.svd(naive(call, row, 21, 21))[1][:4] for row in (0, 1)], 0)
        np.testing.assert_allclose(found.singular_values[layer], expected, rtol=1e-5)


def test_hooks_that_change_derivatives_alone_see_whole_rows():
    model, tokens = tiny_llama(), random_tokens(1, 9)
    model.model.layers[1].mlp.register_forward_hook(lambda m, a, o: torch.cat([o[:, :-1], o[:, -1:].detach()], 1))
    found = lsim.prompts.block_jacobians(model, tokens[0], layers=[1])
    expected = naive(calls_of(model, lambda: model(tokens, use_cache=False))[1], 0, 8, 8)
    assert float((found.values[0, 0] - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("size", [0.0, 1000.0])
@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_how_far_a_replay_may_be_off(size, factor):
    """An update of length 1 at a residual of this size."""
    out, value, off = torch.zeros(3, 1, 4, dtype=torch.float64)
    out[0, 0] = value[0, 0] = size
    value[0, 1] = 1.0
    off[0, 2] = factor * (1e-4 + 2e-6 * math.hypot(size, 1))
    few = SimpleNamespace(x=out, positions=torch.zeros(1, 1), pos=1, x_out=out, block=lambda _n: lambda x: 0 * x + value + off)
    products = TokenProducts(few, torch.tensor([0]), value, 1e6)
    with nullcontext() if factor < 1 else pytest.raises(TokenReplayMismatch):
        products.graph(3)
