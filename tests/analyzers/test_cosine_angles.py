"""Cosine: angular distances by gap, and block influence, both of raw residuals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from ..tiny_models import random_tokens, tiny_llama
from ..views import from_views, residuals, view


def turned(degrees: list[float], tokens: int = 9) -> np.ndarray:
    """Layers in a plane, each turned by a number of degrees; tokens and layers differ in norm."""
    angles = np.deg2rad(np.array(degrees)[:, None] + np.linspace(0, 300, tokens))
    x = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    return x * (1 + np.arange(tokens))[:, None] * (3.0 ** np.arange(len(degrees)))[:, None, None]


@pytest.mark.parametrize("center", ["none", "dataset"])
def test_planted_angles(center):
    found = from_views(lsim.Cosine(center=center), [view(turned([0, 90, 120, 125, 35]))])
    degrees = [[0, 90, 120, 125, 35], [90, 0, 30, 35, 55], [120, 30, 0, 5, 85], [125, 35, 5, 0, 90], [35, 55, 85, 90, 0]]
    np.testing.assert_allclose(found.angular, np.array(degrees) / 180, atol=1e-8)
    np.testing.assert_allclose(found.block_influence, 1 - np.cos(np.deg2rad([90, 30, 5, 90])), atol=1e-12)
    np.testing.assert_allclose(found.angular_by_gap(1), np.array([90, 30, 5, 90]) / 180, atol=1e-8)
    np.testing.assert_allclose(found.angular_by_gap(2), np.array([120, 35, 85]) / 180, atol=1e-8)
    np.testing.assert_allclose(found.angular_by_gap(4), [35 / 180], atol=1e-8)
    assert found.blocks_to_drop(1) == (2,)
    assert found.blocks_to_drop(2) == (1, 2)
    assert found.blocks_to_drop(3) == (1, 2, 3)
    assert found.blocks_to_drop(4) == (0, 1, 2, 3)


def test_mean_of_angles_is_not_the_angle_of_the_mean():
    x = np.array([[[1.0, 0.0], [1.0, 0.0]], [[2.0, 0.0], [0.0, 2.0]]])
    found = from_views(lsim.Cosine(center="none"), [view(x)])
    # 0 and 90 degrees; the arccos of their mean cosine is 60 degrees.
    np.testing.assert_allclose(found.angular[0, 1], 0.25)
    np.testing.assert_allclose(found.block_influence, [0.5])
    assert torch.equal(found.angular.diagonal(), torch.zeros(2, dtype=torch.float64))


def test_opposite_directions_are_at_distance_one():
    found = from_views(lsim.Cosine(center="none"), [view(np.stack([residuals(0)[0], -residuals(0)[0]]))])
    np.testing.assert_allclose(found.angular[0, 1], 1)
    np.testing.assert_allclose(found.block_influence, [2])


@pytest.mark.parametrize("center", ["none", "dataset"])
def test_zero_tokens_are_omitted(center):
    x = residuals(0)
    zeroed = x.copy()
    zeroed[1, :10] = 0
    with pytest.warns(lsim.LayersimWarning) if center == "none" else np.errstate():
        found = from_views(lsim.Cosine(center=center), [view(zeroed[:, :25]), view(zeroed[:, 25:])])
    rest = from_views(lsim.Cosine(center="none"), [view(x[:, 10:])])
    whole = from_views(lsim.Cosine(center="none"), [view(x)])
    np.testing.assert_allclose(found.angular[1], rest.angular[1], atol=1e-12)
    np.testing.assert_allclose(found.angular[0, 2:], whole.angular[0, 2:], atol=1e-12)
    np.testing.assert_allclose(found.block_influence, [*rest.block_influence[:2], whole.block_influence[2]], atol=1e-12)


def test_more_tokens_than_a_chunk():
    x = residuals(2, tokens=300)
    found = from_views(lsim.Cosine(), [view(x)])
    cosine = (x[0] * x[3]).sum(-1) / np.linalg.norm(x[0], axis=-1) / np.linalg.norm(x[3], axis=-1)
    np.testing.assert_allclose(found.angular[0, 3], np.arccos(cosine).mean() / np.pi, rtol=1e-12)


def test_gaps_that_do_not_exist_are_refused():
    found = from_views(lsim.Cosine(), [view(residuals(0))])
    for n in (0, 4):
        with pytest.raises(lsim.LayersimError, match=r"`n`.* 1 to 3"):
            found.angular_by_gap(n)


def test_sites_that_are_not_consecutive_have_no_gaps():
    at = ["blocks.0.hook_resid_post", "blocks.2.hook_resid_post"]
    found = lsim.analyze(tiny_llama(), random_tokens(), lsim.Cosine(), at=at)["cosine"]
    assert bool(found.block_influence.isnan().all())
    assert float(found.angular[0, 1]) > 0
    with pytest.raises(lsim.LayersimError, match=r"blocks\.0\.hook_resid_post, blocks\.2\.hook_resid_post"):
        found.blocks_to_drop(1)


def test_the_last_token_of_each_row_can_be_chosen():
    model, tokens = tiny_llama(), random_tokens(3, 12)
    found = lsim.analyze(model, lsim.Data(tokens, positions="last"), lsim.Cosine())["cosine"]
    with torch.no_grad():
        states = model(tokens, output_hidden_states=True).hidden_states
    a, b = states[0][:, -1].double(), states[2][:, -1].double()
    cosine = (a * b).sum(-1) / a.norm(dim=-1) / b.norm(dim=-1)
    np.testing.assert_allclose(found.angular_by_gap(2)[0], cosine.arccos().mean() / np.pi, atol=1e-6)
