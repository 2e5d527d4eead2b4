"""Cosine: planted cases, the traps, and quantiles from histograms."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from .. import oracles
from ..inputs.views import from_views, residuals, view
from ..models.tiny_models import random_tokens, tiny_llama


def test_uncentred_equals_its_oracle():
    data = [residuals(0), residuals(1, tokens=9)]
    found = from_views(lsim.Cosine(center="none"), [view(x) for x in data])
    for field, value in oracles.oracle_cosine(data, center="none").items():
        tolerance = 2e-3 if field in ("to_last", "adjacent") else 1e-10
        # Bins of a hundredth of a decade.
        relative = 0.024 if field == "norm_ratio_quantiles" else 1e-7
        np.testing.assert_allclose(getattr(found, field), value, atol=tolerance, rtol=relative, err_msg=field)


def test_centring_matters_and_is_recorded():
    data = [view(residuals(0))]
    centred, raw = from_views(lsim.Cosine(), data), from_views(lsim.Cosine(center="none"), data)
    assert (centred.values - raw.values).abs().max() > 0.1
    report = lsim.analyze(tiny_llama(), random_tokens(), lsim.Cosine(center="none"))
    assert report["cosine"].provenance.options["center"] == "none"


def test_a_given_mean_is_the_dataset_mean_without_a_first_pass():
    data = [view(residuals(0)), view(residuals(4))]
    two_passes = from_views(lsim.Cosine(), data)
    given = lsim.Cosine(center=two_passes.mean)
    assert given.first_kernel() is None
    one_pass = from_views(given, data)
    torch.testing.assert_close(one_pass.values, two_passes.values, rtol=0, atol=1e-14)
    assert given.options()["center"].startswith("tensor (4, 8) sha256 ")


def test_a_mean_that_does_not_fit_is_refused():
    with pytest.raises(lsim.LayersimError, match=r"`center`.*\(3, 32\).*\(4, 32\)"):
        lsim.analyze(tiny_llama(), random_tokens(), lsim.Cosine(center=torch.zeros(3, 32)))


def test_planted_directions():
    """Layer 1 turns every token by 60 degrees, layer 2 turns it back, layer 3 reverses it."""
    rng = np.random.default_rng(0)
    flat = rng.normal(size=(50, 2))
    turn = np.array([[0.5, -np.sqrt(0.75)], [np.sqrt(0.75), 0.5]])
    x = np.stack([flat, 3 * flat @ turn.T, flat, -flat])
    found = from_views(lsim.Cosine(center="none"), [view(x)])
    expected = np.array([[1, 0.5, 1, -1], [0.5, 1, 0.5, -0.5], [1, 0.5, 1, -1], [-1, -0.5, -1, 1]])
    np.testing.assert_allclose(found.values, expected, atol=1e-12)
    np.testing.assert_allclose(found.std, 0, atol=1e-7)
    np.testing.assert_allclose(found.below_zero, expected < 0)
    # |x| / |f(x)|: the fourth layer is reached by adding -2 x.
    np.testing.assert_allclose(found.norm_ratio[2], 0.5)
    assert found.monotone_share == 0


def test_monotone_share_counts_tokens_that_rise_at_every_step():
    angles = np.deg2rad([[90, 60, 30, 0], [90, 20, 30, 0], [120, 91, 3, 0], [10, 10, 5, 0]]).T
    x = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    found = from_views(lsim.Cosine(center="none"), [view(x)])
    # The second falls once, the last stays equal once: two of four rise strictly.
    assert found.monotone_share == 0.5
    np.testing.assert_allclose(found.step_share, [0.75, 0.75, 1])
    # Of 90, 60, 30 and 0 degrees all pairs are in order to each layer; of 90, 20, 30 the 20 is before the 30, from 0 seen.
    np.testing.assert_allclose(found.triple_share, [np.nan, 0.75, (3 + 2 + 3 + 2) / 12])


@pytest.mark.filterwarnings("ignore:The cosine is not defined")
def test_a_token_without_direction_at_a_layer_has_no_triple_there():
    x = residuals(0)
    x[0, :30] = 0
    found = from_views(lsim.Cosine(center="none"), [view(x)])

    def closer(first: int, second: int, t: int) -> bool:
        return oracles.cosine_of(x[first, t], x[3, t]) < oracles.cosine_of(x[second, t], x[3, t])

    pairs = [closer(a, b, t) for t in range(40) for b in range(3) for a in range(b) if a > 0 or t >= 30]
    np.testing.assert_allclose(found.triple_share[2], np.mean(pairs))
    np.testing.assert_allclose(found.step_share[0], np.mean([closer(0, 1, t) for t in range(30, 40)]))


def test_outliers_are_those_of_a_box_plot():
    rng = np.random.default_rng(0)
    cosine = np.concatenate([rng.normal(0.5, 0.02, 96), [-0.7, -0.2, 0.1, 0.95]])
    x = np.stack([np.stack([cosine, np.sqrt(1 - cosine**2)], 1), np.tile([1.0, 0.0], (100, 1))])
    found = from_views(lsim.Cosine(center="none"), [view(x)])
    low, high = np.quantile(cosine, [0.25, 0.75])
    expected = np.mean((cosine < low - 1.5 * (high - low)) | (cosine > high + 1.5 * (high - low)))
    assert expected >= 0.04
    np.testing.assert_allclose(found.to_last_outliers, [expected, 0], atol=0.011)
    np.testing.assert_allclose(found.to_last_minimum, [-0.7, 1], atol=1.001e-3)


def test_zero_vectors_alone_have_no_cosine():
    with pytest.raises(lsim.LayersimError, match=r"cosine.*\b40\b"):
        from_views(lsim.Cosine(center="none"), [view(residuals(0) * 0)])


def test_one_token_has_no_centred_cosine():
    with pytest.raises(lsim.LayersimError, match=r"cosine.* 1 tokens\b"):
        from_views(lsim.Cosine(), [view(residuals(0, tokens=1))])


def test_wrong_options_are_refused():
    with pytest.raises(lsim.LayersimError, match=r"`center`.*dataset"):
        lsim.Cosine(center="sample")


def test_massive_first_tokens_can_be_left_out():
    model = tiny_llama()
    tokens = random_tokens(4, 20)
    tokens[:, 0] = 1
    with torch.no_grad():
        model.model.embed_tokens.weight[1] *= 1000
    all_tokens = lsim.analyze(model, tokens, "cka")["cka"]
    without = lsim.analyze(model, lsim.Data(tokens, skip_first=1), "cka")["cka"]
    assert all_tokens.values[0, -1] - without.values[0, -1] > 0.2
    assert without.provenance.tokens == 4 * 19
    assert without.provenance.options["skip_first"] == 1


def test_spread_survives_where_layers_are_close():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 3000, 64))
    near = np.concatenate([x, x + 0.005 * rng.uniform(0, 2, size=(1, 3000, 1)) * rng.normal(size=x.shape)]).astype(np.float32)
    wide = near.astype(np.float64)
    cosine = (wide[0] * wide[1]).sum(-1) / np.linalg.norm(wide[0], axis=-1) / np.linalg.norm(wide[1], axis=-1)
    found = from_views(lsim.Cosine(center="none"), [view(near)])
    assert 0 < cosine.std() < 1e-4
    np.testing.assert_allclose(found.std[0, 1], cosine.std(), rtol=0.02)


def test_a_given_mean_serves_a_single_token():
    found = from_views(lsim.Cosine(center=torch.zeros(4, 8)), [view(residuals(0, tokens=1))])
    assert found.values.shape == (4, 4)


def test_a_right_angle_is_not_below_zero():
    x = np.array([[[1.0, 0.0], [3.0, 4.0]], [[0.0, 2.0], [-4.0, 3.0]]])
    found = from_views(lsim.Cosine(center="none"), [view(x)])
    assert found.below_zero[0, 1] == 0
    assert torch.equal(found.values, torch.eye(2, dtype=torch.float64))
    assert torch.equal(found.std, torch.zeros(2, 2, dtype=torch.float64))


def test_the_headline_is_of_the_last_column():
    x = residuals(2)
    x[1] = -x[3] + 0.1 * x[0]
    found = from_views(lsim.Cosine(center="none"), [view(x)])
    expected = oracles.oracle_cosine([x], center="none")
    to_last = expected["values"][:, -1]
    rises = [b > a for a, b in itertools.pairwise(to_last)]
    # From layer 0 to 1 it falls, then it rises twice.
    assert rises == [False, True, True]
    assert list(found.headline().values()) == pytest.approx([to_last[0], to_last[2], 2 / 3, float(expected["monotone_share"])])


def test_an_update_of_zero_has_an_infinite_ratio():
    """The difference of equal vectors has norm 0, not -0, by which the ratio would be -inf."""
    x = residuals(3)
    x[1] = x[0]
    found = from_views(lsim.Cosine(center="none"), [view(x)])
    assert float(found.norm_ratio[0]) == float("inf")
    # The last bin of the histograms ends at 1e8.
    assert (found.norm_ratio_quantiles[:, 0] > 9e7).all()
    assert found.norm_ratio[1:].isfinite().all()


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


def test_a_center_that_is_not_finite_is_refused():
    with pytest.raises(lsim.LayersimError, match=r"`center`.* 1 .*finite"):
        lsim.Cosine(center=torch.tensor([[0.0, torch.inf]]))
