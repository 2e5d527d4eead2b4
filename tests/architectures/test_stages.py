"""Stages of a Swin, which `layers=` or a name chooses; and a DeBERTa with a convolution between two blocks."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers

import tl_layersim as lsim

from .. import oracles
from ..models.input_models import states
from ..models.wrapped_models import nnsight
from ..running.options import called
from .family_cases import CASES, DISENTANGLED, model_of

SOURCES = pytest.mark.parametrize("wrap", [lambda model: model, nnsight], ids=["module", "nnsight"])
FIRST = [f"swin.encoder.layers.0.blocks.{number}" for number in range(2)]
NAMES = ("hook_resid_pre", "hook_resid_post", "hook_resid_post")


def swin():
    return copy.deepcopy(model_of("swin classes")).double()


def pixels() -> torch.Tensor:
    return CASES["swin classes"].data()["pixel_values"].double()


def stage(number: int) -> np.ndarray:
    """`layer token width` of one stage."""
    model = swin()
    return states(model, list(model.swin.encoder.layers[number].blocks), pixel_values=pixels())


def named(number: int) -> tuple[str, ...]:
    return tuple(f"stages.{number}.blocks.{block}.{name}" for block, name in zip((0, 0, 1), NAMES, strict=True))


@pytest.mark.heavy("seconds, where faster tests reach the same")
@SOURCES
def test_a_name_or_layers_choose_a_stage(wrap):
    cosine = lsim.Cosine(center="none")
    for number, options in (
        (1, {}),
        (1, {"at": "stages.1.resid_post"}),
        (0, {"at": "stages.0.resid_post"}),
        (0, {"layers": FIRST}),
    ):
        result = called(lsim.analyze, wrap(swin()), pixels(), [cosine], positions="all", **options)["cosine"]
        assert result.layers == named(number)
        expected = oracles.oracle_cosine([stage(number)], center="none")
        np.testing.assert_allclose(result.values, expected["values"], atol=1e-12)
    assert result.provenance.tokens == 6 * 64


@pytest.mark.light("module")
@SOURCES
def test_sites_of_several_stages_are_compared_by_their_means(wrap):
    sites = [stage(number)[layer].reshape(6, -1, width).mean(1) for number, width in ((0, 8), (1, 16)) for layer in range(3)]
    expected = [[oracles.oracle_cka([a[None]], [b[None]], exact=True)["values"][0, 0] for b in sites] for a in sites]
    at = ["stages.0.resid_post", "stages.1.resid_post"]

    result = lsim.analyze(wrap(swin()), lsim.Data(pixels(), positions="mean"), lsim.CKA(estimator="exact"), at=at)["cka"]

    assert result.layers == named(0) + named(1)
    np.testing.assert_allclose(result.values, expected, atol=1e-9)
    with pytest.raises(lsim.LayersimError, match=r"are not batch x pos(.|\n)*positions='mean'"):
        lsim.analyze(wrap(swin()), lsim.Data(pixels(), positions="all"), lsim.CKA(estimator="exact"), at=at)


def test_sites_of_another_stage_than_that_of_layers_are_refused():
    with pytest.raises(lsim.LayersimError, match=r"`at`.*stages\.1.*`layers`.*stages\.0"):
        lsim.analyze(lsim.open_model(swin(), layers=FIRST), pixels(), "cosine", at="stages.1.attn_out")


def test_the_head_reads_the_last_stage():
    labels = CASES["swin classes"].targets()
    lens = lsim.analyze(swin(), pixels(), lsim.LogitLens(labels=labels))["logit_lens"]
    with torch.no_grad():
        logits = swin()(pixels()).logits

    assert float(lens.cross_entropy[-1]) == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), abs=1e-9)
    with pytest.raises(lsim.LayersimError, match=r"LogitLens.*SwinForImageClassification.*unembed="):
        lsim.analyze(lsim.open_model(swin(), layers=FIRST), pixels(), lsim.LogitLens(labels=labels))


def test_a_copy_with_fewer_blocks_keeps_the_stages_below():
    short = lsim.truncate(swin(), 1)
    assert short.config.depths == [2, 1]
    assert [len(stage.blocks) for stage in short.swin.encoder.layers] == [2, 1]


def test_a_convolution_after_block_0_breaks_the_stream():
    config = transformers.DebertaV2Config(**DISENTANGLED | {"conv_kernel_size": 3, "conv_act": "gelu"})
    torch.manual_seed(0)
    model = transformers.DebertaV2Model(config).eval()
    tokens = CASES["bert"].data()

    result = lsim.analyze(model, tokens, lsim.Cosine(center="none"))["cosine"]

    assert result.layers[1] == "blocks.0.hook_resid_post"
    with pytest.raises(lsim.LayersimError, match="needs every block of the residual stream"):
        lsim.analyze(model, tokens, lsim.Trajectory())
