"""Logits of layers: ties, memory, walking down."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tl_layersim as lsim
from tl_layersim.activations import View
from tl_layersim.activations.view import targets
from tl_layersim.architectures.unembed import Unembed
from tl_layersim.data.labels import NO_LABEL
from tl_layersim.lens.statistics import read_lens, saturation_layers

from ..views import from_views, residuals, view, worst
from ..wrapped_models import LENSES, read_logits


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), words=st.sampled_from([5, 64, 255, 256, 257, 700]), levels=st.integers(1, 4))
def test_ties_go_to_the_lower_id(seed, words, levels):
    """Logits of a few levels only, so that nearly all of them are tied with others."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, levels, size=(6, 3, words)).astype(np.float64)  # token layer vocabulary
    target = torch.as_tensor(rng.integers(0, words, size=6))
    found = read_logits(logits, target)
    for t in range(6):
        for layer in range(3):
            z = logits[t, layer]
            order = sorted(range(words), key=lambda v, z=z: (-z[v], v))
            assert found["best"][layer, t] == order[0] == int(np.argmax(z))
            assert found["before"][layer, t] == min(order.index(int(target[t])), 10)


@pytest.mark.parametrize("top", [1, 4, 11, 12, 30])
def test_ties_over_more_groups_than_are_looked_into(top):
    """The largest logit stands once in each of many groups of 256; the target is one of them."""
    logits = np.zeros((2, 3, 256 * 40))
    places = 256 * np.arange(top) + 3
    logits[..., places] = 5.0
    for at in {0, top // 2, top - 1}:
        found = read_logits(logits, torch.tensor([places[at], places[at]]))
        assert (found["before"] == min(at, 10)).all()
        assert (found["best"] == places[0]).all()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), memory=st.sampled_from([0.001, 0.02, 128.0]), levels=st.sampled_from([2, 5, 1000]))
def test_walking_down_finds_what_the_full_lens_finds(seed, memory, levels):
    """Token by token, with ties and without."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, levels, size=(20, 5, 40)).astype(np.float64)
    # Half of the tokens keep their answer from some layer on.
    for t in range(0, 20, 2):
        logits[t, rng.integers(0, 5) :, 7] = levels + 1
    flat = torch.as_tensor(logits).reshape(-1, 40)

    class Table(torch.nn.Module):
        def forward(self, x):
            return flat[x[..., 0].long()]

    index = torch.arange(100, dtype=torch.float64).reshape(20, 5).T[..., None]
    residual = torch.cat([torch.zeros(1, 20, 1, dtype=torch.float64), index])
    unembed = Unembed(None, (Table(),), "every", 1.0, None, None, None)

    def fresh() -> View:
        where = torch.arange(20)
        return View(residual, where, where * 0, where, unembed=unembed)

    walked, bad = saturation_layers(fresh(), True, memory)
    assert not bad.any()
    full = fresh()
    read_lens(full, torch.full((20,), NO_LABEL), True, memory, 5, "t")
    assert torch.equal(walked, saturation_layers(full, True, memory)[0])
    said = logits.argmax(-1)
    assert walked.tolist() == [min(k for k in range(5) if (row[k:] == row[-1]).all()) for row in said]


@pytest.mark.parametrize("layer", [0, 1, 4])
def test_walking_down_counts_logits_that_are_not_finite_where_they_are(layer):
    logits = torch.zeros(5, 3, 7, dtype=torch.float64)
    logits[..., 2] = 1
    logits[layer, 0, 4] = torch.nan

    class Table(torch.nn.Module):
        def forward(self, x):
            return logits.flatten(0, 1)[x[..., 0].long()]

    residual = torch.cat([torch.zeros(1, 3, 1), torch.arange(15.0).view(5, 3, 1)]).double()
    where = torch.arange(3)
    view = View(residual, where, where * 0, where, unembed=Unembed(None, (Table(),), "every", 1.0, None, None, None))
    assert saturation_layers(view, True, 64)[1].tolist() == [int(number == layer) for number in range(5)]


@pytest.mark.parametrize("memory", [1e-6, 0.01, 0.1, 64])
def test_the_memory_budget_changes_no_number(memory):
    x = residuals(4, tokens=50)
    expected = from_views(lsim.LogitLens(), [view(x)])
    assert worst(from_views(lsim.LogitLens(lens_memory_mb=memory), [view(x)]), expected) < 1e-10
    assert worst(from_views(lsim.Saturation(lens_memory_mb=memory), [view(x)]), from_views(lsim.Saturation(), [view(x)])) == 0


@pytest.mark.parametrize("memory", [0, -1, math.inf, math.nan])
def test_a_budget_that_is_none_is_refused(memory):
    for lens in LENSES:
        with pytest.raises(lsim.LayersimError, match=f"`lens_memory_mb`.* is {memory},"):
            lens(lens_memory_mb=memory)


def test_what_a_lens_calls_has_neither_hooks_nor_dropout():
    from tl_layersim.architectures.output_heads import Quiet

    head = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(8, 8)).train()
    x, calls = torch.ones(3, 8), []
    head[1].register_forward_hook(lambda *_: calls.append(1))
    state = torch.get_rng_state()
    first, again = Quiet(head)(x), Quiet(head)(x)
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), state)
    assert not calls
    assert head[0].training
    head(x)
    assert calls == [1]
    head[1].register_forward_pre_hook(lambda *_: 1 / 0)
    Quiet(head)(x)
    with pytest.raises(RuntimeError):
        Quiet(head)(torch.ones(3, 7))
    assert head[0].training
    with pytest.raises(ZeroDivisionError):
        head(x)


def test_a_source_that_names_no_next_token_is_read_from_neighbours():
    tokens, row = torch.tensor([5, 6, 7, 8, 9]), torch.tensor([0, 0, 0, 1, 1])
    one = View(torch.zeros(2, 5, 3), tokens, row, torch.tensor([0, 1, 3, 0, 1]))
    assert targets(one, "next_token").tolist() == [6, NO_LABEL, NO_LABEL, 9, NO_LABEL]
