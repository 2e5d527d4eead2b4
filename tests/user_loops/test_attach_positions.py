"""`positions=` of attach: each forward pass, with the model's mask or the probe's, and steps of cached generation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from .. import oracles
from ..engine.test_run_positions import LENGTHS, RULES, by_hand, causal_classifier, check, means_by_hand, padded, states
from ..models.tiny_models import random_tokens, tiny_llama
from ..models.wrapped_models import bridge
from ..running.options import called

ROWS = {name: rule for name, rule in RULES.items() if name != "column"}
each_rule = pytest.mark.parametrize("rule", ROWS)


def attached(model, rule, **options):
    return called(lsim.attach, model, lsim.Cosine(center="none"), positions=rule, **options)


@pytest.mark.light("llama-all", "llama-slice", "bert classifier-first", "bert classifier-function")
@each_rule
@pytest.mark.parametrize("kind", ["llama", "bert classifier"])
def test_each_forward_pass_is_measured_at_the_rule_s_positions(kind, rule):
    given, choose = RULES[rule]
    model, x = by_hand(kind, choose)
    data = padded(left=(1, 4) if kind == "llama" else ())
    with torch.no_grad(), attached(model, given) as probe:
        for part in (slice(0, 4), slice(4, 6)):
            model(input_ids=data["input_ids"][part], attention_mask=data["attention_mask"][part])
    found = probe.results()["cosine"]
    # A Llama with padding on the left rotates by other positions, in float32.
    check(found, x, atol=1e-7)
    assert found.provenance.options["positions"].startswith(given if isinstance(given, str) else ("-3:-1", "tests."))


@pytest.mark.parametrize("kind", ["llama", "bert classifier"])
def test_the_mean_of_each_row_of_a_forward_pass_is_one_sample(kind):
    model, x = means_by_hand(kind)
    data = padded(left=(1, 4) if kind == "llama" else ())
    with torch.no_grad(), attached(model, "mean") as probe:
        for part in (slice(0, 4), slice(4, 6)):
            model(input_ids=data["input_ids"][part], attention_mask=data["attention_mask"][part])
    found = probe.results()["cosine"]
    np.testing.assert_allclose(found.values, oracles.oracle_cosine([x], center="none")["values"], atol=1e-7)


@each_rule
def test_the_rule_selects_among_the_positions_of_the_probe_s_mask(rule):
    given, choose = RULES[rule]
    model = tiny_llama().double()
    tokens = random_tokens(3, 8)
    rows = [states(model, model.model.layers, row)[:, 2:] for row in tokens]
    x = np.concatenate([of[:, list(choose(row[2:].tolist()))] for of, row in zip(rows, tokens, strict=True)], axis=1)
    with torch.no_grad(), attached(model, given) as probe:
        probe.mask = torch.ones(3, 8, dtype=torch.bool)
        probe.mask[:, :2] = False
        model(tokens)
    check(probe.results()["cosine"], x)


def test_a_bridge_is_measured_at_the_rule_s_positions():
    _, x = by_hand("llama", RULES["last"][1])
    model = bridge(tiny_llama().double())
    data = padded()
    with torch.no_grad(), attached(model, "last") as probe:
        model(data["input_ids"], attention_mask=data["attention_mask"])
    check(probe.results()["cosine"], x, atol=1e-6)


@pytest.mark.parametrize(("kind", "rule"), [("llama", "all"), ("llama classifier", "last"), ("bert classifier", "first")])
def test_the_default_is_the_position_that_the_head_reads(kind, rule):
    model, x = by_hand(kind, RULES[rule][1])
    data = padded()
    with torch.no_grad(), attached(model, None) as probe:
        model(input_ids=data["input_ids"], attention_mask=data["attention_mask"])
    check(probe.results()["cosine"], x)
    assert probe.results()["cosine"].provenance.options["positions"] == rule


def test_rows_as_samples_are_whole_by_default():
    model = causal_classifier()
    data = padded()
    with torch.no_grad(), lsim.attach(model, lsim.CKA(level="sequence")) as probe:
        model(input_ids=data["input_ids"], attention_mask=data["attention_mask"])
    found = probe.results()["cka"]
    assert (found.samples, found.provenance.tokens, found.provenance.options["positions"]) == (6, sum(LENGTHS), "all")
    with pytest.raises(lsim.LayersimError, match="`positions` must be given"):
        lsim.attach(model, [lsim.CKA(level="sequence"), lsim.Cosine(center="none")])


def generate(model, rule, prompt):
    with torch.no_grad(), attached(model, rule) as probe:
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, min_new_tokens=5, do_sample=False)
    return probe.results()["cosine"]


@pytest.mark.parametrize("length", [1, 7])
def test_steps_of_cached_generation_are_counted_by_all_and_last(length):
    """The last of five new tokens is never run."""
    model = tiny_llama()
    prompt = random_tokens(2, length)
    assert generate(model, "all", prompt).provenance.tokens == 2 * (length + 4)
    assert generate(model, "last", prompt).provenance.tokens == 2 * 5


@pytest.mark.parametrize(
    "rule", ["first", "mean", slice(0, 2), lambda tokens: tokens > 50], ids=lambda rule: getattr(rule, "__name__", str(rule))
)
@pytest.mark.parametrize("length", [1, 7])
def test_steps_of_cached_generation_are_no_rows(rule, length):
    with pytest.raises(lsim.LayersimError, match=r"`positions`.*'all' or 'last'"):
        generate(tiny_llama(), rule, random_tokens(2, length))


def test_a_loop_of_steps_without_a_mask_is_refused_too():
    model = tiny_llama()
    tokens = random_tokens(1, 4)
    with torch.no_grad(), attached(model, "first") as probe:
        past = None
        for i in range(4):
            past = model(tokens[:, i : i + 1], past_key_values=past, use_cache=True).past_key_values
    with pytest.raises(lsim.LayersimError, match="continues rows from a cache"):
        probe.results()


def test_rows_of_one_token_are_rows():
    model = tiny_llama()
    tokens = random_tokens(4, 1)
    with torch.no_grad(), attached(model, "first") as probe:
        model(tokens)
    assert probe.results()["cosine"].provenance.tokens == 4


def test_a_function_needs_token_ids():
    model = tiny_llama()
    with torch.no_grad(), attached(model, lambda tokens: tokens > 0) as probe:
        model.model(inputs_embeds=torch.randn(2, 5, 32))
    with pytest.raises(lsim.LayersimError, match="`positions` is a function"):
        probe.results()
    with torch.no_grad(), attached(model, slice(1, 3)) as probe:
        model.model(inputs_embeds=torch.randn(2, 5, 32))
    assert probe.results()["cosine"].provenance.tokens == 4


@pytest.mark.parametrize("rule", ["my_mask", "assistant"])
def test_columns_of_data_are_not_known_in_a_loop(rule):
    with pytest.raises(lsim.LayersimError, match=rf"`positions`.*{rule!r}.*`probe\.mask`"):
        attached(tiny_llama(), rule)


def test_the_lens_has_no_mean():
    with pytest.raises(lsim.LayersimError, match=r"`positions` is 'mean'.*LogitLens"):
        lsim.attach(tiny_llama(), lsim.LogitLens(), positions="mean")


def test_a_row_without_a_selected_position_contributes_nothing():
    model = tiny_llama()
    tokens = random_tokens(2, 6)
    tokens[0] = 3
    tokens[1] = 4
    with torch.no_grad(), attached(model, lambda ids: ids == 4) as probe:
        model(tokens)
        model(tokens[:1])
    assert probe.results()["cosine"].provenance.tokens == 6
