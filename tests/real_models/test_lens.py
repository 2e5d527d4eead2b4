"""On real pretrained models: what the layers say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from .. import oracles
from ..models.tiny_models import hidden_states
from ..models.wrapped_models import bridge, nnsight
from .helpers import load


def test_the_lens_of_a_real_model_is_its_own_logits(stories15m, wikitext):
    """Every block's loss by hand, float32, with and without the norm; the norm changes everything."""
    from ..models.wrapped_models import by_hand

    batch = stories15m.tokenizer(wikitext[:2], return_tensors="pt", truncation=True, max_length=24)["input_ids"]
    states = np.concatenate([hidden_states(stories15m, row) for row in batch], axis=1)
    target = torch.cat([torch.cat([row[1:], torch.tensor([-100])]) for row in batch])
    losses = {}
    for norm in ("final", "none"):
        logits = torch.as_tensor(by_hand(stories15m, states, norm == "final"))
        expected = [float(torch.nn.functional.cross_entropy(z, target)) for z in logits]
        found = lsim.analyze(stories15m, batch, lsim.LogitLens(norm=norm))["logit_lens"]
        np.testing.assert_allclose(found.cross_entropy, expected, rtol=1e-4)
        said = logits.argmax(-1)
        np.testing.assert_allclose(found.agreement, (said == said[-1]).double().mean(1), atol=1.5 / said.shape[1])
        losses[norm] = found.cross_entropy
    assert losses["final"][-1] == pytest.approx(losses["none"][-1])
    with torch.no_grad():
        own = stories15m(batch, labels=batch).loss
    np.testing.assert_allclose(losses["final"][-1], own, rtol=1e-5)


def test_sources_agree_on_a_real_model(stories15m, wikitext):
    every = [lsim.Cosine(), lsim.CKA(minibatch=64), lsim.LogitLens(), lsim.Saturation(), lsim.ExitCurve()]
    every += [lsim.Trajectory(window=3), lsim.NeuralCollapse()]
    data = lsim.Data(wikitext[:3], skip_first=2, seq_len=64, tokenizer=stories15m.tokenizer)
    plain = lsim.analyze(stories15m, data, every)
    traced = nnsight(load("stories15M"))
    for model in (traced, lsim.open_model(traced, remote="local"), bridge(load("stories15M"))):
        found = lsim.analyze(model, data, every)
        for name in ("cosine", "cka"):
            np.testing.assert_allclose(found[name].values, plain[name].values, atol=2e-5)
        for name in ("logit_lens", "trajectory", "neural_collapse"):
            np.testing.assert_allclose(found[name].values, plain[name].values, rtol=1e-4)
        # A near tie may fall to either side.
        assert (found["saturation"].counts - plain["saturation"].counts).abs().sum() <= 2


def test_walking_down_and_exits_of_a_real_model_find_the_same_layers(stories15m, wikitext):
    data = lsim.Data(wikitext, pack=True, max_tokens=768)
    alone = lsim.analyze(stories15m, data, lsim.Saturation())["saturation"]
    beside = lsim.analyze(stories15m, data, [lsim.LogitLens(), lsim.Saturation(), lsim.ExitCurve()])
    assert (alone.counts - beside["saturation"].counts).abs().sum() <= 2
    assert 0.05 < alone.early_share < 0.9
    curve = beside["exit_curve"]
    assert (curve.speedup.diff() <= 1e-12).all()
    assert (curve.exits.sum(1) == 768).all()
    assert curve.at(1.0).agreement == 1
    assert curve.at(curve.threshold_for(agreement=0.9)).agreement >= 0.9


def test_a_real_story_is_told_by_the_layers(stories15m):
    grid = lsim.prompts.prediction_grid(stories15m, "Once upon a time, there was a little girl named")
    assert grid.words[-1][-1].strip() == "L" or grid.probability[-1, -1] > 0.3
    assert (grid.saturation_layer <= 5).all()


def test_the_path_ends_after_the_final_norm_of_a_real_model(stories15m, wikitext):
    batch = stories15m.tokenizer(wikitext[:4], return_tensors="pt", truncation=True, max_length=24)["input_ids"]
    with torch.no_grad():
        # Its last one is after the final norm.
        states = torch.stack(stories15m(batch, output_hidden_states=True).hidden_states).double().numpy()
    # Neighbouring tokens may be equal in this text, and then have no angle.
    with np.errstate(invalid="ignore"):
        expected = oracles.oracle_trajectory([states[:, row] for row in range(len(batch))])
    found = lsim.analyze(stories15m, batch, lsim.Trajectory(final_norm=True))["trajectory"]
    for name in ("values", "update_norm", "growth", "lss_mean", "expodistance_mean", "equidistance_mean"):
        np.testing.assert_allclose(getattr(found, name), expected[name], rtol=1e-4, err_msg=name)
