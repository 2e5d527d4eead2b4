"""Paths: known shapes, the oracle with windows, what has no shape."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from .. import oracles
from ..inputs.views import from_views, residuals, view
from ..models.head_models import CASES
from ..models.tiny_models import random_tokens, tiny_llama
from ..models.wrapped_models import nnsight


def straight(layers: int = 5, tokens: int = 6, ratio: float = 2.0) -> np.ndarray:
    """Norms that grow by a constant factor along one direction a token."""
    direction = np.random.default_rng(0).normal(size=(tokens, 8))
    return np.stack([direction * ratio**layer for layer in range(layers)])


def test_a_straight_path_of_exponential_growth():
    result = from_views(lsim.Trajectory(window=2), [view(straight())])
    np.testing.assert_allclose(result.lss.mean, 1, atol=1e-12)
    np.testing.assert_allclose(result.lss.std, 0, atol=1e-6)
    np.testing.assert_allclose(result.windowed_lss, 1, atol=1e-12)
    np.testing.assert_allclose(result.expodistance.mean, 0, atol=1e-12)
    np.testing.assert_allclose(result.growth, np.log(2), atol=1e-12)
    assert result.equidistance.mean > 0.4


def test_equal_steps_and_a_zigzag():
    corner = np.zeros((5, 3, 8))
    for layer in range(5):
        corner[layer, :, 0] = 1 + (layer + 1) // 2
        corner[layer, :, 1] = 1 + layer // 2

    result = from_views(lsim.Trajectory(), [view(corner)])

    np.testing.assert_allclose(result.equidistance.mean, 0, atol=1e-12)
    # Four unit steps, two in each of two directions.
    np.testing.assert_allclose(result.lss.mean, 4 / np.sqrt(8), atol=1e-12)
    np.testing.assert_allclose(result.update_norm, 1, atol=1e-12)
    # A corner is half a diagonal of a unit square away from the diagonal of two, every second step.
    np.testing.assert_allclose(result.geodesic_deviation, [0, 0.25, 0, 0.25, 0], atol=1e-12)


@pytest.mark.parametrize("window", [2, 3, 4])
def test_windows_equal_the_oracle(window):
    x = [residuals(i, layers=5, tokens=20) for i in range(2)]
    result = from_views(lsim.Trajectory(window=window), [view(b) for b in x])
    expected = oracles.oracle_trajectory(x, window)

    for name in ("windowed_lss", "lss_mean"):
        np.testing.assert_allclose(getattr(result, name), expected[name], rtol=1e-9)
    assert len(result.centres) == 5 - window
    # The middle of a window of 4 steps, from layer 0 to layer 4, is layer 2.
    assert result.centres[0] == result.layers[window // 2]
    assert list(result.to_frame("windowed_lss").columns) == ["centre", "windowed_lss"]


def test_the_score_of_a_model_is_at_least_one_and_turns_with_nothing():
    x = residuals(3)
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(8, 8)))[0]

    plain, turned = (from_views(lsim.Trajectory(), [view(y)]) for y in (x, x @ rotation))

    assert plain.lss.quantiles[0] >= 1
    for name in ("lss_mean", "expodistance_mean", "equidistance_mean"):
        np.testing.assert_allclose(getattr(plain, name), getattr(turned, name), rtol=1e-9)


def test_what_has_no_shape_is_refused():
    with pytest.raises(lsim.LayersimError, match=r"`window`.* 1"):
        lsim.Trajectory(window=1)
    with pytest.raises(lsim.LayersimError, match=r"`window`.* 9.* 3\b"):
        lsim.analyze(tiny_llama(), random_tokens(), lsim.Trajectory(window=9))


def test_a_model_of_one_block_has_a_straight_path():
    result = lsim.analyze(tiny_llama(layers=1), random_tokens(), lsim.Trajectory())["trajectory"]
    np.testing.assert_allclose(result.lss.mean, 1, atol=1e-6)
    assert result.equidistance.mean == 0
    assert result.expodistance.mean == 0


def test_massive_norms_and_tiny_ones_stay_in_the_histograms():
    x = torch.as_tensor(residuals(2)) * 1e-4
    x[:, 0] *= 1e9

    result = from_views(lsim.Trajectory(), [view(x.numpy())])
    expected = oracles.oracle_trajectory([x.numpy()])

    np.testing.assert_allclose(result.norm_quantiles, expected["norm_quantiles"], rtol=0.024)


def test_the_path_may_end_after_the_final_norm():
    x = [residuals(i, layers=4, tokens=20) for i in range(2)]
    normed = [np.concatenate([b[:-1], torch.nn.functional.layer_norm(torch.as_tensor(b[-1:]), (8,)).numpy()]) for b in x]

    result = from_views(lsim.Trajectory(window=2, final_norm=True), [view(b) for b in x])

    for name, value in oracles.oracle_trajectory(normed, 2).items():
        rtol, atol = (2.4e-2, 0) if "quantiles" in name else (1e-9, 1e-9)
        np.testing.assert_allclose(getattr(result, name), value, rtol=rtol, atol=atol, err_msg=name)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_the_final_norm_is_that_of_the_model_in_every_source():
    model = tiny_llama()
    tokens = random_tokens(4, 9)
    ids = torch.as_tensor(tokens)
    analyzer = lsim.Trajectory(final_norm=True)
    with torch.no_grad():
        # Its last one is after the final norm.
        states = model(ids, output_hidden_states=True).hidden_states
    expected = oracles.oracle_trajectory([torch.stack(states)[:, row].double().numpy() for row in range(len(ids))])

    here = lsim.analyze(model, lsim.Data(tokens, batch_size=2), analyzer)["trajectory"]
    there = lsim.analyze(lsim.open_model(nnsight(tiny_llama()), remote="local"), lsim.Data(tokens, batch_size=2), analyzer)[
        "trajectory"
    ]
    with lsim.attach(model, analyzer) as probe, torch.no_grad():
        model(ids)

    for result in (here, there, probe.results()["trajectory"]):
        for name in ("values", "update_norm", "growth", "lss_mean", "expodistance_mean", "equidistance_mean", "curvature"):
            np.testing.assert_allclose(getattr(result, name), expected[name], rtol=1e-4, err_msg=name)
    assert here.final_norm
    assert here.layers[-2:] == ("blocks.1.hook_resid_post", "ln_final.hook_normalized")
    assert "norm after the final norm over norm of the embedding" in here.headline()


@pytest.mark.parametrize("name", ["without a head", "without a final norm", "pooled before the norm"])
def test_the_final_norm_needs_one_of_each_position(name):
    model, data = {
        "without a head": lambda: (tiny_llama().model, random_tokens()),
        "without a final norm": lambda: (CASES["bert"].build(), CASES["bert"].data()),
        "pooled before the norm": lambda: (CASES["beit"].build(), CASES["beit"].data()),
    }[name]()
    with pytest.raises(lsim.LayersimError, match="final_norm"):
        lsim.analyze(model, data, lsim.Trajectory(final_norm=True))


def test_one_token_has_a_path():
    x = residuals(0, tokens=1)
    result = from_views(lsim.Trajectory(window=2), [view(x)])
    expected = oracles.oracle_trajectory([x], 2)

    for name in ("values", "update_norm", "growth", "lss_mean", "expodistance_mean", "equidistance_mean", "windowed_lss"):
        np.testing.assert_allclose(getattr(result, name), expected[name], rtol=1e-9, err_msg=name)
    # Rounding under a square root.
    np.testing.assert_allclose(result.lss_std, 0, atol=1e-6)


def paths(steps: np.ndarray, layers: int = 3) -> np.ndarray:
    """Positions that are reached by steps `position dim`, at layers of different scale and origin."""
    path = np.cumsum(steps, axis=0)
    return np.stack([path * 10.0**layer + layer for layer in range(layers)])


def test_straight_paths_corners_and_reversals():
    # Angles of 0, 90, 180 and 45 degrees, with steps of different lengths.
    steps = np.array([[7.0, 3.0], [1, 0], [3, 0], [0, 2], [0, -5], [4, -4]])
    result = from_views(lsim.Trajectory(), [view(paths(steps))])
    angles = np.deg2rad([0, 90, 180, 45])

    np.testing.assert_allclose(result.curvature, np.full(3, angles.mean()), rtol=1e-12)
    assert result.turns == 4


def test_small_angles_keep_their_digits():
    steps = np.array([[1.0, 1.0], [1, 0], [1, 1e-6], [1, 2e-6]])
    result = from_views(lsim.Trajectory(), [view(paths(steps, 2))])
    np.testing.assert_allclose(result.curvature, [1e-6, 1e-6], rtol=1e-4)


def test_nulls_of_random_paths():
    rng = np.random.default_rng(0)
    independent = rng.normal(size=(2, 600, 400))

    result = from_views(lsim.Trajectory(), [view(independent)])

    np.testing.assert_allclose(result.curvature, next(iter(result.baselines("curvature").values())), atol=0.01)
    np.testing.assert_allclose(result.curvature, 2 * math.pi / 3, atol=0.01)

    walk = from_views(lsim.Trajectory(), [view(independent.cumsum(1))])
    np.testing.assert_allclose(walk.curvature, math.pi / 2, atol=0.01)
    assert result.baselines("norm") == {}


def test_angles_do_not_cross_rows():
    x = residuals(0, tokens=20)
    result = from_views(lsim.Trajectory(), [view(x, rows=4)])
    angles = np.concatenate([oracles.turning_angles(x[:, start : start + 5]) for start in (0, 5, 10, 15)], axis=1)

    np.testing.assert_allclose(result.curvature, angles.mean(1), rtol=1e-9)
    assert result.turns == 12


def test_angles_need_consecutive_positions():
    x = residuals(0, tokens=9)
    # One row, whose positions 3 and 8 are not counted.
    gaps = replace(view(x), position=torch.tensor([0, 1, 2, 4, 5, 6, 7, 9, 10]))

    result = from_views(lsim.Trajectory(), [gaps])
    angles = np.concatenate([oracles.turning_angles(x[:, :3]), oracles.turning_angles(x[:, 3:7])], axis=1)

    np.testing.assert_allclose(result.curvature, angles.mean(1), rtol=1e-9)
    assert result.turns == 3


@pytest.mark.parametrize("tokens", [257, 258, 259, 600])
def test_rows_longer_than_a_chunk(tokens):
    x = residuals(1, layers=2, tokens=tokens)
    result = from_views(lsim.Trajectory(), [view(x)])

    np.testing.assert_allclose(result.curvature, oracles.turning_angles(x).mean(1), rtol=1e-9)
    assert result.turns == tokens - 2


def test_equal_neighbours_have_no_angle():
    steps = np.array([[1.0, 1.0], [1, 0], [0, 0], [0, 1], [1, 0], [1, 0]])
    result = from_views(lsim.Trajectory(), [view(paths(steps))])

    # Four triples, of which two have the step of zero.
    np.testing.assert_allclose(result.curvature, np.full(3, np.deg2rad([90, 0]).mean()), rtol=1e-12)
    assert result.turns == 4


def test_rows_of_one_position_have_no_curvature():
    tokens = random_tokens(5, 12)
    result = lsim.analyze(tiny_llama(), lsim.Data(tokens, positions="last"), lsim.Trajectory())["trajectory"]

    assert result.turns == 0
    assert bool(result.curvature.isnan().all())
    assert not bool(result.values.isnan().any())


def test_single_steps_of_generation_have_no_curvature():
    model = tiny_llama()
    tokens = random_tokens(1, 8)

    with lsim.attach(model, lsim.Trajectory()) as probe:
        model(tokens)
    prompt = probe.results()["trajectory"]
    with lsim.attach(model, lsim.Trajectory()) as probe:
        model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
    attached = probe.results()["trajectory"]

    # The prompt is one forward pass, and each further token one of a single position.
    assert (prompt.turns, attached.turns) == (6, 6)
    torch.testing.assert_close(attached.curvature, prompt.curvature, rtol=1e-5, atol=0)
    assert attached.provenance.tokens > 8


def test_padding_on_the_left_changes_nothing():
    rows = [random_tokens(1, n, seed=n)[0] for n in (9, 4)]
    tokens = torch.zeros(2, 9, dtype=torch.int64)
    mask = torch.zeros(2, 9, dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i, 9 - len(row) :] = row
        mask[i, 9 - len(row) :] = 1

    padded = lsim.analyze(tiny_llama(), {"input_ids": tokens, "attention_mask": mask}, lsim.Trajectory())["trajectory"]
    plain = lsim.analyze(tiny_llama(), rows, lsim.Trajectory())["trajectory"]

    assert torch.equal(padded.curvature, plain.curvature)
    assert padded.turns == plain.turns == 9
