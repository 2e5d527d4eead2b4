"""Blocks that have no Jacobians, or no skip connection."""

from __future__ import annotations

import pytest
import torch
import transformers

import tl_layersim as lsim
from tl_layersim.activations.block_call import BlockCall
from tl_layersim.jacobians.jacobian_operator import Jacobian

from ..analyzers.helpers import _described
from ..models.tiny_models import VOCABULARY, random_tokens, tiny_llama


def tiny_bert():
    from transformers import BertConfig, BertForMaskedLM

    small = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForMaskedLM(BertConfig(**small, vocab_size=100)).eval()


class TestRefusals:
    def test_post_norm_blocks(self):
        model = tiny_bert()
        with pytest.raises(lsim.LayersimError, match="no residual branch"):
            lsim.analyze(model, random_tokens(2, 9), lsim.BlockCoupling(k=4))

    def test_post_norm_blocks_of_a_bridge(self):
        from transformer_lens.model_bridge.sources import build_bridge_from_module

        model = tiny_bert()
        bridge = build_bridge_from_module(model, "BertForMaskedLM", hf_config=model.config)
        with pytest.raises(lsim.LayersimError, match="no residual branch"):
            lsim.prompts.block_jacobians(bridge, random_tokens(1, 9)[0])

    def test_a_sandbox_is_told_of_finite_differences(self):
        from dataclasses import replace

        model = replace(lsim.demo_model() and _described(), calls="values")
        with pytest.raises(lsim.LayersimError, match=r"sandbox(.|\n)*method='finite-difference'"):
            lsim.BlockCoupling().check(model)
        lsim.BlockCoupling(method="finite-difference").check(model)
        with pytest.raises(lsim.LayersimError, match=r"ModelDescription\(calls="):
            lsim.BlockCoupling().check(replace(model, calls="none"))

    def test_blocks_with_a_state(self):
        model = tiny_llama()
        count = [0]

        def drift(_module, _args, output):
            count[0] += 1
            return output * (1 + 0.1 * count[0])

        handle = model.model.layers[1].register_forward_hook(drift)
        with pytest.raises(lsim.LayersimError, match=r"replayed block differs(.|\n)*blocks\.1\.hook_resid_post"):
            lsim.analyze(model, random_tokens(2, 9), lsim.BlockCoupling(k=4))
        handle.remove()

    def test_a_probe(self):
        with pytest.raises(lsim.LayersimError, match="cannot be attached"), lsim.attach(tiny_llama(), lsim.BlockCoupling(k=4)):
            pass

    def test_options(self):
        for options in ({"k": 0}, {"k": 1}, {"k": ()}, {"k": (5, 5)}, {"tokens": ()}, {"memory_mb": 0}):
            with pytest.raises(lsim.LayersimError):
                lsim.BlockCoupling(**options)
        with pytest.raises(lsim.LayersimError, match="`k` is 33"):
            lsim.analyze(tiny_llama(), random_tokens(2, 9), lsim.BlockCoupling(k=33))


def test_post_norm_blocks_that_no_name_tells():
    from transformers import BartConfig, BartForCausalLM

    small = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 24, "vocab_size": 100}
    model = BartForCausalLM(BartConfig(**small)).eval()
    for method in ("dense", "finite-difference"):
        with pytest.raises(lsim.LayersimError, match="have no residual branch"):
            lsim.analyze(model, random_tokens(2, 9), lsim.BlockCoupling(k=4, method=method))


WIDTH = 16


class Homogeneous(torch.nn.Module):
    """f(c x) = c f(x) for c > 0, and no skip connection: an MLP of ReLUs without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 64, bias=False), torch.nn.Linear(64, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 4 * self.down(torch.relu(self.up(x)))


class Gated(Homogeneous):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.silu(self.up(x)) * self.up(x))


class PostNorm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = Homogeneous(), torch.nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.inner(x))


class PreNorm(PostNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


class Sandwich(PostNorm):
    """A norm inside the branch, behind what is not bounded, as in Gemma and OLMo 2."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.inner(x))


class NoNorm(Homogeneous):
    """A skip connection around a branch that grows with what enters it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x


def has_skip(block: torch.nn.Module, differences: bool = False) -> bool:
    torch.manual_seed(0)
    block = block.double()
    hidden = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    call = BlockCall(block, (hidden,), {}, 0, block(hidden).detach())
    row, at = torch.arange(2), torch.tensor([4, 2])
    with Jacobian(call, row, at, at, 100.0, differences) as jacobian:
        assert not jacobian.differs
        return not jacobian.no_skip


@pytest.mark.parametrize("make", [Homogeneous, Gated, PostNorm])
@pytest.mark.parametrize("differences", [False, True])
def test_a_function_without_a_skip_connection_is_not_taken_for_a_block(make, differences):
    torch.manual_seed(1)
    assert not has_skip(make(), differences)


@pytest.mark.parametrize("make", [PreNorm, Sandwich, NoNorm])
def test_a_block_with_a_skip_connection_is_one(make):
    torch.manual_seed(1)
    assert has_skip(make())
    if make is not NoNorm:
        assert has_skip(make(), differences=True)


class Chain(torch.nn.Module):
    """Modules that hand on what they give, one after the other, without any skip connection."""

    def __init__(self, make=Homogeneous) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.part = torch.nn.ModuleList([make() for _ in range(2)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for part in self.part:
            x = part(x)
        return x


@pytest.mark.parametrize("method", ["dense", "krylov", "finite-difference"])
def test_coupling_of_a_chain_of_mlps_is_refused(method):
    paths = ["part.0", "part.1"]
    with pytest.raises(lsim.LayersimError, match=r"\bpart\.0\b"):
        lsim.analyze(lsim.open_model(Chain(), layers=paths), random_tokens(), lsim.BlockCoupling(k=2, method=method))
    found = lsim.analyze(lsim.open_model(Chain(PreNorm), layers=paths), random_tokens(), lsim.BlockCoupling(k=2, method=method))
    assert found["block_coupling"].layers == ("part.0.input", *paths)


SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": VOCABULARY}
MODELS = {
    "pre-norm": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**SHAPE)),
    "parallel": lambda t: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**SHAPE)),
    "post-norms in the branch": lambda t: t.Gemma2ForCausalLM(t.Gemma2Config(**SHAPE, head_dim=8, num_key_value_heads=2)),
    "no pre-norm": lambda t: t.Olmo2ForCausalLM(t.Olmo2Config(**SHAPE)),
    "experts": lambda t: t.MixtralForCausalLM(t.MixtralConfig(**SHAPE, num_key_value_heads=2, num_local_experts=2)),
    "multiplied branch": lambda t: t.GraniteForCausalLM(t.GraniteConfig(**SHAPE, residual_multiplier=0.2)),
    "falcon": lambda t: t.FalconForCausalLM(
        t.FalconConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY)
    ),
    "bloom": lambda t: t.BloomForCausalLM(t.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=VOCABULARY)),
    "recurrent": lambda t: t.MambaForCausalLM(t.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=VOCABULARY)),
}


# Scaled down, the blocks of some models add no more than rounding.
@pytest.mark.light("0.3-pre-norm", "0.3-multiplied branch", "5.0-parallel")
@pytest.mark.filterwarnings("ignore:Coupling is not defined")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scale", [0.3, 5.0])
def test_blocks_of_real_architectures_pass(name, scale):
    torch.manual_seed(0)
    model = MODELS[name](transformers).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    found = lsim.analyze(model, random_tokens(2, 12), lsim.BlockCoupling(k=2, method="dense"))["block_coupling"]
    assert found.singular_values.isfinite().all()
    lsim.analyze(model, random_tokens(2, 12), lsim.BlockCoupling(k=2, method="finite-difference"))


def test_coupling_of_bert_is_refused_also_where_its_blocks_are_named_or_held():
    config = transformers.BertConfig(**SHAPE)
    model = transformers.BertModel(config).eval()
    with pytest.raises(lsim.LayersimError, match="no residual branch"):
        lsim.analyze(
            lsim.open_model(model, layers=["encoder.layer.0", "encoder.layer.1"]), random_tokens(), lsim.BlockCoupling(k=2)
        )
    holder = torch.nn.Sequential(model)
    with pytest.raises(lsim.LayersimError, match="no residual branch"):
        lsim.analyze(
            lsim.open_model(holder, layers=["0.encoder.layer.0", "0.encoder.layer.1"]), random_tokens(), lsim.BlockCoupling(k=2)
        )
