"""The style of figures: colours that every reader can tell apart, titles that fit, legends below the axes, templates."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import plotly.graph_objects as go
import pytest

import tl_layersim as lsim
from tl_layersim.demo import demo_images, demo_vision_model
from tl_layersim.reporting.style import (
    PALETTE,
    on_what,
    ordered_colours,
    series_look,
    styled,
    with_provenance,
    with_room_for_legend,
    with_subtitle,
)

from ..inputs.views import provenance

# Machado, Oliveira and Fernandes 2009, severity 1: linear RGB as readers without one kind of cone see it.
SIMULATED = {
    "all cones": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
WHITE_POINT = [0.95047, 1.0, 1.08883]


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast_on_white(colour: str) -> float:
    """WCAG 2, with 3 as the least for parts of graphics."""
    return 1.05 / (float(np.array(TO_XYZ[1]) @ linear(colour)) + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = np.array(TO_XYZ) @ np.clip(rgb, 0, 1) / WHITE_POINT
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def distance(first: str, second: str, reader: str) -> float:
    return float(np.linalg.norm(lab(SIMULATED[reader] @ linear(first)) - lab(SIMULATED[reader] @ linear(second))))


def figure(title: str = "Cosine similarity") -> go.Figure:
    fig = go.Figure()
    fig.add_scatter(x=[0, 1], y=[0, 1], name="one")
    return styled(fig, title)


def test_colours_are_dark_enough_on_white():
    for colour in (*PALETTE, *ordered_colours(5)):
        assert contrast_on_white(colour) >= 3, colour


@pytest.mark.parametrize("reader", SIMULATED)
def test_colours_differ_for_every_reader(reader):
    for first, second in itertools.combinations(PALETTE, 2):
        assert distance(first, second, reader) > 15, (first, second)
    # Of two hues, as for two models, blue and orange are far apart.
    assert distance(PALETTE[0], PALETTE[1], reader) > 50


@pytest.mark.parametrize("count", [2, 5])
def test_an_order_of_colours_gets_lighter(count):
    lightness = [lab(linear(colour))[0] for colour in ordered_colours(count)]
    assert (np.diff(lightness) > 5).all()


def test_lines_differ_by_more_than_their_colour():
    looks = series_look(5, ordered=False)
    assert len({look["symbol"] for look in looks}) == 5
    # After the last colour the dash changes.
    many = series_look(8, ordered=False)
    assert (many[0]["colour"], many[5]["colour"]) == (PALETTE[0], PALETTE[0])
    assert many[0]["dash"] != many[5]["dash"]


def test_the_legend_stands_below_the_axes():
    legend = figure().layout.legend
    # A legend at an edge of the container gets room outside of the axes.
    assert (legend.yref, legend.yanchor, legend.xref) == ("container", "bottom", "container")
    assert legend.y < 0.05


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_rows_of_a_legend_take_no_room_from_the_axes():
    heights = []
    for count, title in ((2, ""), (2, "Model"), (8, "")):
        fig = go.Figure([go.Scatter(x=[0], y=[0], name=f"checkpoint number {n} of the run") for n in range(count)])
        heights.append(with_room_for_legend(styled(fig, "Accuracy"), title).layout.height)
    # A row for the title; eight names of this length stand in four rows.
    assert [height - heights[0] for height in heights] == [0, 19, 58]


def test_a_long_title_is_broken_and_gets_room():
    short, long = figure(), figure("A title of so many words that it does not fit into the width of a figure in one line")
    assert long.layout.title.text.count("<br>") == 1
    assert all(len(line) < 70 for line in long.layout.title.text.split("<br>"))
    assert long.layout.margin.t > short.layout.margin.t
    # Markup stays in one piece.
    marked = "<i>" + "word " * 20 + "</i>"
    assert figure(marked).layout.title.text == marked


def test_a_subtitle_names_models_and_tokens_and_gets_room():
    one = with_provenance(figure(), provenance(model="EleutherAI/pythia-14m", tokens=12345, sequences=10))
    assert one.layout.margin.t > figure().layout.margin.t
    assert one.layout.height > figure().layout.height
    two = with_subtitle(one, "a second line")
    assert two.layout.title.subtitle.text.split("<br>") == ["EleutherAI/pythia-14m · 12,345 tokens", "a second line"]
    assert with_subtitle(figure(), "").layout == figure().layout


@pytest.mark.parametrize(
    ("model", "tokens", "sequences", "words"),
    [
        ("/home/me/models/tuned/", 1, 3, "tuned · 1 token"),
        ("a | b", 2, 1, "a and b · 2 tokens"),
        ("a | a", 2, 1, "a · 2 tokens"),
        ("a | b | c | d", 0, 0, "a and b and 2 more"),
        ("vit", 500, 500, "vit · 500 rows"),
    ],
)
def test_what_a_figure_was_measured_on(model, tokens, sequences, words):
    assert on_what(provenance(model=model, tokens=tokens, sequences=sequences)) == words


def test_rows_of_pixels_are_images_and_other_samples_have_their_own_words():
    images = provenance(model="vit", tokens=500, sequences=500)
    images = replace(images, options={"main_input": "pixel_values"})
    assert on_what(images) == "vit · 500 images"
    assert on_what(replace(images, tokens=1000)) == "vit · 1,000 tokens"
    assert on_what(images, "500 pairs") == "vit · 500 pairs"
    pixels = {"pixel_values": demo_images()["pixel_values"][:4]}
    with pytest.warns(lsim.LayersimWarning, match=r"blocks\.0\.hook_resid_pre: 4 of 4\b"):
        found = lsim.analyze(demo_vision_model(), pixels, lsim.Cosine())["cosine"]
    # [CLS] before the first attention is the same in every image, and has no cosine.
    assert found.plot().data[0].z.shape == (len(found.layers) - 1,) * 2


def test_names_of_models_are_no_markup():
    fig = with_provenance(figure(), provenance(model="<script>x"))
    assert fig.layout.title.subtitle.text.startswith("&lt;script&gt;x")


def test_a_figure_of_a_paper_has_its_width_and_small_letters():
    from ..core.helpers import curve

    for width, pixels in (("column", 312), ("text", 648)):
        fig = curve().plot(width=width)
        assert (fig.layout.width, fig.layout.template.layout.font.size, fig.layout.title.font.size) == (pixels, 11, 12)
        assert fig.layout.template.layout.font.color == "black"
        assert not fig.layout.title.subtitle.text
        assert fig.layout.height < pixels
        bare = curve().plot(width=width, title="")
        assert bare.layout.height < fig.layout.height
    wide = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:1], lsim.Cosine(center="none"))["cosine"]
    # Numbers in cells stay only where they have room.
    assert wide.plot(width="text").data[0].texttemplate
    assert not any(map(any, wide.plot(width="column").data[0].text))
    assert list(wide.plot(width="column").layout.xaxis.ticktext) == ["embed", *map(str, range(8))]
