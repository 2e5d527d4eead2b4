"""Colour scales of heatmaps: ends that fit the field."""

from __future__ import annotations

import math

import numpy as np
import pytest

import tl_layersim as lsim
from tl_layersim.reporting.heat_map import ColourScale, about_zero, cell_numbers, end_above, narrow_scale, scale_within

from ..models.tiny_models import random_tokens, tiny_llama


@pytest.fixture(scope="module")
def report():
    analyzers = [lsim.Cosine(center="none"), lsim.CKA(minibatch=16), lsim.Procrustes(permutations=19)]
    return lsim.analyze(tiny_llama(), random_tokens(), analyzers)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_similarities_share_their_ends_and_deviations_have_their_own(report):
    cosine = report["cosine"]
    values, spread = cosine.plot().data[0], cosine.plot("std").data[0]
    low = float(cosine.values.min())
    assert values.zmax == 1.0
    assert values.zmin == (-1.0 if low < -0.1 else min(0.0, low))
    assert spread.zmin == 0.0
    assert spread.zmax == end_above(float(cosine.std.max())) < 1.0
    assert spread.colorscale != values.colorscale
    angle = report["procrustes"].plot("angle").data[0]
    assert (angle.zmin, angle.zmax) == (0.0, math.pi / 2)
    p_values = report["procrustes"].plot("p_values")
    assert p_values.data[0].zmax == 0.1


def test_figures_of_p_values_say_the_smallest_that_is_possible(report):
    result = report["procrustes"]
    fig = result.plot("p_values")
    assert float(result.p_values.min()) == 1 / 20
    shown = np.asarray(fig.data[0].z)
    assert np.isnan(shown.diagonal()).all()
    other = ~np.eye(len(shown), dtype=bool)
    assert np.array_equal(shown[other], result.p_values.numpy()[other])


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_p_values_of_two_models_keep_the_diagonal():
    result = lsim.compare(tiny_llama(), tiny_llama(seed=1), random_tokens(), lsim.CKA(minibatch=16, permutations=39))
    fig = result.plot("p_values")
    assert np.array_equal(np.asarray(fig.data[0].z), result.p_values.numpy())


def test_clearly_negative_values_stand_about_zero():
    assert scale_within([[-0.3, 0.9]], (-1, 1)) == ColourScale("RdBu_r", -1, 1)
    assert scale_within([[-0.03, 0.9]], (-1, 1)) == ColourScale("Viridis", -0.03, 1)
    assert scale_within([[-7.0, 0.9]], (-math.inf, 1)).note == "lowest colour: -1 or less"
    assert about_zero([[-0.03, 0.011]]) == ColourScale("RdBu_r", -0.03, 0.03)
    assert scale_within([[math.nan]], (0, math.inf)) == ColourScale("Viridis", 0.0, 1.0)


def test_few_cells_carry_their_numbers_and_many_do_not(report):
    heat = report["cka"].plot().data[0]
    assert heat.text[0][0] == "1.00"
    assert heat.texttemplate == "%{text}"
    scale = ColourScale("Viridis", 0.0, 1.0)
    assert cell_numbers(np.full((13, 13), 0.5), scale) == {}
    assert cell_numbers(np.array([[math.nan, -0.001]]), scale)["text"][0][0] == ""
    assert cell_numbers(np.array([[math.nan, -0.001]]), scale)["text"][0][1] == "0.00"


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_figures_are_at_most_600_pixels_wide_and_cells_are_square(report):
    for result in report.values():
        fig = result.plot()
        assert fig.layout.width <= 600
        assert fig.layout.yaxis.scaleanchor == "x"


def test_cells_have_more_decimals_on_a_narrow_scale():
    values = np.array([[0.0012, 0.0041], [0.0033, 0.0012]])
    scale = narrow_scale(values)
    assert (scale.low, scale.high) == (0.0012, 0.0041)
    assert cell_numbers(values, scale)["text"][0][1] == "0.0041"
    assert cell_numbers(np.full((2, 2), 0.5), narrow_scale(np.full((2, 2), 0.5)))["text"][0][0] == "0.50"
