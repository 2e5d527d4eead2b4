"""Hugging Face models read by hooks."""

from __future__ import annotations

import gc

import nnsight
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.data.batches import Batch
from tl_layersim.sources.hooked_module import HookedSource

from ..models.tiny_models import random_tokens, tiny_llama
from ..models.wrapped_models import bridge


def test_one_layer_and_one_row():
    analyzers = [lsim.Cosine(), lsim.CKA(minibatch=16, unit="token"), lsim.LogitLens()]
    found = lsim.analyze(tiny_llama(layers=1), random_tokens(1, 20), analyzers)
    assert float(found["cka"].values[0, 0]) == pytest.approx(1)
    assert found["cosine"].values.shape == (2, 2)
    assert found["cosine"].norm_ratio.shape == (1,)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_dropout_that_a_bridge_does_not_list_is_off_too():
    """GPT-2's embedding dropout belongs to the model inside."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    inner = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100, n_positions=64, embd_pdrop=0.5))
    model = bridge(inner).train()
    first, second = (lsim.analyze(model, random_tokens(), "cosine")["cosine"].values for _ in range(2))
    assert torch.equal(first, second)
    assert model.original_model.transformer.drop.training


class Widening(torch.nn.Module):
    """Three blocks that pass on what they get, the second to a larger width."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(100, 8)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 16), torch.nn.Linear(16, 16)])
        self.norm, self.head = torch.nn.LayerNorm(16), torch.nn.Linear(16, 100)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("wrapped", [False, True], ids=["module", "nnsight"])
def test_blocks_whose_widths_differ_are_no_stream(wrapped):
    """A narrower layer padded with zeros would pass through the final norm and give plausible, wrong predictions."""
    net, tokens = Widening(), random_tokens()
    model = lsim.open_model(
        nnsight.NNsight(net) if wrapped else net, layers=[f"blocks.{i}" for i in range(3)], unembed=["norm", "head"]
    )
    for analyzer in (lsim.LogitLens(), lsim.Saturation(), lsim.Trajectory()):
        with pytest.raises(lsim.LayersimError, match=rf"{type(analyzer).__name__}.*blocks\.0, blocks\.1"):
            lsim.analyze(model, tokens, analyzer)
    with pytest.raises(lsim.LayersimError, match=r"Cosine.* 8\b.* 16"):
        lsim.analyze(model, tokens, lsim.Cosine())
    assert lsim.analyze(model, tokens, lsim.CKA(minibatch=16))["cka"].values.shape == (4, 4)
    if not wrapped:
        with pytest.raises(lsim.LayersimError, match=r"Aligned training.*blocks\.0, blocks\.1"):
            lsim.finetune_aligned(model, tokens, lsim.AlignedTraining(steps=1))


def test_the_stream_is_tested_with_one_copy_at_a_time():
    """The first row at all blocks of a large model may not fit beside the weights."""
    net = torch.nn.Sequential(torch.nn.Embedding(100, 7), *(torch.nn.Linear(7, 7) for _ in range(12)))
    held = []
    net[11].register_forward_hook(
        lambda *_: held.append(sum(type(one) is torch.Tensor and one.shape == (1, 5, 7) for one in gc.get_objects()))
    )
    source = HookedSource(net, [str(block) for block in range(1, 13)])
    tokens = torch.arange(5)[None]
    assert source.model.stream == "unknown"
    source.settle(Batch(tokens, tokens >= 0, tokens >= 0, 0))
    assert source.model.stream == "whole"
    assert held[0] < 6
