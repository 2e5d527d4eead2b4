"""Colour scales of heatmaps: ends that fit the field, and texts that are readable on every colour."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from plotly.colors import sample_colorscale, unlabel_rgb

import tl_layersim as lsim
from tl_layersim.reporting.colour_scales import (
    SPREAD,
    ColourScale,
    about_zero,
    cell_numbers,
    end_above,
    luminance,
    narrow_scale,
    off_diagonal_scale,
    on_cells,
    scale_within,
    text_colours,
)

from ..tiny_models import random_tokens, tiny_llama


@pytest.fixture(scope="module")
def report():
    analyzers = [lsim.Cosine(center="none"), lsim.CKA(minibatch=16), lsim.Procrustes(permutations=19)]
    return lsim.analyze(tiny_llama(), random_tokens(), analyzers)


@pytest.mark.parametrize("name", ["Viridis", "Viridis_r", SPREAD, "RdBu_r", "Blues"])
def test_text_has_a_contrast_of_4_5_on_every_colour(name):
    values = np.linspace(0, 1, 101)[None]
    [chosen] = text_colours(values, ColourScale(name, 0.0, 1.0))
    for colour, text in zip(sample_colorscale(name, values[0].tolist()), chosen, strict=True):
        light, dark = sorted([luminance(unlabel_rgb(colour)), float(text == "#ffffff")], reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5
    assert set(chosen) == {"#ffffff", "#000000"}


def test_a_colour_beyond_an_end_is_that_of_the_end():
    scale = ColourScale("Blues", 0.0, 1.0)
    assert text_colours([[-5.0, 7.0]], scale) == text_colours([[0.0, 1.0]], scale)
    assert on_cells([["a", ""]], [[1.0, math.nan]], scale) == [['<span style="color:#ffffff">a</span>', ""]]


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


def test_a_null_has_the_scale_of_its_measure(report):
    procrustes = report["procrustes"]
    own = procrustes.plot().data[0]
    for field in ("null_mean", "null_threshold"):
        fig = procrustes.plot(field)
        assert (fig.data[0].zmin, fig.data[0].zmax, fig.data[0].colorscale) == (own.zmin, own.zmax, own.colorscale)
    # R² of random pairings may be far below 0, where the scale of the measure begins.
    below = replace(procrustes, null_mean=procrustes.null_mean - 1.0)
    assert below.plot("null_mean").data[0].zmin == -1.0


def test_figures_of_p_values_say_the_smallest_that_is_possible(report):
    result = report["procrustes"]
    fig = result.plot("p_values")
    assert float(result.p_values.min()) == 1 / 20
    shown = np.asarray(fig.data[0].z)
    assert np.isnan(shown.diagonal()).all()
    other = ~np.eye(len(shown), dtype=bool)
    assert np.array_equal(shown[other], result.p_values.numpy()[other])


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
    assert heat.text[0][0].endswith(">1.00</span>")
    assert heat.texttemplate == "%{text}"
    scale = ColourScale("Viridis", 0.0, 1.0)
    assert cell_numbers(np.full((13, 13), 0.5), scale) == {}
    assert cell_numbers(np.array([[math.nan, -0.001]]), scale)["text"][0][0] == ""
    assert ">0.00<" in cell_numbers(np.array([[math.nan, -0.001]]), scale)["text"][0][1]


def test_figures_are_at_most_600_pixels_wide_and_cells_are_square(report):
    for result in report.values():
        fig = result.plot()
        assert fig.layout.width <= 600
        assert fig.layout.yaxis.scaleanchor == "x"


def test_cells_have_more_decimals_on_a_narrow_scale():
    values = np.array([[0.0012, 0.0041], [0.0033, 0.0012]])
    scale = narrow_scale(values)
    assert (scale.low, scale.high) == (0.0012, 0.0041)
    assert ">0.0041<" in cell_numbers(values, scale)["text"][0][1]
    assert ">0.50<" in cell_numbers(np.full((2, 2), 0.5), narrow_scale(np.full((2, 2), 0.5)))["text"][0][0]


def test_ones_on_the_diagonal_of_many_sites_do_not_hide_the_rest():
    whole = ColourScale("Viridis", 0.0, 1.0)
    values = np.full((30, 30), 0.2)
    np.fill_diagonal(values, 1.0)
    assert off_diagonal_scale(values, whole) == ColourScale("Viridis", 0.0, 0.2, "diagonal: 1, beyond the colours")
    assert off_diagonal_scale(values[:20, :20], whole) == whole
    assert off_diagonal_scale(np.where(values == 0.2, 0.6, values), whole) == whole
    assert off_diagonal_scale(np.full((30, 30), 0.2), whole) == whole
