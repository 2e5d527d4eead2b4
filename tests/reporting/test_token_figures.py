"""Figures of one prompt: the token grid, and the paths of its tokens."""

from __future__ import annotations

import numpy as np
import pytest

import tl_layersim as lsim
from tl_layersim.reporting.lines_and_bars import paths
from tl_layersim.reporting.site_labels import visible_token

SITES = ("blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in range(3)))


@pytest.fixture(scope="module")
def grid():
    return lsim.prompts.prediction_grid(
        lsim.demo_model(), "Once upon a time there was a little girl who loved <i> her cat and her dog"
    )


@pytest.mark.parametrize(("width", "most"), [(None, 8), ("text", 8), ("column", 3)])
def test_a_long_prompt_is_broken_into_lines_of_equal_cells(grid, width, most):
    fig = grid.plot(width=width)
    lines = [trace for trace in fig.data if trace.type == "heatmap"]
    assert [x for line in lines for x in line.x] == list(range(len(grid.tokens)))
    assert max(len(line.x) for line in lines) <= most
    axes = list(fig.select_xaxes())
    assert len({axis.range[1] - axis.range[0] for axis in axes}) == 1
    assert len(fig.layout.shapes) == len(grid.tokens)


def test_cells_hold_probabilities_and_words_and_the_pointer_ranks(grid):
    fig = grid.plot()
    lines = [trace for trace in fig.data if trace.type == "heatmap"]
    drawn = np.concatenate([np.array(line.z) for line in lines], axis=1).T
    np.testing.assert_array_equal(drawn, grid.values)
    texts = [text for line in lines for text in zip(*line.customdata, strict=True)]
    for token, own in enumerate(texts):
        for layer, text in enumerate(own):
            assert all(f"{rank}. " in text for rank in grid.ranks)
            assert "<i>" not in text
            final = layer >= grid.saturation_layer[token]
            assert ("final prediction" in text or "saturation layer" in text) == final


def test_tokens_show_their_spaces_and_break_no_line():
    assert [visible_token(token) for token in ("  ", " a b ", "\t", "\u200b")] == ["··", "·a b·", "\\t", "\\u200b"]
    assert visible_token("international", 8) == "interna…"


def test_paths_have_one_scale_for_both_components_and_bold_ends():
    tokens = tuple(f" token{n}" for n in range(60))
    coordinates = np.random.default_rng(0).normal(size=(60, 4, 2))
    fig = paths(coordinates, [0.4, 0.2], tokens, SITES, "Paths")
    assert (fig.layout.yaxis.scaleanchor, fig.layout.yaxis.scaleratio) == ("x", 1)
    drawn = [trace for trace in fig.data if trace.mode == "lines+markers+text"]
    order = [*range(1, 59), 0, 59]
    for n, trace in zip(order, drawn, strict=True):
        np.testing.assert_array_equal(np.stack([trace.x, trace.y], -1), coordinates[n])
    assert [bool(trace.text[-1]) for trace in drawn] == [False] * 58 + [True] * 2
    # Room for both labels.
    assert fig.layout.xaxis.range[0] < coordinates[..., 0].min() - 0.1


def test_tokens_of_one_text_are_told_apart_by_position_and_colour():
    path = lsim.prompts.trajectory_pca(lsim.demo_model(), lsim.Data("a man and a dog and a cat", skip_first=1))
    fig = path.plot()
    drawn = [trace for trace in fig.data if trace.mode == "lines+markers+text"]
    assert len(drawn) == len({trace.line.color for trace in drawn}) == len(path.tokens)
    [bar] = [trace.marker for trace in fig.data if trace.marker.showscale]
    # Position 0 is skipped. The colours of the bar's ends are those of the first and the last path.
    assert (bar.cmin, bar.cmax) == (1, len(path.tokens))
    assert [bar.colorscale[0][1], bar.colorscale[-1][1]] == [trace.line.color for trace in drawn[-2:]]


def test_the_ranks_of_a_grid_are_those_of_the_lens(tmp_path):
    grid = lsim.prompts.prediction_grid(lsim.demo_model(), "Once upon a time there was a little")
    np.testing.assert_allclose(grid.top_probability[..., 0], grid.probability, rtol=1e-9)
    assert all(
        own[0] == word
        for row, words in zip(grid.top_words, grid.words, strict=True)
        for own, word in zip(row, words, strict=True)
    )
    assert bool((grid.top_probability.diff(dim=-1) <= 0).all())
    assert bool((grid.top_probability.sum(-1) <= 1 + 1e-9).all())
    assert grid.ranks == (1, 2, 3, 4, 5)
    assert bool((grid.entropy > 0).all())
    again = lsim.load(grid.save(tmp_path / "grid.safetensors"))
    assert again.top_words == grid.top_words
    np.testing.assert_array_equal(again.top_probability, grid.top_probability)
