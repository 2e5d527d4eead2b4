"""Exits at high thresholds: those of float64 softmax, in the curve, in generation and in full sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from ..models.tiny_models import random_tokens, tiny_llama


@pytest.fixture(scope="module")
def sharp():
    """A model whose logits go up to some hundreds, as those of wide models do."""
    model = tiny_llama()
    torch.manual_seed(1)
    torch.nn.init.normal_(model.lm_head.weight, std=7)
    return model


def lens_logits(model, tokens: torch.Tensor) -> np.ndarray:
    """`layer row pos vocabulary` as the model computes them in float32, then exact in float64; hooks of the test's own."""
    outputs: list[torch.Tensor] = []
    handles = [block.register_forward_hook(lambda m, a, o: outputs.append(o)) for block in model.model.layers]
    with torch.no_grad():
        model(tokens, use_cache=False)
        logits = torch.stack([model.lm_head(model.model.norm(x)) for x in outputs])
    for handle in handles:
        handle.remove()
    return logits.double().numpy()


def probabilities(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def exits_of(score: np.ndarray, threshold: float) -> np.ndarray:
    """Counts of blocks `row pos` after which a position exits, by scores `layer row pos`."""
    sure = score > threshold
    sure[-1] = True
    return sure.argmax(0) + 1


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_an_exit_curve_has_the_exits_of_float64_at_every_threshold(sharp):
    tokens = random_tokens(100, 40)
    logits = lens_logits(sharp, tokens)
    assert logits.max() > 150

    top = probabilities(logits).max(-1)
    curve = lsim.analyze(sharp, tokens, lsim.ExitCurve())["exit_curve"]
    for threshold, exits in zip(curve.thresholds, curve.exits, strict=True):
        expected = np.bincount(exits_of(top, threshold).ravel(), minlength=4)[1:]
        # Logits of other batches differ by rounding, which float64 does not take back: at most one position here.
        assert np.abs(exits.numpy() - expected).max() <= 1, threshold


@pytest.mark.heavy("ten times 4000 tokens")
def test_early_exit_has_the_exits_of_float64_and_of_the_curve(sharp):
    tokens = random_tokens(100, 40)
    p = probabilities(lens_logits(sharp, tokens))
    curve = lsim.analyze(sharp, tokens, lsim.ExitCurve())["exit_curve"]
    second, first = np.moveaxis(np.sort(p, -1)[..., -2:], -1, 0)
    for threshold in (0.9, 0.999, 0.9999, 0.99999, 0.9999999):
        for rule, score in (("max-prob", first), ("margin", first - second)):
            early = lsim.EarlyExit(sharp, threshold, at="all", rule=rule)
            exits = early.logits(tokens).exits.numpy()
            expected = exits_of(score, threshold)
            assert (exits != expected).sum() <= 1, (threshold, rule)
            if rule == "max-prob" and threshold in curve.thresholds:
                counts = np.bincount(exits.ravel(), minlength=4)[1:]
                assert np.abs(counts - curve.at(threshold).exits.numpy()).max() <= 1


def test_early_exit_by_a_shortlist_has_the_exits_of_float64(sharp):
    tokens = random_tokens(100, 40)
    ids = list(range(0, 100, 2))
    top = probabilities(lens_logits(sharp, tokens)[..., ids]).max(-1)

    for threshold in (0.9999, 0.99999):
        early = lsim.EarlyExit(sharp, threshold, at="all", shortlist=ids)
        assert (early.logits(tokens).exits.numpy() != exits_of(top, threshold)).sum() <= 1


@pytest.mark.heavy("many generations")
def test_generation_exits_where_float64_exits(sharp):
    """Every new token, at the layer where float64 softmax of its logits first passes the threshold."""
    rows = random_tokens(6, 8, seed=3)
    for rule in ("max-prob", "margin"):
        early = lsim.EarlyExit(sharp, 0.99999, at="all", rule=rule)
        said = early.generate(rows, max_new_tokens=24, eos_token_id=())
        whole = torch.cat([rows, torch.stack(list(said.tokens))], 1)
        p = np.sort(probabilities(lens_logits(sharp, whole)), -1)
        score = p[..., -1] - (p[..., -2] if rule == "margin" else 0)
        expected = exits_of(score, 0.99999)[:, 7:-1]
        assert (torch.stack(list(said.exits)).numpy() != expected).sum() <= 1


@pytest.mark.parametrize("top", [0.0, 100.0, 270.0, -270.0])
@pytest.mark.parametrize("rule", ["max-prob", "margin"])
def test_a_probability_a_hair_below_the_threshold_does_not_exit(top, rule):
    """Two logits, a known distance apart: both rules decide as exact arithmetic does, 1e-9 of 1 - p from the threshold."""
    from tl_layersim.early_exit.rules import EXIT_RULES, CheckedTokens

    gap = np.float64(np.float32(top + 11.5)) - np.float64(np.float32(top))
    p = 1 / (1 + np.exp(-gap))
    score = p if rule == "max-prob" else p - (1 - p)
    logits = torch.tensor([[top, top + 11.5]], dtype=torch.float32)
    for nudge, expected in ((1 + 1e-9, True), (1 - 1e-9, False)):
        tokens = CheckedTokens(logits, logits, logits, torch.tensor([0]))
        assert bool(EXIT_RULES.named(rule)(1 - (1 - score) * nudge).exits(tokens, {})) == expected


def test_a_float64_model_whose_rotary_embedding_is_float32_is_accepted(monkeypatch):
    """Vector units round float32 sines of a long tensor otherwise than those of a short one, as of a decoding step."""
    model = tiny_llama().double()
    rotary = model.model.rotary_emb
    forward = rotary.forward

    def rounded(x, position_ids):
        cos, sin = forward(x, position_ids)
        eps = torch.finfo(torch.float32).eps * (position_ids.shape[-1] % 3 - 1)
        return cos * (1 + eps), sin * (1 - eps)

    monkeypatch.setattr(rotary, "forward", rounded)
    early = lsim.EarlyExit(model, 0.3, at=(1,))
    tokens = random_tokens(2, 9)
    with torch.no_grad():
        expected = model(tokens).logits
    assert torch.allclose(lsim.EarlyExit(model, 1.0).logits(tokens).logits, expected, rtol=1e-5)
    assert early.logits(tokens).logits.dtype == torch.float64


def test_a_float64_model_with_a_wrong_head_is_refused(monkeypatch):
    model = tiny_llama().double()
    head = model.lm_head.forward
    monkeypatch.setattr(model.lm_head, "forward", lambda x: head(x) * (1 + 1e-3 * x.shape[1]))
    with pytest.raises(lsim.LayersimError, match="logits"):
        lsim.EarlyExit(model, 0.3, at=(1,))
