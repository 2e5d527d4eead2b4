"""Settings of a model's generation configuration, against transformers' own `generate`."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig

import tl_layersim as lsim

from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama
from .helpers import ragged

NEW = 14


def theirs(model, row: torch.Tensor, **options) -> list[int]:
    """New tokens of transformers' greedy generation for one row without padding."""
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(row[None], attention_mask=torch.ones_like(row)[None], **settings)[0, len(row) :].tolist()


def settings_of(model, row: torch.Tensor) -> dict[str, dict]:
    """Settings that change the tokens which the model says after a row."""
    plain = theirs(model, row)
    first = plain[0]
    second = next(token for token in plain if token != plain[0])
    return {
        "repetition_penalty": {"repetition_penalty": 1.4},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
        "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
        "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
        "bad_words_ids": {"bad_words_ids": [[first], [second, first]]},
        "suppress_tokens": {"suppress_tokens": [first, second]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [first]},
        "forced_eos_token_id": {"forced_eos_token_id": 2},
        "min_length": {"min_length": len(row) + 9, "eos_token_id": plain[3]},
        "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": plain[3]},
        "sequence_bias": {"sequence_bias": [[[first], -20.0], [[7], 3.0]]},
        "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 3.0), "eos_token_id": 5},
        "several": {"repetition_penalty": 1.2, "suppress_tokens": [second], "remove_invalid_values": True},
        "renormalize_logits": {"renormalize_logits": True, "repetition_penalty": 1.4},
        "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash")},
        "synth_id": {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[5, 6, 7], ngram_len=3)},
        "eos_token_id": {"eos_token_id": plain[4]},
    }


NAMES = list(settings_of(tiny_llama(), random_tokens(1, 6)[0]))


@pytest.mark.light("repetition_penalty-tiny_llama", "several-tiny_llama")
@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_generate(make, name):
    model = make()
    tokens, mask = ragged([6, 3, 5])
    rows = [tokens[0], tokens[1, 3:], tokens[2, 1:]]
    plain = theirs(model, rows[0])
    for setting, value in settings_of(model, rows[0])[name].items():
        setattr(model.generation_config, setting, value)
    generated = lsim.EarlyExit(model, 1.0).generate(tokens, attention_mask=mask, max_new_tokens=NEW)
    expected = [theirs(model, row) for row in rows]

    assert expected[0] != plain or name == "synth_id"
    assert [row.tolist() for row in generated.tokens] == expected


def test_exits_are_decided_without_the_settings():
    model = tiny_llama()
    prompt = random_tokens(1, 6)
    early = lsim.EarlyExit(model, 0.3, at="all")
    before = early.generate(prompt, max_new_tokens=1, eos_token_id=())
    model.generation_config.suppress_tokens = before.tokens[0].tolist()
    after = early.generate(prompt, max_new_tokens=1, eos_token_id=())

    assert after.exits[0].tolist() == before.exits[0].tolist()
    assert after.tokens[0].tolist() != before.tokens[0].tolist()


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_stop_strings_end_a_row():
    model = copy.deepcopy(lsim.demo_model())
    model.generation_config.stop_strings = ["there"]
    row = model.tokenizer("Once upon a", return_tensors="pt").input_ids[0]
    expected = theirs(model, row, tokenizer=model.tokenizer)
    early = lsim.EarlyExit(model, 1.0)

    assert len(expected) < NEW
    assert early.generate(row, max_new_tokens=NEW).tokens[0].tolist() == expected

    model.tokenizer = None
    with pytest.raises(lsim.LayersimError, match=r"generation_config.stop_strings.*there"):
        lsim.EarlyExit(model, 1.0).generate(row, max_new_tokens=NEW)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_sampling_settings_apply_to_sampling_alone():
    model = tiny_llama()
    row = random_tokens(1, 6)[0]
    greedy = lsim.EarlyExit(model, 1.0).generate(row, max_new_tokens=NEW, eos_token_id=()).tokens[0].tolist()
    model.generation_config.update(do_sample=True, temperature=3.0, top_p=0.9, top_k=4, min_p=0.01, typical_p=0.95)
    early = lsim.EarlyExit(model, 1.0)

    assert early.generate(row, max_new_tokens=NEW, eos_token_id=()).tokens[0].tolist() == greedy

    # At a top_k of 1, sampling is greedy.
    model.generation_config.top_k = 1
    assert early.generate(row, max_new_tokens=NEW, do_sample=True, seed=0, eos_token_id=()).tokens[0].tolist() == greedy


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_temperature_is_that_of_the_configuration_unless_it_is_given():
    model = tiny_llama()
    row = random_tokens(1, 6)[0]
    early = lsim.EarlyExit(model, 1.0)

    def sampled(**options) -> list[int]:
        return early.generate(row, max_new_tokens=NEW, do_sample=True, seed=3, eos_token_id=(), **options).tokens[0].tolist()

    plain = sampled()
    hot = sampled(temperature=4.0)
    assert plain != hot
    model.generation_config.temperature = 4.0
    assert sampled() == hot
    assert sampled(temperature=1.0) == plain


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_beams", 3), ("guidance_scale", 1.5), ("penalty_alpha", 0.6), ("dola_layers", "high"), ("token_healing", True)],
)
def test_other_kinds_of_decoding_are_refused(name, value):
    model = tiny_llama()
    setattr(model.generation_config, name, value)
    with pytest.raises(lsim.LayersimError, match=f"(?s)generation_config.{name}.*{value}"):
        lsim.EarlyExit(model, 1.0).generate(random_tokens(1, 6), max_new_tokens=2)
