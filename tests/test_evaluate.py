"""Two models side by side, and how well each layer writes."""

from __future__ import annotations

import collections

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analyzers.exit_curve import THRESHOLDS
from tl_layersim.training.evaluation import coherence, diversity

from .conftest import random_tokens, tiny_gpt2, tiny_llama, tiny_tokenizer

TEXTS = ["w3 w4 w5 w6 w7 w8", "w9 w10 w11 w12", "w13 w3 w5 w9 w20 w21 w22"] * 3


def with_words(model):
    model.tokenizer = tiny_tokenizer()
    return model


def test_every_field_is_what_the_analyzers_say():
    a, b, tokens = tiny_llama(), tiny_llama(seed=1), random_tokens(12, 9)
    report = lsim.evaluate_layers(a, b, tokens, threshold=0.37, names=("old", "new"), batch_size=5)
    found = report["layers"]
    assert found.models == ("old", "new")
    for number, model in enumerate((a, b)):
        alone = lsim.analyze(
            model,
            tokens,
            [lsim.LogitLens(), lsim.Saturation(), lsim.Cosine(), lsim.ExitCurve(thresholds=0.37), lsim.NeuralCollapse()],
        )
        whole = lsim.analyze(model, tokens, [lsim.ExitCurve(thresholds=(*THRESHOLDS, 0.37))])["exit_curve"]
        lens, exits = alone["logit_lens"], alone["exit_curve"].at(0.37)
        for ours, theirs in {
            "cross_entropy": lens.cross_entropy,
            "perplexity": lens.perplexity,
            "accuracy": lens.accuracy,
            "agreement": lens.agreement,
            "saturated": alone["saturation"].counts.cumsum(0) / alone["saturation"].counts.sum(),
            "cosine_to_last": alone["cosine"].values[:, -1],
            "exits": exits.exits / exits.exits.sum(),
            "nc1": alone["neural_collapse"].nc1,
            "early_share": alone["saturation"].early_share,
            "exit_accuracy": torch.tensor(exits.accuracy),
            "speedup": torch.tensor(exits.speedup),
            "speedup_at_agreement": torch.tensor(whole.at(whole.threshold_for(agreement=0.95)).speedup),
            "effective_depth": torch.tensor(float(lens.effective_depth(0.1))),
        }.items():
            torch.testing.assert_close(getattr(found, ours)[number], theirs.double(), rtol=1e-6, atol=1e-9, msg=ours)
        torch.testing.assert_close(report[("cosine_before", "cosine_after")[number]].values, alone["cosine"].values)
    assert found.provenance.model.count("|") == 1


def test_a_page_a_table_and_a_file(tmp_path):
    report = lsim.evaluate_layers(tiny_llama(), tiny_llama(seed=1), random_tokens(12, 9))
    page = report.to_html(tmp_path / "page.html").read_text()
    assert "before" in page
    assert "after" in page
    again = lsim.load_report(report.save(tmp_path / "report.safetensors"))
    assert torch.equal(again["layers"].values, report["layers"].values)
    table = report["layers"].to_frame()
    assert set(table["model"]) == {"before", "after"}
    assert len(table) == 6
    for picture in report["layers"].pictures:
        assert len(report["layers"].plot(picture.field).data) == 2


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(lsim.LayersimError, match="different depth"):
        lsim.evaluate_layers(tiny_llama(), tiny_llama(layers=2), random_tokens(4, 6))
    other = with_words(tiny_llama(seed=1))
    other.tokenizer = tiny_tokenizer(50)
    with pytest.raises(lsim.LayersimError, match="same tokens"):
        lsim.evaluate_layers(with_words(tiny_llama()), other, ["w60 w70 w3 w4"] * 4)


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
    a, b = torch.randn(4, 6), torch.randn(4, 6)
    expected = (
        sum(float(x.double() @ y.double() / (x.double().norm() * y.double().norm())) for x, y in zip(a, b, strict=True)) / 4
    )
    assert coherence(a, b) == pytest.approx(expected)


def test_texts_are_written_from_each_layer():
    seen = []

    def embed(texts):
        seen.append(list(texts))
        return [[float(len(text)), 1.0] for text in texts]

    a, b = with_words(tiny_llama()), with_words(tiny_gpt2())
    report = lsim.evaluate_layers(
        a, b, TEXTS, prompts=["w3 w4", "w5 w6 w7"], new_tokens=12, embed=embed, seed=4, tokenizer=tiny_tokenizer()
    )
    found = report["generation"]
    assert found.values.shape == (2, 3)
    assert bool(((found.values > 0) & (found.values <= 1)).all())
    assert bool((found.coherence.abs() <= 1).all())
    assert len(seen) == 2 * 3 * 2
    # The middle layer's words are those of a model that ends there.
    short = lsim.truncate(a, 2)
    short.tokenizer = a.tokenizer
    said = lsim.EarlyExit(short, 1.0, at=()).generate(
        ["w3 w4", "w5 w6 w7"], max_new_tokens=12, do_sample=True, top_p=0.95, seed=4
    )
    kept = [row.tolist() for row in said.tokens if len(row) >= 4]
    assert float(found.texts[0, 1]) == len(kept)
    assert float(found.values[0, 1]) == pytest.approx(sum(map(diversity, kept)) / len(kept))


def test_a_classifier_is_asked_for_its_labels():
    from .test_aligned import bert

    rows = [{"input_ids": random_tokens(1, 7, seed=i)[0].tolist(), "label": i % 3} for i in range(12)]
    found = lsim.evaluate_layers(bert(), bert(), rows)["layers"]
    hits = [bert()(torch.tensor([row["input_ids"]])).logits.argmax().item() == row["label"] for row in rows]
    assert float(found.accuracy[0, -1]) == pytest.approx(sum(hits) / 12)
