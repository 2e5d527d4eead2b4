"""The final norm: chosen by the model's own logits, and left out by norm="none"."""

from __future__ import annotations

import pytest
import torch
import transformers

import tl_layersim as lsim

from ..models.own_models import AddingBlock
from ..models.tiny_models import random_tokens, tiny_llama

TOKENS = random_tokens(6, 9)
SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
SIZES |= {"intermediate_size": 48}


def lfm2():
    kinds = ["conv", "full_attention", "conv", "full_attention"]
    torch.manual_seed(0)
    return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**SIZES, layer_types=kinds)).eval()


def gemma4(per_layer: int = 8):
    """A Gemma whose last norm beside the blocks belongs to the inputs of each layer."""
    config = transformers.Gemma4TextConfig(
        **SIZES | {"head_dim": 8, "global_head_dim": 8, "num_kv_shared_layers": 2, "sliding_window": 4},
        **{"vocab_size_per_layer_input": 100, "hidden_size_per_layer_input": per_layer},
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    torch.manual_seed(0)
    model = transformers.Gemma4ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.add_(0.3 * torch.randn(parameter.shape))
    return model


def two_norms():
    """A Llama with another norm, registered after the final one."""
    model = tiny_llama()
    model.model.other_norm = torch.nn.LayerNorm(32)
    torch.nn.init.normal_(model.model.other_norm.weight)
    return model


def loss(logits):
    return float(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), TOKENS[:, 1:].flatten()))


@pytest.mark.parametrize("make", [lfm2, gemma4, lambda: gemma4(32), two_norms], ids=["lfm2", "gemma4", "gemma4 wide", "two"])
def test_the_norm_that_gives_the_logits_of_the_model_is_chosen(make):
    model = make()
    with torch.no_grad():
        expected = loss(model(TOKENS).logits)
    assert float(lsim.analyze(model, TOKENS, lsim.LogitLens())["logit_lens"].cross_entropy[-1]) == pytest.approx(
        expected, abs=1e-5
    )


def without_norm(model, blocks, head):
    hidden = []
    handles = [block.register_forward_hook(lambda _module, _args, output: hidden.append(output)) for block in blocks]
    with torch.no_grad():
        model(TOKENS)
        expected = [loss(head(x)) for x in hidden[:-1]]
    for handle in handles:
        handle.remove()
    return expected


def test_a_norm_of_any_name_is_left_out():
    model = lfm2()
    named = lsim.open_model(model, unembed=["model.embedding_norm", "lm_head"])
    expected = without_norm(model, model.model.layers, model.lm_head)

    for source_model in (named, model):
        losses = lsim.analyze(source_model, TOKENS, lsim.LogitLens(norm="none"))["logit_lens"].cross_entropy
        assert losses[:-1].tolist() == pytest.approx(expected, abs=1e-5)


class Own(torch.nn.Module):
    """Blocks, and a head whose norm may lie anywhere in it."""

    def __init__(self, *head) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(100, 16)
        self.head = torch.nn.Sequential(*head)
        self.parts = torch.nn.ModuleList(AddingBlock(16) for _ in range(3))

    def forward(self, tokens):
        x = self.words(tokens)
        for part in self.parts:
            x = part(x)
        return self.head(x)


class Scaled(torch.nn.Module):
    """A norm without the name of one."""

    def forward(self, x):
        return torch.nn.functional.layer_norm(x, x.shape[-1:])


HEADS = {
    "inside a head": ([torch.nn.LayerNorm(16), torch.nn.Linear(16, 100)], ["head"]),
    "without a name": ([Scaled(), torch.nn.Linear(16, 100)], ["head.0", "head.1"]),
    "after another part": (
        [torch.nn.Linear(16, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 100)],
        ["head.0", "head.1", "head.2"],
    ),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("analyzer", [lsim.LogitLens, lsim.Saturation, lsim.ExitCurve])
def test_a_norm_that_is_not_known_cannot_be_left_out(head, analyzer):
    parts, paths = HEADS[head]
    model = lsim.open_model(Own(*parts).eval(), layers=["parts.0", "parts.1", "parts.2"], unembed=paths)

    lsim.analyze(model, TOKENS, analyzer())

    with pytest.raises(lsim.LayersimError, match=r"`norm` is 'none'.*unembed"):
        lsim.analyze(model, TOKENS, analyzer(norm="none"))


def test_a_head_without_a_norm_has_none_to_leave_out():
    module = Own(torch.nn.Linear(16, 16), torch.nn.Linear(16, 100)).eval()
    model = lsim.open_model(module, layers=["parts.0", "parts.1", "parts.2"], unembed=["head.0", "head.1"])

    losses = [lsim.analyze(model, TOKENS, lsim.LogitLens(norm=norm))["logit_lens"].cross_entropy for norm in ("final", "none")]

    assert torch.equal(*losses)
