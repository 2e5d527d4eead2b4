"""Columns that the model's forward takes reach it, wherever data is read, or the call is refused."""

from __future__ import annotations

import logging

import datasets
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.early_exit import frequent_tokens

from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama, tiny_tokenizer
from ..running.options import called


def tiny_bert(labels: int = 0):
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 100}
    config = BertConfig(**small, max_position_embeddings=64, **({"num_labels": labels} if labels else {}))
    model = (BertForSequenceClassification if labels else BertForMaskedLM)(config).eval()
    # Larger weights than the default, so that inputs change the stream by more than rounding.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return model


def pairs(rows: int = 6) -> dict[str, torch.Tensor]:
    segments = torch.zeros(rows, 20, dtype=torch.long)
    segments[:, 9:] = 1
    tokens = random_tokens(rows)
    return {"input_ids": tokens, "token_type_ids": segments, "attention_mask": torch.ones_like(tokens)}


def first_to_last(model, blocks, **inputs) -> float:
    """Mean cosine of the residual before the first and after the last block, by hooks of the test's own."""
    seen = []
    handles = [blocks[0].register_forward_pre_hook(lambda _m, a, k: seen.append((*a, *k.values())[0]), with_kwargs=True)]
    handles.append(blocks[-1].register_forward_hook(lambda _m, _a, out: seen.append(out[0] if isinstance(out, tuple) else out)))
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    x, y = (
        h.double()[inputs["attention_mask"].bool()] if "attention_mask" in inputs else h.double().flatten(0, 1) for h in seen
    )
    return float(torch.nn.functional.cosine_similarity(x, y, dim=-1).mean())


def measured(model, data, **options) -> float:
    return float(called(lsim.analyze, model, data, lsim.Cosine(center="none"), **options)["cosine"].values[0, -1])


def rows_of(data):
    plain = {name: value.tolist() for name, value in data.items()}
    return [dict(zip(plain, values, strict=True)) for values in zip(*plain.values(), strict=True)]


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_the_second_sentence_of_a_pair_reaches_the_model_in_every_form_of_data():
    model, data = tiny_bert(), pairs()
    expected = first_to_last(model, model.bert.encoder.layer, **data)
    dropped = first_to_last(model, model.bert.encoder.layer, **(data | {"token_type_ids": torch.zeros_like(data["input_ids"])}))
    assert abs(expected - dropped) > 1e-4
    plain = {name: value.tolist() for name, value in data.items()}
    loader = torch.utils.data.DataLoader(datasets.Dataset.from_dict(plain).with_format("torch"), batch_size=4)
    import pandas

    forms = {
        "mapping": data,
        "lists": plain,
        "rows": rows_of(data),
        "data set": datasets.Dataset.from_dict(plain),
        "data set of tensors": datasets.Dataset.from_dict(plain).with_format("torch"),
        "batches": [data],
        "loader": loader,
        "table": pandas.DataFrame(plain),
        "stream": datasets.Dataset.from_dict(plain).to_iterable_dataset(),
        "generator": (row for row in rows_of(data)),
    }
    for form, given in forms.items():
        assert measured(model, given, batch_size=4) == pytest.approx(expected, abs=1e-6), form


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.filterwarnings("ignore:The vocabularies")
def test_a_model_that_takes_no_segments_is_not_compared_on_pairs():
    with pytest.raises(lsim.LayersimError, match=r"`token_type_ids` .*LlamaForCausalLM"):
        lsim.compare(tiny_llama(), tiny_bert(), pairs(), lsim.CKA(minibatch=16))
    alone = pairs() | {"token_type_ids": torch.zeros(6, 20, dtype=torch.long)}
    found = lsim.compare(tiny_llama(), tiny_bert(), alone, lsim.CKA(minibatch=16))
    without = lsim.compare(tiny_llama(), tiny_bert(), alone["input_ids"], lsim.CKA(minibatch=16))
    torch.testing.assert_close(found.values, without.values)


def test_tokens_of_pairs_are_counted():
    assert sorted(frequent_tokens(tiny_bert(), pairs(), 5).tolist()) == sorted(
        frequent_tokens(tiny_bert(), pairs()["input_ids"], 5).tolist()
    )


@pytest.mark.filterwarnings("ignore:The targets of prediction_grid are next tokens")
def test_one_pair_is_a_prompt():
    one = {name: value[:1] for name, value in pairs().items()}
    found = lsim.prompts.prediction_grid(tiny_bert(), one)
    alone = lsim.prompts.prediction_grid(tiny_bert(), one["input_ids"])
    assert not torch.equal(found.values, alone.values)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_segments_of_zero_alone_are_what_the_model_takes_without_them():
    data = pairs()
    data["token_type_ids"].zero_()
    model = tiny_bert()
    assert measured(model, data) == measured(model, {"input_ids": data["input_ids"]})
    ragged = [
        {"input_ids": row[:n].tolist(), "token_type_ids": [0] * n} for n, row in zip((5, 9), data["input_ids"], strict=False)
    ]
    assert lsim.analyze(model, ragged, "cosine")["cosine"].provenance.tokens == 14


def test_segments_of_zero_are_no_absence_in_gpt2():
    """GPT-2 adds the embedding of token 0 for segment 0, and none where there are no segments."""
    tokens, model = random_tokens(2), tiny_gpt2()
    data = {"input_ids": tokens, "token_type_ids": torch.zeros_like(tokens)}
    expected = first_to_last(model, model.transformer.h, **data)
    assert measured(model, data) == pytest.approx(expected, abs=1e-6)
    assert measured(model, tokens) != pytest.approx(expected, abs=1e-4)


def test_positions_reach_the_model():
    tokens, model = random_tokens(2), tiny_gpt2()
    data = {"input_ids": tokens, "position_ids": torch.arange(20).expand(2, -1) + 3}
    expected = first_to_last(model, model.transformer.h, **data)
    assert measured(model, data) == pytest.approx(expected, abs=1e-6)
    assert measured(model, data | {"position_ids": data["position_ids"][:1]}) == pytest.approx(expected, abs=1e-6)
    assert measured(model, tokens) != pytest.approx(expected, abs=1e-4)


def test_columns_that_no_forward_takes_are_named_once(caplog):
    data = datasets.Dataset.from_dict({"input_ids": random_tokens(3).tolist(), "id": [1, 2, 3], "story": ["a", "b", "c"]})
    with caplog.at_level(logging.WARNING):
        assert lsim.analyze(tiny_llama(), data, "cosine")["cosine"].provenance.tokens == 60
    assert [record.getMessage() for record in caplog.records] == ["Columns of the data that are not read: id, story"]


def test_labels_are_no_inputs():
    data = {"input_ids": random_tokens(3), "labels": random_tokens(3)}
    assert lsim.analyze(tiny_bert(), data, "cosine")["cosine"].provenance.tokens == 60


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_what_an_earlier_tokenisation_left_beside_a_text_is_not_an_input():
    tokenizer = tiny_tokenizer()
    data = [{"text": "w3 w4", "input_ids": [3, 4], "token_type_ids": [0, 1], "attention_mask": [1, 1]}]
    found = lsim.analyze(tiny_bert(), lsim.Data(data * 2, column="text", tokenizer=tokenizer), "cosine")
    assert found["cosine"].provenance.tokens == 6
    without = lsim.analyze(tiny_bert(), lsim.Data(["w3 w4"] * 2, tokenizer=tokenizer), "cosine")
    assert found["cosine"].provenance.data == without["cosine"].provenance.data
    tokens = lsim.analyze(tiny_bert(), data, lsim.Cosine(center="none"))["cosine"]
    assert tokens.provenance.tokens == 2


def test_what_runs_under_attach_gives_the_same_numbers():
    model, data = tiny_bert(), pairs()
    with lsim.attach(model, lsim.Cosine(center="none")) as probe, torch.no_grad():
        model(**data)
    assert float(probe.results()["cosine"].values[0, -1]) == pytest.approx(measured(model, data), abs=1e-6)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_bridge_takes_what_its_hugging_face_model_takes():
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    data = {"input_ids": random_tokens(2), "position_ids": torch.arange(20).expand(2, -1) + 3}
    expected = measured(tiny_gpt2(), data)
    hf = tiny_gpt2()
    bridge = build_bridge_from_module(hf, "GPT2LMHeadModel", hf_config=hf.config)
    assert measured(bridge, data) == pytest.approx(expected, abs=1e-6)


@pytest.mark.filterwarnings("ignore:The vocabularies")
def test_a_stitched_model_refuses_what_its_front_does_not_take():
    joined = lsim.stitch(tiny_llama(), tiny_gpt2(), random_tokens(6), at=(0, 0), adapter="identity").model
    tokens = random_tokens(2)
    with pytest.raises(lsim.LayersimError, match=r"`token_type_ids` .*front.*LlamaForCausalLM"):
        lsim.analyze(joined, {"input_ids": tokens, "token_type_ids": torch.ones_like(tokens)}, "cosine")
