"""attach reads the mask and the tokens of the stack that is measured: decoder, encoder, tower, or a model around it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama
from ..models.wrapped_models import bridge


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "vocab_size": 100}
    return T5ForConditionalGeneration(
        T5Config(**sizes, num_layers=3, num_decoder_layers=3, decoder_start_token_id=0, pad_token_id=0)
    ).eval()


def bart():
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 100, "max_position_embeddings": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return BartForConditionalGeneration(BartConfig(**sizes, **heads, encoder_layers=3, decoder_layers=3)).eval()


def pair():
    from transformers import BertConfig, EncoderDecoderConfig, EncoderDecoderModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 100}
    config = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**sizes), BertConfig(**sizes))
    config.decoder_start_token_id = 1
    config.pad_token_id = 0
    return EncoderDecoderModel(config).eval()


MODELS = {"T5": (t5, "decoder.block", "encoder.block"), "BART": (bart, "model.decoder.layers", "model.encoder.layers")}
MODELS["EncoderDecoderModel"] = (pair, "decoder.bert.encoder.layer", "encoder.encoder.layer")
each_model = pytest.mark.parametrize(("make", "decoder", "encoder"), MODELS.values(), ids=MODELS)
COSINE = lsim.Cosine(center="none")


def paths(prefix):
    return [f"{prefix}.{i}" for i in range(3)]


def inputs(length=9):
    """Eight rows: the encoder's first has 2 tokens of 9; the decoder's all count."""
    mask = torch.ones(8, 9, dtype=torch.int64)
    mask[0, 2:] = 0
    return {
        "input_ids": random_tokens(8, 9),
        "attention_mask": mask,
        "decoder_input_ids": random_tokens(8, length, seed=1),
    }


def by_hand(model, layers, keep, given):
    """Mean cosine between the outputs of the first and the last block at the positions to keep, in float64."""
    seen = []
    handles = [
        model.get_submodule(path).register_forward_hook(
            lambda _m, _a, out: seen.append((out[0] if isinstance(out, tuple) else out).double())
        )
        for path in (layers[0], layers[-1])
    ]
    with torch.no_grad():
        model(**given)
    for handle in handles:
        handle.remove()
    a, b = (x[keep].numpy() for x in seen)
    return float(np.mean((a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)))


def attached(model, layers, *calls):
    with torch.no_grad(), lsim.attach(lsim.open_model(model, layers=layers), COSINE) as probe:
        for given in calls:
            model(**given)
    return probe.results()["cosine"]


@pytest.mark.light("T5", "EncoderDecoderModel")
@each_model
def test_a_decoder_without_a_mask_counts_all_of_its_tokens_whatever_the_encoders_mask_says(make, decoder, encoder):
    model = make()
    for length in (9, 5, 12):
        found = attached(model, paths(decoder), given := inputs(length))
        every = torch.ones(8, length).bool()
        assert found.provenance.tokens == 8 * length
        assert float(found.values[1, 3]) == pytest.approx(by_hand(model, paths(decoder), every, given), abs=1e-6)


@each_model
def test_the_decoders_own_mask_decides(make, decoder, encoder):
    model = make()
    given = inputs()
    mask = torch.ones(8, 9, dtype=torch.int64)
    mask[3, 4:] = 0
    given["decoder_attention_mask"] = mask
    found = attached(model, paths(decoder), given)
    assert found.provenance.tokens == 72 - 5
    assert float(found.values[1, 3]) == pytest.approx(by_hand(model, paths(decoder), mask.bool(), given), abs=1e-6)


@each_model
def test_the_encoder_keeps_the_encoders_mask(make, decoder, encoder):
    model = make()
    given = inputs(5) | {"decoder_attention_mask": torch.ones(8, 5, dtype=torch.int64)}
    found = attached(model, paths(encoder), given)
    assert found.provenance.tokens == 65
    mask = given["attention_mask"].bool()
    assert float(found.values[1, 3]) == pytest.approx(by_hand(model, paths(encoder), mask, given), abs=1e-6)


@each_model
def test_targets_as_labels_are_the_decoders_tokens(make, decoder, encoder):
    """The model shifts them; with the encoder's tokens in their place another loss would come out."""
    model = make()
    given = inputs()
    labels = given.pop("decoder_input_ids")
    seen = []
    probe = lsim.attach(lsim.open_model(model, layers=paths(decoder)), lsim.NeuralCollapse(classes=(3, 4)))
    probe._add = lambda view, call: seen.append(view.tokens)
    with torch.no_grad(), probe:
        model(**given, labels=labels)
    start = model.config.decoder_start_token_id
    assert torch.equal(seen[0].view(8, 9)[:, 0], torch.full((8,), start))
    assert torch.equal(seen[0].view(8, 9)[:, 1:], labels[:, :-1])


def test_a_decoder_that_generates_is_measured_step_by_step():
    model = t5()
    given = inputs()
    with torch.no_grad(), lsim.attach(lsim.open_model(model, layers=paths("decoder.block")), COSINE) as probe:
        model.generate(given["input_ids"], attention_mask=given["attention_mask"], max_new_tokens=5, min_new_tokens=5)
    assert probe.results()["cosine"].provenance.tokens == 8 * 5


def test_padding_of_a_decoder_that_no_mask_tells_of_is_refused_and_its_start_token_is_not():
    from ..models.tiny_models import tiny_tokenizer

    model = t5()
    given = inputs()
    model.tokenizer = tiny_tokenizer()
    model.tokenizer.pad_token = "<unk>"
    given["decoder_input_ids"][:, 0] = 0
    assert attached(model, paths("decoder.block"), given).provenance.tokens == 72
    given["decoder_input_ids"][0, 6:] = 0
    with pytest.raises(lsim.LayersimError, match="`attention_mask` is missing"):
        attached(model, paths("decoder.block"), given)


def test_blocks_of_both_stacks_are_refused():
    with pytest.raises(lsim.LayersimError, match=r"`layers` .*decoder.block"):
        lsim.attach(lsim.open_model(t5(), layers=[*paths("encoder.block"), *paths("decoder.block")]), COSINE)


def clip():
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "projection_dim": 16}
    text = sizes | {"vocab_size": 100, "max_position_embeddings": 20, "bos_token_id": 1, "eos_token_id": 2}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=sizes | {"image_size": 16, "patch_size": 4})).eval()
    # Transformers raises NotImplementedError there: a model of two towers has no embedding of its own.
    model.get_input_embeddings = lambda: None
    return model


def test_the_mask_of_a_text_is_not_taken_for_one_of_an_image():
    """17 positions of both: an image of 4 x 4 patches and its class, and texts of 17 tokens."""
    model = clip()
    mask = torch.ones(2, 17, dtype=torch.int64)
    mask[0, 5:] = 0
    given = {"input_ids": random_tokens(2, 17), "attention_mask": mask, "pixel_values": torch.randn(2, 3, 16, 16)}
    assert attached(model, paths("vision_model.encoder.layers"), given).provenance.tokens == 34
    assert attached(model, paths("text_model.encoder.layers"), given).provenance.tokens == 22


def test_a_mask_is_longer_than_the_row_with_a_cache_alone():
    """Without a cache, its last positions are not those of the row."""
    model = tiny_llama()
    tokens = random_tokens(2, 6)
    mask = torch.tensor([[0] * 2 + [1] * 6 + [0], [1] * 9])
    with torch.no_grad():
        past = model(tokens, use_cache=True).past_key_values
        with lsim.attach(model, COSINE) as probe:
            model(tokens[:, :3], attention_mask=mask, past_key_values=past)
        assert probe.results()["cosine"].provenance.tokens == 5
    own = Own()
    with torch.no_grad(), lsim.attach(lsim.open_model(own, layers=["parts.0", "parts.1"]), COSINE) as probe:
        own(tokens[:, :3], attention_mask=mask)
    with pytest.raises(lsim.LayersimError, match=r"`attention_mask`.*\(2, 9\).*\(2, 3\).*`probe\.mask`"):
        probe.results()


class Own(torch.nn.Module):
    """A model that makes of its mask what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(100, 8)
        self.parts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, tokens, attention_mask):
        x = self.words(tokens)
        for part in self.parts:
            x = x + part(x)
        return x


def test_the_mask_of_a_transformer_lens_model_that_is_run_past_its_hooks():
    model = bridge(tiny_gpt2())
    tokens = random_tokens(2, 6)
    mask = torch.ones_like(tokens)
    mask[0, 4:] = 0
    ways = [
        lambda: model(tokens, attention_mask=mask),
        lambda: model.run_with_cache(tokens, attention_mask=mask),
        lambda: model.run_with_hooks(tokens, attention_mask=mask, fwd_hooks=[]),
    ]
    for way in ways:
        with torch.no_grad(), lsim.attach(model, COSINE) as probe:
            way()
        assert probe.results()["cosine"].provenance.tokens == 10
