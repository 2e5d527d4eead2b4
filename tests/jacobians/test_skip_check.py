"""Block coupling asks for blocks that add to what they are given, which is more than to grow with it."""

from __future__ import annotations

import pytest
import torch
import transformers

import tl_layersim as lsim
from tl_layersim.activations.block_call import BlockCall
from tl_layersim.jacobians.jacobian import Jacobian

from ..tiny_models import VOCABULARY, random_tokens

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
    with pytest.raises(lsim.LayersimError, match=r"does not add its input(.|\n)*part\.0"):
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


def test_coupling_of_bert_is_refused_also_where_its_blocks_are_named():
    config = transformers.BertConfig(**SHAPE)
    model = transformers.BertModel(config).eval()
    with pytest.raises(lsim.LayersimError, match="no residual branch"):
        lsim.analyze(
            lsim.open_model(model, layers=["encoder.layer.0", "encoder.layer.1"]), random_tokens(), lsim.BlockCoupling(k=2)
        )
    holder = torch.nn.Sequential(model)
    with pytest.raises(lsim.LayersimError, match="does not add its input"):
        lsim.analyze(
            lsim.open_model(holder, layers=["0.encoder.layer.0", "0.encoder.layer.1"]), random_tokens(), lsim.BlockCoupling(k=2)
        )
