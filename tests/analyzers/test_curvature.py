"""Curvature from token to token: known paths, rows and gaps between positions, what has no angle."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from .. import oracles
from ..tiny_models import random_tokens, tiny_llama
from ..views import from_views, residuals, view


def paths(steps: np.ndarray, layers: int = 3) -> np.ndarray:
    """Positions that are reached by steps `position dim`, at layers of different scale and origin."""
    path = np.cumsum(steps, axis=0)
    return np.stack([path * 10.0**layer + layer for layer in range(layers)])


def test_straight_paths_corners_and_reversals():
    # Angles of 0, 90, 180 and 45 degrees, with steps of different lengths.
    steps = np.array([[7.0, 3.0], [1, 0], [3, 0], [0, 2], [0, -5], [4, -4]])
    found = from_views(lsim.Trajectory(), [view(paths(steps))])
    angles = np.deg2rad([0, 90, 180, 45])
    np.testing.assert_allclose(found.curvature, np.full(3, angles.mean()), rtol=1e-12)
    np.testing.assert_allclose(found.curvature_std, np.full(3, angles.std()), rtol=1e-12)
    assert found.turns == 4


def test_small_angles_keep_their_digits():
    steps = np.array([[1.0, 1.0], [1, 0], [1, 1e-6], [1, 2e-6]])
    found = from_views(lsim.Trajectory(), [view(paths(steps, 2))])
    np.testing.assert_allclose(found.curvature, [1e-6, 1e-6], rtol=1e-4)


def test_nulls_of_random_paths():
    rng = np.random.default_rng(0)
    independent = rng.normal(size=(2, 600, 400))
    found = from_views(lsim.Trajectory(), [view(independent)])
    np.testing.assert_allclose(found.curvature, next(iter(found.baselines("curvature").values())), atol=0.01)
    np.testing.assert_allclose(found.curvature, 2 * math.pi / 3, atol=0.01)
    walk = from_views(lsim.Trajectory(), [view(independent.cumsum(1))])
    np.testing.assert_allclose(walk.curvature, math.pi / 2, atol=0.01)
    assert found.baselines("norm") == {}


def test_angles_do_not_cross_rows():
    x = residuals(0, tokens=20)
    found = from_views(lsim.Trajectory(), [view(x, rows=4)])
    angles = np.concatenate([oracles.turning_angles(x[:, start : start + 5]) for start in (0, 5, 10, 15)], axis=1)
    np.testing.assert_allclose(found.curvature, angles.mean(1), rtol=1e-9)
    np.testing.assert_allclose(found.curvature_std, angles.std(1), rtol=1e-9)
    assert found.turns == 12


def test_angles_need_consecutive_positions():
    x = residuals(0, tokens=9)
    # One row, whose positions 3 and 8 are not counted.
    gaps = replace(view(x), position=torch.tensor([0, 1, 2, 4, 5, 6, 7, 9, 10]))
    found = from_views(lsim.Trajectory(), [gaps])
    angles = np.concatenate([oracles.turning_angles(x[:, :3]), oracles.turning_angles(x[:, 3:7])], axis=1)
    np.testing.assert_allclose(found.curvature, angles.mean(1), rtol=1e-9)
    assert found.turns == 3


@pytest.mark.parametrize("tokens", [257, 258, 259, 600])
def test_rows_longer_than_a_chunk(tokens):
    x = residuals(1, layers=2, tokens=tokens)
    found = from_views(lsim.Trajectory(), [view(x)])
    np.testing.assert_allclose(found.curvature, oracles.turning_angles(x).mean(1), rtol=1e-9)
    assert found.turns == tokens - 2


def test_equal_neighbours_have_no_angle():
    steps = np.array([[1.0, 1.0], [1, 0], [0, 0], [0, 1], [1, 0], [1, 0]])
    found = from_views(lsim.Trajectory(), [view(paths(steps))])
    # Four triples, of which two have the step of zero.
    np.testing.assert_allclose(found.curvature, np.full(3, np.deg2rad([90, 0]).mean()), rtol=1e-12)
    assert found.turns == 4


def test_rows_of_one_position_have_no_curvature():
    tokens = random_tokens(5, 12)
    found = lsim.analyze(tiny_llama(), lsim.Data(tokens, positions="last"), lsim.Trajectory())["trajectory"]
    assert found.turns == 0
    assert bool(found.curvature.isnan().all())
    assert bool(found.curvature_std.isnan().all())
    assert not bool(found.values.isnan().any())


def test_single_steps_of_generation_have_no_curvature():
    model, tokens = tiny_llama(), random_tokens(1, 8)
    with lsim.attach(model, lsim.Trajectory()) as probe:
        model(tokens)
    prompt = probe.results()["trajectory"]
    with lsim.attach(model, lsim.Trajectory()) as probe:
        model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
    found = probe.results()["trajectory"]
    # The prompt is one forward pass, and each further token one of a single position.
    assert (prompt.turns, found.turns) == (6, 6)
    torch.testing.assert_close(found.curvature, prompt.curvature, rtol=1e-5, atol=0)
    assert found.provenance.tokens > 8


def test_padding_on_the_left_changes_nothing():
    rows = [random_tokens(1, n, seed=n)[0] for n in (9, 4)]
    tokens, mask = torch.zeros(2, 9, dtype=torch.int64), torch.zeros(2, 9, dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i, 9 - len(row) :], mask[i, 9 - len(row) :] = row, 1
    padded = lsim.analyze(tiny_llama(), {"input_ids": tokens, "attention_mask": mask}, lsim.Trajectory())["trajectory"]
    plain = lsim.analyze(tiny_llama(), rows, lsim.Trajectory())["trajectory"]
    assert torch.equal(padded.curvature, plain.curvature)
    assert padded.turns == plain.turns == 9
