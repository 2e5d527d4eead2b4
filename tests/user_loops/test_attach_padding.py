"""attach: masks, and padding that no mask tells of."""

from __future__ import annotations

import warnings

import pytest
import torch

import tl_layersim as lsim

from ..inputs.views import worst
from ..models.tiny_models import random_tokens, tiny_llama, tiny_tokenizer
from ..models.wrapped_models import bridge
from ..running.runs import analyzers, each_model
from .test_attach_transformer_lens import transformer_lens_models


@pytest.mark.light("Hugging Face", "TransformerBridge, GPT-2")
@each_model
def test_a_mask_leaves_padding_out(make):
    model = make()
    rows = [random_tokens(1, n, seed=n)[0] for n in (9, 5, 7, 8)]
    tokens = torch.full((4, 9), 2)
    mask = torch.zeros(4, 9, dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
        mask[i, : len(row)] = True
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


@pytest.mark.parametrize(
    ("mask", "message"),
    [(torch.ones(2, 4), r"`probe\.mask`.*\(2, 4\).*\(2, 5\)"), (torch.zeros(2, 5), r"mask.* every position of 1 forward")],
)
def test_a_mask_of_the_wrong_shape_or_without_positions_is_refused(mask, message):
    model = tiny_llama()
    with lsim.attach(model, analyzers()) as probe:
        probe.mask = mask
        model(random_tokens(2, 5))
    assert probe.headline() == {}
    with pytest.raises(lsim.LayersimError, match=message):
        probe.results()


@pytest.mark.covering
@pytest.mark.filterwarnings("ignore:HookedTransformer is deprecated")
@pytest.mark.parametrize("kind", ["TransformerBridge", "HookedTransformer"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("form", ["tokens", "texts"])
@pytest.mark.parametrize("bos", [False, True])
def test_padding_of_transformer_lens_is_left_out(kind, side, form, bos):
    model = transformer_lens_models()[kind]()
    model.tokenizer = tiny_tokenizer()
    model.cfg.tokenizer_prepends_bos = False
    model.tokenizer.padding_side = side
    # As in GPT-2, where BOS, EOS and padding are one id.
    model.tokenizer.bos_token = model.tokenizer.eos_token
    # A bridge builds the mask of texts by the default, whatever `prepend_bos=` says.
    model.cfg.default_prepend_bos = bos
    texts = ["w3 w4 w5 w9 w11", "w6 w7", "w8 w9 w10"]
    rows = [[2] * bos + row for row in ([3, 4, 5, 9, 11], [6, 7], [8, 9, 10])]
    given = texts if form == "texts" else model.to_tokens(texts, prepend_bos=bos)
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        with lsim.attach(model, lsim.LogitLens()) as probe:
            for _ in range(2):
                model(given, **({"prepend_bos": bos} if form == "texts" else {}))
    about = [str(each.message) for each in said if issubclass(each.category, lsim.LayersimWarning)]
    if (kind, side, form) == ("TransformerBridge", "left", "tokens"):
        # The bridge masks no tokens, so that the model attended to the padding before the tokens.
        assert len(about) == 1
        with pytest.raises(lsim.LayersimError, match=rf"\b{1 + bos} of 3 rows .*\b2\b"):
            probe.results()
        return
    # On the left TransformerLens itself builds the mask.
    assert ["id 2 at the ends" in text for text in about] == [True] * (side == "right")
    found = probe.results()["logit_lens"]
    expected = lsim.analyze(model, rows * 2, lsim.LogitLens())["logit_lens"]
    assert (found.positions, found.targets) == (expected.positions, expected.targets) == (20 + 6 * bos, 14 + 6 * bos)
    assert worst(found, expected) < 1e-5
    assert found.provenance.options["masked_by_pad_id"] == 4 * (side == "right")


def test_an_encoder_attends_to_padding_on_the_right():
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=100)
    model = bridge(BertForMaskedLM(config).eval())
    model.tokenizer = tiny_tokenizer()
    tokens = torch.tensor([[3, 4, 5, 6], [3, 4, 2, 2]])
    with pytest.warns(lsim.LayersimWarning), torch.no_grad(), lsim.attach(model, lsim.Cosine(center="none")) as probe:
        model(tokens)
    with pytest.raises(lsim.LayersimError, match=r"\b1 of 2 rows .*\b2\b"):
        probe.results()


def test_pads_that_no_mask_tells_of_are_refused():
    model = tiny_llama()
    model.tokenizer = tiny_tokenizer()
    padded = torch.tensor([[1, 5, 6, 2, 2, 2], [1, 5, 6, 7, 8, 9]])
    with torch.no_grad(), lsim.attach(model, lsim.Cosine(center="none")) as probe:
        model(padded)
    with pytest.raises(lsim.LayersimError, match=r"`attention_mask`.* 1 of 2\b"):
        probe.results()
    with torch.no_grad(), lsim.attach(model, lsim.Cosine(center="none")) as probe:
        probe.mask = padded != 2
        model(padded)
    assert probe.results()["cosine"].provenance.tokens == 9


def test_a_mask_that_cannot_be_read_is_refused():
    model = tiny_llama()
    tokens = random_tokens(4, 6)
    four = torch.zeros(4, 1, 6, 6)
    with torch.no_grad(), lsim.attach(model, analyzers()) as probe:
        model(tokens, attention_mask=four)
    with pytest.raises(lsim.LayersimError, match=r"`attention_mask`.*\(4, 1, 6, 6\).*\(4, 6\).*`probe\.mask`"):
        probe.results()
    with torch.no_grad(), lsim.attach(model, analyzers()) as probe:
        probe.mask = torch.ones(4, 6)
        model(tokens, attention_mask=four)
    assert probe.results()["cosine"].provenance.tokens == 24
