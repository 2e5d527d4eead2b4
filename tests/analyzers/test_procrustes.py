"""Procrustes: invariances, another implementation, theory, and distances of models."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import scipy.linalg
import scipy.spatial

import tl_layersim as lsim

from .. import oracles
from ..inputs.views import from_views, residuals, view
from .helpers import between, map_of_condition, rotation


@pytest.mark.parametrize("widths", [(8, 8), (8, 5), (3, 8)])
def test_between_two_models_of_other_width_and_depth(widths):
    xs = [residuals(seed, tokens=20, width=widths[0]) for seed in range(3)]
    ys = [residuals(seed + 9, layers=3, tokens=20, width=widths[1]) for seed in range(3)]
    found = between(lsim.Procrustes(), xs, ys)
    expected = oracles.oracle_procrustes(xs, ys)
    for field, value in expected.items():
        np.testing.assert_allclose(getattr(found, field), value, atol=1e-9, err_msg=field)
    assert found.samples == 60
    other = between(lsim.Procrustes(), ys, xs)
    turned = found.transposed()
    for field in expected:
        np.testing.assert_allclose(getattr(turned, field), getattr(other, field), atol=1e-12)
    assert (turned.layers, turned.column_layers) == (other.layers, other.column_layers)


def test_the_distance_is_that_of_scipy():
    x, y = residuals(0, tokens=30)[0], residuals(1, tokens=30)[0]
    found = between(lsim.Procrustes(), [x[None]], [y[None]])
    # scipy's disparity is 1 - s^2: it also scales the second matrix.
    disparity = scipy.spatial.procrustes(x, y)[2]
    assert float(found.values) == pytest.approx(math.sqrt(1 - disparity), abs=1e-12)
    a, b = ((z - z.mean(0)) / np.linalg.norm(z - z.mean(0)) for z in (x, y))
    _, scale = scipy.linalg.orthogonal_procrustes(b, a)
    assert float(found.values) == pytest.approx(scale, abs=1e-12)
    assert float(found.angle) == pytest.approx(math.acos(scale), abs=1e-9)


def test_invariances():
    rng = np.random.default_rng(0)
    x, y = residuals(0, tokens=60), residuals(3, tokens=60) + 0.5 * residuals(0, tokens=60)
    plain = between(lsim.Procrustes(), [x], [y]).values
    order = rng.permutation(60)
    for changed in (y @ rotation(8), 7 * y, -y, y + rng.normal(size=8)):
        np.testing.assert_allclose(between(lsim.Procrustes(), [x], [changed]).values, plain, atol=1e-9)
        np.testing.assert_allclose(between(lsim.Procrustes(), [changed], [x]).values, plain.T, atol=1e-9)
    np.testing.assert_allclose(between(lsim.Procrustes(), [x[:, order]], [y[:, order]]).values, plain, atol=1e-9)
    assert (between(lsim.Procrustes(), [x[:, order]], [y]).values - plain).abs().max() > 0.05
    assert (between(lsim.Procrustes(), [x], [y @ map_of_condition(8, 20)]).values - plain).abs().max() > 0.02


def test_a_rotated_copy_is_equal_and_a_sheared_one_is_not():
    x = residuals(0, tokens=60)
    found = between(lsim.Procrustes(), [x], [3 * x @ rotation(8) + 1])
    np.testing.assert_allclose(found.values.diagonal(), 1, atol=1e-12)
    assert found.values.max() <= 1
    assert found.distance() == pytest.approx(0, abs=1e-5)
    assert between(lsim.Procrustes(), [x], [x @ map_of_condition(8, 20)]).values.diagonal().max() < 0.99
    one = from_views(lsim.Procrustes(), [view(x)])
    assert one.values.diagonal().tolist() == [1] * 4
    assert one.angle.diagonal().tolist() == [0] * 4
    np.testing.assert_allclose(one.values, one.values.T, atol=0)


def test_independent_gaussians_read_the_square_root_of_width_over_samples():
    rng = np.random.default_rng(0)
    found = between(lsim.Procrustes(), [rng.normal(size=(1, 3000, 20))], [rng.normal(size=(1, 3000, 20))])
    # The mean singular value of a square Gaussian matrix is 8 / (3 pi) sqrt(d).
    assert float(found.values) == pytest.approx(8 / (3 * math.pi) * math.sqrt(20 / 3000), rel=0.1)


def test_the_angle_satisfies_the_triangle_inequality():
    for seed in range(20):
        angle = from_views(lsim.Procrustes(), [view(residuals(seed, layers=3, tokens=12))]).angle
        assert angle[0, 2] <= angle[0, 1] + angle[1, 2] + 1e-12


@pytest.mark.parametrize("analyzer", [lsim.CKA(), lsim.CKA(estimator="biased"), lsim.RSA(compare="pearson"), lsim.CCA()])
@pytest.mark.filterwarnings("ignore:(CKA|CCA) rests:tl_layersim.LayersimWarning")
def test_the_angles_of_other_measures_are_metrics_too(analyzer):
    x = residuals(0, layers=6, tokens=40)
    found = from_views(analyzer, [view(x, rows=40)])
    angle = found.angle.numpy()
    np.testing.assert_allclose(np.cos(angle), found.values, atol=1e-12)
    assert (angle[:, None, :] <= angle[:, :, None] + angle[None, :, :].transpose(0, 2, 1) + 1e-9).all()


def test_dimensions_in_another_order_are_equal_by_permutation_and_rotations_are_not():
    x = residuals(0, layers=1, tokens=30, width=5)
    order = np.random.default_rng(0).permutation(5)
    moved = 3 * x[..., order] + 7
    by_permutation = lsim.Procrustes(alignment="permutation")
    assert float(between(by_permutation, [x], [moved]).values) == pytest.approx(1, abs=1e-9)
    turned = x @ rotation(5)
    assert float(between(by_permutation, [x], [turned]).values) < 0.95
    assert float(between(lsim.Procrustes(), [x], [turned]).values) == pytest.approx(1, abs=1e-9)


def test_permutation_procrustes_equals_its_oracle():
    xs, ys = residuals(0, layers=3, tokens=30, width=5), residuals(9, layers=2, tokens=30, width=5) + residuals(0, 1, 30, 5)
    found = between(lsim.Procrustes(alignment="permutation"), [xs], [ys])
    expected = [[oracles.permutation_similarity(x, y) for y in ys] for x in xs]
    np.testing.assert_allclose(found.values, expected, atol=1e-9)
    np.testing.assert_allclose(found.angle, np.arccos(expected), atol=1e-9)
    within = from_views(lsim.Procrustes(alignment="permutation"), [view(xs)])
    expected = [[1 if a == b else oracles.permutation_similarity(xs[a], xs[b]) for b in range(3)] for a in range(3)]
    np.testing.assert_allclose(within.values, expected, atol=1e-9)


def test_the_distance_without_scaling_is_in_units_of_the_activations():
    x = residuals(0, layers=1, tokens=30)
    found = between(lsim.Procrustes(), [x], [3 * x @ rotation(8) + 5])
    # Twice as far from the mean.
    spread = np.sqrt(((x[0] - x[0].mean(0)) ** 2).sum(1).mean())
    assert float(found.euclidean) == pytest.approx(2 * spread, rel=1e-6)


def test_a_result_of_an_earlier_version_has_no_distance_without_scaling():
    found = from_views(lsim.Procrustes(permutations=19), [view(residuals(0, tokens=30), rows=30)])
    fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(found) if field.name != "euclidean"}
    earlier = type(found)(**fields)
    assert earlier.euclidean.shape == found.values.shape
    assert bool(earlier.euclidean.isnan().all())


def test_fewer_samples_than_dimensions_are_spoken_of():
    with pytest.warns(lsim.LayersimWarning, match=r"Procrustes rests on 7 tokens of 8 dimensions"):
        found = from_views(lsim.Procrustes(), [view(residuals(0, tokens=7))])
    np.testing.assert_allclose(found.values, oracles.oracle_procrustes([residuals(0, tokens=7)])["values"], atol=1e-9)
    from_views(lsim.Procrustes(), [view(residuals(0, tokens=8))])
    with pytest.warns(lsim.LayersimWarning, match="2 tokens"):
        two = from_views(lsim.Procrustes(), [view(residuals(0, tokens=2))])
    # Two points are a line, which can be rotated into every other line.
    np.testing.assert_allclose(two.values, 1, atol=1e-9)


def test_distance_needs_equal_depth():
    found = between(lsim.Procrustes(), [residuals(0)], [residuals(1, layers=3)])
    with pytest.raises(lsim.LayersimError, match=r"\b3 and 2\b"):
        found.distance()


def test_the_headline():
    x = residuals(0, layers=6, tokens=60)
    result = from_views(lsim.Procrustes(), [view(x)])
    expected = oracles.oracle_procrustes([x])["values"]
    assert result.headline() == {
        "Procrustes(embedding, last)": pytest.approx(expected[0, 5]),
        "Procrustes(middle layer, last)": pytest.approx(expected[3, 5]),
        "Procrustes(last but one, last)": pytest.approx(expected[4, 5]),
    }
    two = dataclasses.replace(result, provenance=dataclasses.replace(result.provenance, model="a | b"))
    assert "Procrustes(first model's embedding, second's last)" in two.headline()
    alone = from_views(lsim.Procrustes(), [view(x[:1])])
    assert alone.headline() == {}
    alone = dataclasses.replace(alone, provenance=two.provenance)
    assert list(alone.headline().values()) == [1.0]
