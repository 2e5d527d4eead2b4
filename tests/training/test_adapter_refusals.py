"""What is said of a training of adapters that cannot go well."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.core.errors import LayersimError
from tl_layersim.remote import low_rank_adapters

from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama
from .helpers import traced, train

# Random tokens have nothing in common.
pytestmark = pytest.mark.filterwarnings("ignore:On held-out data the aligned loss rose")


def test_a_rising_loss_is_said():
    with pytest.warns(UserWarning, match=r"aligned loss rose from .*lr=0\.3"):
        train(traced(), lr=3.0, steps=6)


def test_what_diverges_is_refused(monkeypatch):
    plain = low_rank_adapters.adamw_step

    def stepped(*args):
        return {name: value * math.inf for name, value in plain(*args).items()}

    monkeypatch.setattr(low_rank_adapters, "adamw_step", stepped)

    with pytest.raises(LayersimError, match=r"diverged.*0.0003"):
        train(traced(), lr=0.003)


def test_broken_weights_are_refused_before_the_training():
    broken = tiny_llama()
    with torch.no_grad():
        broken.model.layers[1].mlp.down_proj.weight.fill_(torch.nan)
    with pytest.raises(LayersimError, match=r"LlamaForCausalLM.*not finite before"):
        train(traced(broken))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 0}, "`rank`.*0"),
        ({"steps": 0}, "`steps`.*0"),
        ({"lr": 0.0}, "`lr`.*0.0"),
        ({"at": [3]}, "`at`.*3;.*0 to 2"),
        ({"at": [-4]}, "`at`.*-4"),
        ({"at": ["blocks.0.hook_resid_pre"]}, "`at`.*blocks.0.hook_resid_pre"),
        ({"at": []}, r"`at`.*\[\]"),
        ({"at": [1, "blocks.1.hook_resid_post"]}, "`at`.*blocks.1.hook_resid_post"),
        ({"weights": [0.5, 0.5]}, "`weights`.*0.5, 0.5"),
        ({"checkpoint": "nowhere/run.ckpt"}, "`checkpoint`.*nowhere"),
        ({"data": {"pixel_values": torch.zeros(2, 3, 4, 4), "labels": [0, 1]}}, "`data`.*'pixel_values', 'labels'"),
        ({"data": {"inputs_embeds": torch.zeros(2, 3, 32), "labels": [0, 1]}}, "rows without token ids"),
        ({"data": random_tokens(1, 8), "eval_data": None}, "`data`.* 1 .*eval_data="),
    ],
)
def test_what_cannot_be_done_is_refused(options, words):
    with pytest.raises(LayersimError, match=words):
        train(traced(), **options)


def test_models_that_cannot_be_trained_through_are_refused():
    with pytest.raises(LayersimError, match=r"`model`.*LlamaForCausalLM.*finetune_aligned"):
        train(tiny_llama())

    stitched = lsim.stitch(tiny_llama(), tiny_llama(), random_tokens(4, 8), at=(0, 0), adapter="identity").model
    with pytest.raises(LayersimError, match=r"`model`.*StitchedModel"):
        train(stitched)
    with pytest.raises(LayersimError, match=r"`model`.*float16"):
        train(traced(tiny_llama(dtype=torch.float16)))

    from nnsight import NNsight

    with pytest.raises(LayersimError, match="has no known head"):
        train(NNsight(tiny_llama().model))

    result = train(traced())
    gpt2 = traced(tiny_gpt2())
    with pytest.raises(Exception, match="model"), gpt2.trace(random_tokens(1, 4)):
        result.apply(gpt2)

    narrow = replace(result, down=result.down[..., :8], up=result.up[:, :8])
    model = traced()
    with pytest.raises(Exception, match="4x32 and 8x3"), model.trace(random_tokens(1, 4)):
        narrow.apply(model)
