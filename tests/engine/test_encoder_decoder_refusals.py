"""Refusals of encoder-decoders, and couplings of the blocks of each stack."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from ..models.tiny_models import random_tokens
from ..user_loops.test_attach_stacks import t5
from .test_encoder_decoders import each_model, rows


@pytest.mark.heavy("seconds, where faster tests reach the same")
@each_model
def test_what_needs_one_stream_refuses_encoder_decoders(make):
    tokens = random_tokens(4, 8)
    for call in (
        lambda m: lsim.prompts.prediction_grid(m, tokens[0]),
        lambda m: lsim.prompts.block_jacobians(m, tokens[0]),
        lambda m: lsim.EarlyExit(m, 0.5),
        lambda m: lsim.training.aligned_loss(m, tokens),
    ):
        with pytest.raises(lsim.LayersimError, match="encoder-decoder"):
            call(make())


@pytest.mark.light("T5")
@each_model
def test_what_reads_the_decoder_needs_its_tokens(make):
    tokens = random_tokens(4, 8)
    for call in (
        lambda m: lsim.stitch(m, m, tokens, at=(0, 0)),
        lambda m: lsim.finetune_aligned(m, tokens),
        lambda m: lsim.evaluate_layers(m, m, tokens),
    ):
        with pytest.raises(lsim.LayersimError, match=r"`data`.*decoder_input_ids"):
            call(make())


@pytest.mark.light("BART")
@each_model
def test_the_decoder_is_trained_stitched_and_truncated(make):
    model = make().double().eval()
    data = rows()
    # One label at each position of the decoder that is no padding.
    mask = data["decoder_attention_mask"].bool()
    labels = torch.where(mask, random_tokens(*mask.shape), -100)
    with torch.no_grad():
        logits = model(**data).logits
    expected = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    training = lsim.AlignedTraining(steps=1)
    labelled = data | {"labels": labels}
    trained = lsim.finetune_aligned(
        copy.deepcopy(model), lsim.Data(labelled, batch_size=3), training, labels="data", eval_data=labelled
    )

    assert float(trained.values[0, -1]) == pytest.approx(expected, abs=1e-9)

    lens = lsim.analyze(model, labelled, lsim.LogitLens(labels="data"))["logit_lens"]
    torch.testing.assert_close(trained.values[0], lens.values, atol=1e-9, rtol=0)

    stitched = lsim.stitch(model, model, labelled, at=(0, 0), adapter="identity", labels="data", eval_data=labelled)
    assert stitched.loss == pytest.approx(expected, abs=1e-9)
    assert stitched.back_loss == pytest.approx(expected, abs=1e-9)

    short = lsim.truncate(model, 1)
    with torch.no_grad():
        logits = short(**data).logits
    first = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))

    assert float(lens.values[0]) == pytest.approx(first, abs=1e-9)


def test_coupling_of_the_blocks_of_either_stack():
    model = t5()
    inputs = {name: values[:2] for name, values in rows().items()}
    for at in ("encoder.resid_post", "resid_post"):
        result = lsim.analyze(model, inputs, lsim.BlockCoupling(k=2), at=at)["block_coupling"]
        assert result.values.shape == (3, 3)
        assert np.isfinite(result.values.numpy()).all()
        alone = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        if at == "encoder.resid_post":
            again = lsim.analyze(model, alone, lsim.BlockCoupling(k=2), at=at)["block_coupling"]
            torch.testing.assert_close(again.values, result.values)
