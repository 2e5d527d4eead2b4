"""How well each layer writes."""

from __future__ import annotations

import collections

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.training.layer_comparison import coherence, diversity

from ..models.tiny_models import tiny_gpt2, tiny_llama, tiny_tokenizer
from .helpers import with_words

TEXTS = ["w3 w4 w5 w6 w7 w8", "w9 w10 w11 w12", "w13 w3 w5 w9 w20 w21 w22"] * 3


def test_diversity_by_hand():
    text = [5, 6, 5, 6, 7, 5, 6, 5]
    product = 1.0
    for n in (2, 3, 4):
        grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
        product *= len(collections.Counter(grams)) / len(grams)

    assert diversity(text) == pytest.approx(product)
    assert diversity(list(range(10))) == 1.0
    assert diversity([1] * 10) == pytest.approx(1 / 9 / 8 / 7)


def test_coherence_by_hand():
    a = torch.randn(4, 6)
    b = torch.randn(4, 6)
    expected = (
        sum(float(x.double() @ y.double() / (x.double().norm() * y.double().norm())) for x, y in zip(a, b, strict=True)) / 4
    )

    assert coherence(a, b) == pytest.approx(expected)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_texts_are_written_from_each_layer():
    calls = []

    def embed(texts):
        calls.append(list(texts))
        return [[float(len(text)), 1.0] for text in texts]

    a = with_words(tiny_llama())
    b = with_words(tiny_gpt2())
    written = lsim.training.Continuations(["w3 w4", "w5 w6 w7"], new_tokens=12, embed=embed, seed=4)

    report = lsim.evaluate_layers(a, b, lsim.Data(TEXTS, tokenizer=tiny_tokenizer()), continuations=written)
    result = report["generation"]

    assert result.values.shape == (2, 3)
    assert bool(((result.values > 0) & (result.values <= 1)).all())
    assert bool((result.coherence.abs() <= 1).all())
    assert len(calls) == 2 * 3 * 2

    # The middle layer's words are those of a model that ends there.
    short = lsim.truncate(a, 2)
    short.tokenizer = a.tokenizer
    generated = lsim.EarlyExit(short, 1.0, at=()).generate(
        ["w3 w4", "w5 w6 w7"], max_new_tokens=12, do_sample=True, top_p=0.95, seed=4
    )
    long_rows = [row.tolist() for row in generated.tokens if len(row) >= 4]
    assert float(result.texts[0, 1]) == len(long_rows)
    assert float(result.values[0, 1]) == pytest.approx(sum(map(diversity, long_rows)) / len(long_rows))
