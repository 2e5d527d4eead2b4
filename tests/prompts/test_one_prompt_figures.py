"""Figures of one prompt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from ..inputs.views import worst
from ..models.tiny_models import hidden_states, random_tokens, tiny_gpt2, tiny_llama, tiny_tokenizer
from ..models.wrapped_models import bridge, by_hand, nnsight
from ..running.options import called

PROMPT = "Once upon a time there was a little girl who lived in a small house"


@pytest.mark.parametrize("norm", ["final", "none"])
def test_the_grid_says_what_each_layer_says(norm):
    model, row = tiny_llama().double(), random_tokens(1, 9)[0]
    logits = by_hand(model, hidden_states(model, row), norm == "final")
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    grid = lsim.prompts.prediction_grid(model, row, norm=norm)
    np.testing.assert_allclose(grid.probability, p.max(-1).T, rtol=1e-9)
    assert grid.words == tuple(tuple(str(w) for w in token) for token in p.argmax(-1).T.tolist())
    assert grid.tokens == tuple(str(t) for t in row.tolist())
    said = p.argmax(-1).T
    assert grid.saturation_layer.tolist() == [min(k for k in range(3) if (w[k:] == w[-1]).all()) for w in said]


@pytest.mark.heavy("every source")
@pytest.mark.parametrize("wrap", [bridge, nnsight])
@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_every_source_draws_the_same(make, wrap):
    row = random_tokens(1, 9)[0]
    expected, paths = lsim.prompts.prediction_grid(make(), row), lsim.prompts.trajectory_pca(make(), row)
    for options in [{}, {"remote": "local"}] if wrap is nnsight else [{}]:
        found = called(lsim.prompts.prediction_grid, wrap(make()), row, **options)
        assert found.words == expected.words
        assert worst(found, expected) < 1e-5
        np.testing.assert_allclose(
            called(lsim.prompts.trajectory_pca, wrap(make()), row, **options).values, paths.values, atol=1e-3
        )


@pytest.mark.heavy("the demo's stories")
def test_the_demo_knows_its_stories(demo, tmp_path):
    grid = lsim.prompts.prediction_grid(demo, PROMPT)
    assert grid.tokens[0] == "<|endoftext|>"
    assert "".join(grid.tokens[1:]) == PROMPT
    assert grid.words[-1][-1] == "."
    assert "girl" in grid.words[grid.tokens.index(" little")][-1]
    figure = grid.plot()
    assert len(figure.layout.shapes) == len(grid.tokens)
    assert any("<b>" in cell for row in figure.data[0].text for cell in row)
    # The last row is final everywhere.
    assert all("<b>" in cell for cell in figure.data[0].text[-1])
    again = lsim.load(grid.save(tmp_path / "grid.safetensors"))
    assert (again.words, again.tokens) == (grid.words, grid.tokens)
    assert worst(again, grid) == 0
    assert {"token", "layer", "probability"} <= set(grid.to_frame().columns)


def test_tokens_are_no_markup(demo):
    grid = lsim.prompts.prediction_grid(demo, PROMPT)
    words = (("<b>", *grid.words[0][1:]), *grid.words[1:])
    figure = replace(grid, words=words, tokens=("<i>", *grid.tokens[1:])).plot()
    assert "<b>&lt;b&gt;</b>" in figure.data[0].text[0][0] or ">&lt;b&gt;<" in figure.data[0].text[0][0]
    assert figure.layout.xaxis.ticktext[0] == "&lt;i&gt;"
    assert "<i>" not in figure.data[0].customdata[0][0]


def test_paths_are_in_the_plane_of_the_last_layer(demo, tmp_path):
    found = lsim.prompts.trajectory_pca(demo, lsim.Data(PROMPT, skip_first=1))
    ids = demo.tokenizer(PROMPT)["input_ids"]
    states = hidden_states(demo, torch.tensor([0, *ids]))[:, 1:]
    last = states[-1] - states[-1].mean(0)
    _, sigma, basis = np.linalg.svd(last, full_matrices=False)
    # A component's sign is arbitrary: its largest entry is positive.
    plane = np.stack([axis * np.sign(axis[np.abs(axis).argmax()]) for axis in basis[:2]])
    expected = np.einsum("ltd,cd->tlc", states - states[-1].mean(0), plane)
    np.testing.assert_allclose(found.values, expected, atol=1e-3)
    np.testing.assert_allclose(found.explained, sigma[:2] ** 2 / (sigma**2).sum(), rtol=1e-5)
    np.testing.assert_allclose(found.values[:, -1].mean(0), 0, atol=1e-4)
    figure = found.plot()
    paths = [trace for trace in figure.data if trace.mode == "lines+markers+text"]
    assert len(paths) == len(found.tokens) == 15
    assert [path.name for path in paths[-2:]] == ["first token: 1 Once", "last token: 15 ·house"]
    assert worst(lsim.load(found.save(tmp_path / "pca.safetensors")), found) == 0
    part = lsim.prompts.trajectory_pca(demo, lsim.Data(PROMPT, skip_first=1), sites=slice(5, None))
    assert part.layers == found.layers[5:]
    assert torch.equal(part.values, found.values[:, 5:])
    assert part.plot().data
    whole = lsim.prompts.trajectory_pca(demo, lsim.Data(PROMPT, skip_first=1), fit="path")
    flat = states.reshape(-1, states.shape[-1])
    sigma, basis = np.linalg.svd(flat - flat.mean(0), full_matrices=False)[1:]
    expected = np.einsum("ltd,cd->tlc", states - flat.mean(0), basis[:2])
    np.testing.assert_allclose(np.abs(whole.values), np.abs(expected), atol=1e-3)
    np.testing.assert_allclose(whole.explained, sigma[:2] ** 2 / (sigma**2).sum(), rtol=1e-5)


def test_what_is_no_picture_is_refused():
    model = tiny_llama()
    with pytest.raises(lsim.LayersimError, match=r"\b6\b"):
        lsim.prompts.trajectory_pca(model, torch.full((6,), 9))
    with pytest.raises(lsim.LayersimError, match=r"`prompt`.*\b2\b.*\b64\b"):
        lsim.prompts.prediction_grid(model, random_tokens(2, 9))
    with pytest.raises(lsim.LayersimError, match=r"`prompt`.*\b2\b.*\b3\b"):
        lsim.prompts.trajectory_pca(model, random_tokens(1, 2)[0])
    with pytest.raises(lsim.LayersimError, match=r"needs an unembedding"):
        lsim.prompts.prediction_grid(model.model, random_tokens(1, 9)[0])
    with pytest.raises(lsim.LayersimError, match=r"`sites` is slice\(50, 60.*\b9\b"):
        lsim.prompts.trajectory_pca(lsim.demo_model(), "Once upon a time", sites=slice(50, 60))
    with pytest.raises(lsim.LayersimError, match="no tokenizer"):
        lsim.prompts.prediction_grid(model, PROMPT)
    model.tokenizer = tiny_tokenizer()
    with pytest.raises(lsim.LayersimError, match=r"`prompt`.*\b64\b"):
        lsim.prompts.prediction_grid(model, " ".join(f"w{3 + i % 90}" for i in range(100)))
