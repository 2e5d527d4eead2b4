"""Figures of one prompt: predictions in lines, paths with labels that do not overlap."""

from __future__ import annotations

import re

import numpy as np
import pytest

import tl_layersim as lsim
from tl_layersim.reporting.token_paths import MOST_LABELS, PLOT, token_paths
from tl_layersim.reporting.tokens import PER_LINE, Predictions, prediction_heatmap, visible_token

BLOCKS = tuple(f"blocks.{n}.hook_resid_post" for n in range(3))


def drawn(tokens: tuple[str, ...]):
    count = len(tokens)
    rng = np.random.default_rng(0)
    predictions = Predictions(
        words=((" <b>", "\n", "a"),) * count,
        probability=rng.random((count, 3)),
        saturation=[n % 3 for n in range(count)],
        entropy=np.full((count, 3), 0.5),
        top=((((" <b>", "x"), (0.5, 0.25)),) * 3,) * count,
    )
    return prediction_heatmap(predictions, tokens, BLOCKS, "logit lens with the final norm")


@pytest.mark.parametrize("count", [3, PER_LINE, PER_LINE + 1, 40])
def test_a_long_prompt_is_broken_into_lines_of_equal_cells(count):
    fig = drawn(tuple(f" t{n}" for n in range(count)))
    lines = [trace for trace in fig.data if trace.type == "heatmap"]
    assert [x for line in lines for x in line.x] == list(range(count))
    assert max(len(line.x) for line in lines) <= PER_LINE
    spans = {fig.layout[name].range[1] - fig.layout[name].range[0] for name in fig.layout if name.startswith("xaxis")}
    assert len(spans) == 1
    assert fig.layout.width == 600
    assert len(fig.layout.shapes) == count


def test_the_pointer_shows_ranks_entropy_and_what_follows():
    fig = drawn(("<i>", " b", "c"))
    text = fig.data[0].customdata[0][0]
    assert "after token 0 <b>&lt;i&gt;</b>" in text
    assert "next in the prompt: <b>·b</b>" in text
    assert "1. ·&lt;b&gt;  0.500<br>2. x  0.250<br>entropy: 0.50 nats<br>saturation layer" in text
    assert "next in the prompt" not in fig.data[0].customdata[0][2]


def test_bold_words_and_frames_are_explained():
    fig = drawn(("a", " b", "c"))
    names = [trace.name for trace in fig.data if trace.showlegend]
    assert names == ["<b>bold</b>: the final prediction", "framed: saturation layer"]
    assert fig.layout.title.subtitle.text == "Logit lens with the final norm; · is a space"
    assert fig.layout.coloraxis.colorbar.title.text == "Probability of the first choice"
    assert "<b>" in fig.data[0].text[2][0]
    assert "<b>" not in fig.data[0].text[0][1]


def test_tokens_show_their_spaces_and_break_no_line():
    assert [visible_token(token) for token in ("  ", " a b ", "\t", "\u200b")] == ["··", "·a b·", "\\t", "\\u200b"]
    assert visible_token("international", 8) == "interna…"


def test_the_first_and_the_last_token_stand_out_and_labels_do_not_overlap():
    rng = np.random.default_rng(0)
    tokens = tuple(f" token{n}" for n in range(60))
    fig = token_paths(rng.normal(size=(60, 4, 2)), [0.4, 0.2], tokens, ("blocks.0.hook_resid_pre", *BLOCKS))
    assert [trace.name for trace in fig.data if trace.showlegend is not False] == [
        "first token: 0 ·token0",
        "last token: 59 ·token59",
        "first layer",
        "last layer",
    ]
    paths = [trace for trace in fig.data if trace.mode == "lines+markers"]
    assert len(paths) == 60
    assert paths[0].marker.symbol[0] == "circle-open"
    assert paths[0].marker.symbol[-1] == "square"
    assert "token <b>1 ·token1</b><br>after block 0" in paths[0].customdata[1]
    [labels] = [trace for trace in fig.data if trace.mode == "text"]
    assert len(labels.text) <= MOST_LABELS
    assert {label.strip("\u2002") for label in labels.text} >= {"<b>0 ·token0</b>", "<b>59 ·token59</b>"}
    assert fig.layout.width - fig.layout.margin.l - fig.layout.margin.r == PLOT[0]
    width, height = PLOT
    boxes = []
    for x, y, text, place in zip(labels.x, labels.y, labels.text, labels.textposition, strict=True):
        (left, right), (low, high) = fig.layout.xaxis.range, fig.layout.yaxis.range
        at = (x - left) / (right - left) * width, (y - low) / (high - low) * height
        long = 6.6 * len(re.sub("<.*?>", "", text.strip("\u2002")))
        start = at[0] + (6 if "right" in place else -6 - long if "left" in place else -long / 2)
        middle = at[1] + (13 if "top" in place else -13 if "bottom" in place else 0) * ("center" in place)
        middle += (7 if "top" in place else -7 if "bottom" in place else 0) * ("center" not in place)
        boxes.append((start, middle - 7, start + long, middle + 7))
    for n, a in enumerate(boxes):
        for b in boxes[:n]:
            assert a[0] >= b[2] - 1e-6 or b[0] >= a[2] - 1e-6 or a[1] >= b[3] - 1e-6 or b[1] >= a[3] - 1e-6


def test_tokens_of_one_text_are_told_apart_by_position_and_colour():
    path = lsim.trajectory_pca(lsim.demo_model(), lsim.Data("a man and a dog and a cat", skip_first=1))
    fig = path.plot()
    paths = {trace.name: trace for trace in fig.data if trace.mode == "lines+markers"}
    count = len(path.tokens)
    # Position 0 is skipped.
    assert {int(name.removeprefix("first token: ").removeprefix("last token: ").split(" ")[0]) for name in paths} == set(
        range(1, count + 1)
    )
    assert len({trace.line.color for trace in paths.values()}) == count
    assert [trace.line.width for trace in paths.values()][-2:] == [3, 3]
    [bar] = [trace.marker for trace in fig.data if trace.marker.showscale]
    assert (bar.cmin, bar.cmax) == (1, count)
    assert bar.colorbar.title.text == "Position in the prompt"
    # The colours of the bar's ends are those of the first and the last path.
    ends = [next(trace for name, trace in paths.items() if name.startswith(word)).line.color for word in ("first", "last")]
    assert [bar.colorscale[0][1], bar.colorscale[-1][1]] == ends


def test_a_label_stands_where_no_path_strikes_it_through():
    layers = ("blocks.0.hook_resid_pre", *BLOCKS)
    # Three paths that come from the right: the right side is the first place, and the paths lie there.
    ends = np.array([[0.0, 0.0], [0.0, 5.0], [0.0, 10.0]])
    steps = np.array([30.0, 20.0, 10.0, 0.0])
    coordinates = np.stack([end + np.stack([steps, np.zeros(4)], 1) for end in ends])
    fig = token_paths(coordinates, [0.4, 0.2], ("a", "b", "c"), layers)
    [labels] = [trace for trace in fig.data if trace.mode == "text"]
    assert len(labels.text) == 3
    assert not any(place == "middle right" for place in labels.textposition)


def test_the_ranks_of_a_grid_are_those_of_the_lens(tmp_path):
    grid = lsim.prediction_grid(lsim.demo_model(), "Once upon a time there was a little")
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
    assert "1. ·girl" in grid.plot().data[-3].customdata[-1][-1]
