"""attach: masks, and padding that no mask tells of."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim

from ..models.helpers import bridge
from ..tiny_models import random_tokens, tiny_llama
from ..views import worst
from .helpers import analyzers, each_model


@each_model
def test_a_mask_leaves_padding_out(make):
    model = make()
    rows = [random_tokens(1, n, seed=n)[0] for n in (9, 5, 7, 8)]
    tokens, mask = torch.full((4, 9), 2), torch.zeros(4, 9, dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], mask[i, : len(row)] = row, True
    expected = lsim.analyze(model, rows, analyzers())
    with torch.no_grad(), lsim.attach(model, analyzers()) as probe:
        probe.mask = mask
        model(tokens)
    given = probe.results()
    with torch.no_grad(), lsim.attach(model, analyzers()) as probe:
        model(tokens, attention_mask=mask.long())
    seen = probe.results()
    for name in expected:
        assert worst(given[name], expected[name]) < 1e-6
        assert worst(seen[name], expected[name]) < 1e-6


def test_a_mask_of_the_wrong_shape_is_refused():
    model = tiny_llama()
    with lsim.attach(model, analyzers()) as probe:
        probe.mask = torch.ones(2, 4)
        model(random_tokens(2, 5))
    with pytest.raises(lsim.LayersimError, match=r"probe.mask` does not fit(.|\n)*\(2, 4\)(.|\n)*\(2, 5\)"):
        probe.results()


def test_texts_that_the_model_pads_are_refused():
    from ..tiny_models import tiny_tokenizer

    model = bridge(tiny_llama())
    model.tokenizer = tiny_tokenizer()
    with lsim.attach(model, lsim.Cosine(center="none")) as probe:
        model("w3 w4 w5")
        assert probe.results()["cosine"].provenance.tokens >= 3
        model(["w3 w4 w5", "w6"])
    with pytest.raises(lsim.LayersimError, match=r"pads texts(.|\n)*probe.mask"):
        probe.results()


def test_pads_that_no_mask_tells_of_are_refused():
    from ..tiny_models import tiny_tokenizer

    model = tiny_llama()
    model.tokenizer = tiny_tokenizer()
    padded = torch.tensor([[1, 5, 6, 2, 2, 2], [1, 5, 6, 7, 8, 9]])
    with torch.no_grad(), lsim.attach(model, lsim.Cosine(center="none")) as probe:
        model(padded)
    with pytest.raises(lsim.LayersimError, match=r"`attention_mask` is missing(.|\n)*probe.mask"):
        probe.results()
    with torch.no_grad(), lsim.attach(model, lsim.Cosine(center="none")) as probe:
        probe.mask = padded != 2
        model(padded)
    assert probe.results()["cosine"].provenance.tokens == 9


def test_a_mask_that_cannot_be_read_is_refused():
    model, tokens = tiny_llama(), random_tokens(4, 6)
    four = torch.zeros(4, 1, 6, 6)
    with torch.no_grad(), lsim.attach(model, analyzers()) as probe:
        model(tokens, attention_mask=four)
    with pytest.raises(lsim.LayersimError, match=r"`attention_mask` does not tell(.|\n)*probe.mask"):
        probe.results()
    with torch.no_grad(), lsim.attach(model, analyzers()) as probe:
        probe.mask = torch.ones(4, 6)
        model(tokens, attention_mask=four)
    assert probe.results()["cosine"].provenance.tokens == 24
