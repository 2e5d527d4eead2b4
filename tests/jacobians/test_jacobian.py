"""Jacobians of blocks, against naive derivatives."""

from __future__ import annotations

import nnsight
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.jacobians.jacobian_operator import Jacobian

from ..inputs.views import worst
from ..models.tiny_models import random_tokens, tiny_llama, tiny_tokenizer
from .helpers import MEMORY, calls_of, family, naive, padded_run

# Of these, the block is called on single tokens; of the others on whole rows.
NARROW = ("llama", "gpt2", "neox", "qwen2", "gemma", "gemma2", "gemma3", "mistral", "opt")
PAIRS = [(0, 10, 10), (1, 7, 7), (2, 10, 10), (0, 2, 5), (0, 2, 10), (1, 0, 0), (0, 5, 5)]


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", [*NARROW, "bloom", "mamba"])
def test_jacobians_are_the_naive_ones(name, attention):
    if (name, attention) in (("mamba", "eager"), ("gemma2", "sdpa"), ("bloom", "sdpa")):
        pytest.skip("has it in one form only")
    model = family(name, attention)
    call = calls_of(model, padded_run(model))[1]
    row, t_in, t_out = torch.tensor(PAIRS).T
    expected = torch.stack([naive(call, *pair) for pair in PAIRS])
    assert float(expected[3].norm()) > 1e-3
    v = torch.randn(len(PAIRS), 48, 5)
    for narrow in (True, False):
        with torch.no_grad(), Jacobian(call, row, t_in, t_out, MEMORY, single_tokens=narrow) as jacobian:
            assert jacobian.whole_rows == (not narrow or name not in NARROW)
            assert not jacobian.differs
            dense = jacobian.dense()
            forward, transposed = jacobian.forward(v), jacobian.transposed(v)
        torch.testing.assert_close(dense.double(), expected, rtol=1e-4, atol=2e-5 * float(expected.abs().max()))
        assert float((dense - expected).norm() / expected.norm()) < 1e-5
        assert float((forward - expected.float() @ v).norm() / forward.norm()) < 1e-5
        assert float((transposed - expected.float().mT @ v).norm() / transposed.norm()) < 1e-5


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("name", ["llama", "gpt2", "neox", "gemma3"])
def test_bridges_are_called_on_single_tokens_too(name):
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    plain, twin = family(name), family(name)
    bridge = build_bridge_from_module(twin, type(twin).__name__, hf_config=twin.config)
    tokens = random_tokens(3, 11)
    analyzer = lsim.BlockCoupling(k=6)
    expected = lsim.analyze(plain, tokens, analyzer)["block_coupling"]
    found = lsim.analyze(bridge, tokens, analyzer)["block_coupling"]
    assert float(found.whole_rows.max()) == 0
    assert worst(expected, found) < 1e-5


def test_hooked_transformers_run_whole_rows():
    tl = pytest.importorskip("transformer_lens")
    try:
        hooked_class = tl.HookedTransformer
    except ImportError:
        pytest.skip("TransformerLens 4 has no HookedTransformer")
    cfg = {"n_layers": 2, "d_model": 24, "n_ctx": 32, "d_head": 6, "d_vocab": 100, "act_fn": "gelu", "seed": 0}
    model = hooked_class(tl.HookedTransformerConfig(**cfg, positional_embedding_type="rotary", rotary_dim=6))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    tokens = random_tokens(2, 9)
    found = lsim.prompts.block_jacobians(model, tokens[0], layers=[1], positions=[(3, 8), 8])
    _, cache = model.run_with_cache(tokens[:1])
    x = cache["blocks.1.hook_resid_pre"]
    whole = torch.autograd.functional.jacobian(lambda h: model.blocks[1](h)[0, 8], x)[:, 0]
    torch.testing.assert_close(found.values[0, 0].float(), whole[:, 3], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.values[0, 1].float(), whole[:, 8] - torch.eye(24), rtol=1e-4, atol=1e-5)


@pytest.mark.heavy("a simulated server")
def test_every_source_gives_the_same():
    tokens, analyzer = random_tokens(4, 12), lsim.BlockCoupling(k=(6, 2))
    expected = lsim.analyze(tiny_llama(), tokens, analyzer)["block_coupling"]
    for other in (tiny_llama(), nnsight.NNsight(tiny_llama())):
        assert worst(expected, lsim.analyze(other, tokens, analyzer)["block_coupling"]) < 1e-6
    server = nnsight.TransformersModel(tiny_llama(), task="text-generation", tokenizer=tiny_tokenizer())
    for remote in (False, "local"):
        assert worst(expected, lsim.analyze(lsim.open_model(server, remote=remote), tokens, analyzer)["block_coupling"]) < 1e-6


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize(("method", "off"), [("krylov", 1e-5), ("finite-difference", 1e-3)])
def test_methods_agree(method, off):
    tokens = random_tokens(3, 12)
    dense = lsim.analyze(tiny_llama(), tokens, lsim.BlockCoupling(k=6, method="dense"))["block_coupling"]
    other = lsim.analyze(tiny_llama(), tokens, lsim.BlockCoupling(k=6, method=method))["block_coupling"]
    assert float((dense.values - other.values).abs().max()) < off
    assert other.method == method
    assert float(other.residual.max()) < 1e-4
    stated = float(other.step_error.max())
    assert stated == 0 if method == "krylov" else 1e-6 < stated < 1e-2


def test_tokens_that_see_later_ones():
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    torch.manual_seed(0)
    small = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 100}
    model = ModernBertForMaskedLM(ModernBertConfig(**small, pad_token_id=0, attn_implementation="eager")).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12)
    tokens = random_tokens(1, 9)
    call = calls_of(model, lambda: model(tokens))[1]
    found = lsim.prompts.block_jacobians(model, tokens[0], layers=[1], positions=[(6, 3), (3, 6), 3])
    for number, pair in enumerate([(6, 3), (3, 6), (3, 3)]):
        expected = naive(call, 0, *pair)
        assert float(expected.norm()) > 1e-2
        assert float((found.values[0, number] - expected).norm() / expected.norm()) < 1e-4
