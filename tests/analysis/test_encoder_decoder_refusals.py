"""Refusals of encoder-decoders, and couplings of the blocks of each stack."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from ..tiny_models import random_tokens
from .test_attach_stacks import t5
from .test_encoder_decoders import each_model, rows


@each_model
def test_what_needs_one_stream_refuses_encoder_decoders(make):
    tokens = random_tokens(4, 8)
    for call in (
        lambda m: lsim.stitch(m, m, tokens, at=(1, 1)),
        lambda m: lsim.prediction_grid(m, tokens[0]),
        lambda m: lsim.block_jacobians(m, tokens[0]),
        lambda m: lsim.EarlyExit(m, 0.5),
        lambda m: lsim.aligned_loss(m, tokens),
        lambda m: lsim.evaluate_layers(m, m, tokens),
    ):
        with pytest.raises(lsim.LayersimError, match="encoder-decoder"):
            call(make())


def test_coupling_of_the_blocks_of_either_stack():
    model, given = t5(), {name: values[:2] for name, values in rows().items()}
    for at in ("encoder.resid_post", "resid_post"):
        found = lsim.analyze(model, given, lsim.BlockCoupling(k=2), at=at)["block_coupling"]
        assert found.values.shape == (3, 3)
        assert np.isfinite(found.values.numpy()).all()
        alone = {name: given[name] for name in ("input_ids", "attention_mask")}
        if at == "encoder.resid_post":
            again = lsim.analyze(model, alone, lsim.BlockCoupling(k=2), at=at)["block_coupling"]
            torch.testing.assert_close(again.values, found.values)
