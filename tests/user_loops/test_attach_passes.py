"""attach: what is a forward pass of the model, and what is not."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint

import tl_layersim as lsim

from ..input_models import OwnBlocks
from ..runs import analyzers, each_model, logits
from ..tiny_models import random_tokens, tiny_llama
from ..views import worst
from ..wrapped_models import bridge


def test_a_failed_forward_pass_does_not_spoil_the_next():
    model, tokens = tiny_llama(), random_tokens(2, 12)
    broken = [True]

    def fail(module, args):
        if broken[0]:
            raise RuntimeError("half way")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with torch.no_grad(), lsim.attach(model, analyzers()) as probe:
        with pytest.raises(RuntimeError, match="half way"):
            model(tokens)
        broken[0] = False
        model(tokens)
        broken[0] = True
        with pytest.raises(RuntimeError, match="half way"):
            model(tokens, attention_mask=torch.tensor([[1] * 12, [1] * 5 + [0] * 7]))
        broken[0] = False
        model(inputs_embeds=model.get_input_embeddings()(tokens)[:, :7])
    handle.remove()
    assert probe.results()["cosine"].provenance.tokens == 24 + 14


def test_generation_with_a_cache_counts_each_token_once():
    model = bridge(tiny_llama())
    with lsim.attach(model, analyzers()) as probe:
        out = model.generate(random_tokens(4, 6), max_new_tokens=7, stop_at_eos=False, verbose=False, do_sample=False)
    # The last token is generated, but never read.
    assert probe.results()["cosine"].provenance.tokens == 4 * (6 + 7 - 1)
    expected = lsim.analyze(model, out[:, :-1], analyzers())
    for name in expected:
        assert worst(probe.results()[name], expected[name]) < 1e-5


class Checkpointed(torch.nn.Module):
    """Blocks inside a checkpoint, as models that call `torch.utils.checkpoint` around their blocks have them."""

    def __init__(self, layers: int, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(100, 8)
        self.parts = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(layers))
        self.reentrant = reentrant

    def forward(self, tokens):
        x = self.words(tokens)
        for part in self.parts:
            x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_does_not_count_twice(layers, reentrant):
    """The backward pass runs blocks again, one by one; of a single block that looks like a whole forward pass."""
    model, tokens = Checkpointed(layers, reentrant), random_tokens(4, 12)
    paths = [f"parts.{i}" for i in range(layers)]
    with lsim.attach(lsim.open_model(model, layers=paths), analyzers()) as probe:
        model(tokens).square().mean().backward()
    assert probe.results()["cosine"].provenance.tokens == 48


@each_model
def test_gradient_checkpointing_of_a_real_layout(make):
    model, tokens = make().train(), random_tokens(4, 12)
    getattr(model, "original_model", model).gradient_checkpointing_enable()
    with lsim.attach(model, analyzers()) as probe:
        logits(model, tokens).square().mean().backward()
    assert probe.results()["cosine"].provenance.tokens == 48


def test_a_block_that_is_run_alone_is_no_forward_pass():
    model, tokens = OwnBlocks(), random_tokens(2, 12)
    layers = ["parts.0", "parts.1", "parts.2"]
    with torch.no_grad(), lsim.attach(lsim.open_model(model, layers=layers), lsim.Cosine(center="none")) as probe:
        model.parts[1](torch.ones(2, 12, 8))
        model(tokens)
        model.parts[2](torch.ones(2, 5, 8))
        model.parts[0](torch.ones(2, 5, 8))
    expected = lsim.analyze(lsim.open_model(model, layers=layers), tokens, lsim.Cosine(center="none"))
    assert worst(probe.results()["cosine"], expected["cosine"]) == 0


def test_the_stack_inside_a_model_may_be_run_too():
    model, tokens = tiny_llama(), random_tokens(2, 6)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    with torch.no_grad(), lsim.attach(model, analyzers()) as probe:
        model.model(tokens, attention_mask=mask)
        model(tokens, mask)
    assert probe.results()["cosine"].provenance.tokens == 20


def test_forward_passes_of_analyze_inside_the_block_are_not_counted():
    model, tokens = tiny_llama(), random_tokens(2, 12)
    with torch.no_grad(), lsim.attach(model, analyzers()) as probe:
        model(tokens)
        lsim.analyze(model, random_tokens(4, 9), [lsim.Cosine(), lsim.BlockCoupling(k=2)])
        model(tokens)
    assert probe.results()["cosine"].provenance.tokens == 48


def test_centred_cosine_with_the_mean_of_an_earlier_run():
    model, tokens = tiny_llama(), random_tokens(8, 12)
    expected = lsim.analyze(model, tokens, lsim.Cosine())["cosine"]
    with torch.no_grad(), lsim.attach(model, lsim.Cosine(center=expected.mean)) as probe:
        for rows in tokens.split(4):
            model(rows)
    assert float((probe.results()["cosine"].values - expected.values).abs().max()) < 1e-9
