"""Data with a column that the model's forward takes and that the reader does not pass on is refused, wherever data is read."""

from __future__ import annotations

import datasets
import pytest
import torch

import tl_layersim as lsim

from ..tiny_models import random_tokens, tiny_gpt2, tiny_llama, tiny_tokenizer

STEP = lsim.AlignedTraining(steps=1, warmup=0)


def tiny_bert(labels: int = 0):
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 100}
    config = BertConfig(**small, max_position_embeddings=64, **({"num_labels": labels} if labels else {}))
    return (BertForSequenceClassification if labels else BertForMaskedLM)(config).eval()


def pairs(rows: int = 6) -> dict[str, torch.Tensor]:
    segments = torch.zeros(rows, 20, dtype=torch.long)
    segments[:, 9:] = 1
    tokens = random_tokens(rows)
    return {"input_ids": tokens, "token_type_ids": segments, "attention_mask": torch.ones_like(tokens)}


def refused(name: str):
    return pytest.raises(
        lsim.LayersimError, match=rf"^`{name}` in the data is an input of (.|\n)*tl_layersim does not pass on(.|\n)*attach"
    )


CALLS = {
    "analyze": lambda data: lsim.analyze(tiny_bert(), data, lsim.Cosine()),
    "compare": lambda data: lsim.compare(tiny_bert(), tiny_bert(), data, lsim.CKA()),
    "compare, where one takes it": lambda data: lsim.compare(tiny_llama(), tiny_bert(), data, lsim.CKA()),
    "stitch": lambda data: lsim.stitch(tiny_bert(3), tiny_bert(3), data | {"label": [0, 1, 2] * 2}, at=(1, 1)),
    "finetune_aligned": lambda data: lsim.finetune_aligned(tiny_bert(3), data | {"label": [0, 1, 2] * 2}, STEP),
    "evaluate_layers": lambda data: lsim.evaluate_layers(tiny_bert(3), tiny_bert(3), data | {"label": [0, 1, 2] * 2}),
    "frequent_tokens": lambda data: lsim.frequent_tokens(tiny_bert(), data, 5),
    "prediction_grid": lambda data: lsim.prediction_grid(tiny_bert(), {k: v[:1] for k, v in data.items()}),
}


@pytest.mark.filterwarnings("ignore:The vocabularies", "ignore:BertForMaskedLM was trained")
@pytest.mark.parametrize("call", CALLS)
def test_the_second_sentence_of_a_pair_is_not_dropped(call):
    with refused("token_type_ids"):
        CALLS[call](pairs())


def test_examples_and_data_sets_with_a_second_sentence_are_refused_too():
    plain = {name: value.tolist() for name, value in pairs().items()}
    rows = [dict(zip(plain, values, strict=True)) for values in zip(*plain.values(), strict=True)]
    for data in (rows, datasets.Dataset.from_dict(plain), datasets.Dataset.from_dict(plain).with_format("torch"), [pairs()]):
        with refused("token_type_ids"):
            lsim.analyze(tiny_bert(), data, lsim.Cosine())


def test_segments_of_zero_alone_are_what_the_model_takes_without_them():
    data = pairs()
    data["token_type_ids"].zero_()
    seen = []
    model = tiny_bert()
    model.bert.encoder.layer[2].register_forward_hook(lambda _m, _a, out: seen.append(out))
    with torch.no_grad():
        model(**data)
    lsim.analyze(model, data, lsim.Cosine(center="none"), batch_size=6)
    assert torch.equal(seen[0], seen[1])
    ragged = [
        {"input_ids": row[:n].tolist(), "token_type_ids": [0] * n} for n, row in zip((5, 9), data["input_ids"], strict=False)
    ]
    assert lsim.analyze(model, ragged, "cosine")["cosine"].provenance.tokens == 14


def test_segments_of_zero_are_no_absence_in_gpt2():
    """GPT-2 adds the embedding of token 0 for segment 0, and none where there are no segments."""
    tokens = random_tokens(2)
    with refused("token_type_ids"):
        lsim.analyze(tiny_gpt2(), {"input_ids": tokens, "token_type_ids": torch.zeros_like(tokens)}, "cosine")


@pytest.mark.parametrize("name", ["position_ids", "inputs_embeds"])
def test_positions_and_embeddings_are_not_dropped(name):
    more = {"position_ids": torch.arange(20).expand(2, -1) + 3, "inputs_embeds": torch.randn(2, 20, 32)}
    with refused(name):
        lsim.analyze(tiny_llama(), {"input_ids": random_tokens(2), name: more[name]}, "cosine")


def test_images_beside_texts_are_not_dropped():
    """A vision-language model takes both."""
    from tl_layersim.data.batches import Batches
    from tl_layersim.data.options import DataOptions
    from tl_layersim.models.model_info import Model

    model = Model("m", "0", "0", "s", "b", "f", ("a", "b"), 8, 100, 64, tiny_tokenizer(), inputs={"pixel_values": None})
    with refused("pixel_values"):
        list(Batches([{"text": "w3 w4", "pixel_values": torch.ones(3, 4, 4)}], model, DataOptions(batch_size=2)))


def test_columns_that_no_forward_takes_are_let_through():
    data = datasets.Dataset.from_dict({"input_ids": random_tokens(3).tolist(), "id": [1, 2, 3], "story": ["a", "b", "c"]})
    assert lsim.analyze(tiny_llama(), data, "cosine")["cosine"].provenance.tokens == 60


def test_labels_and_answers_are_no_inputs():
    data = {"input_ids": random_tokens(3), "labels": random_tokens(3), "start_positions": torch.tensor([1, 2, 3])}
    assert lsim.analyze(tiny_bert(), data, "cosine")["cosine"].provenance.tokens == 60


def test_what_an_earlier_tokenisation_left_beside_a_text_is_not_an_input():
    tokenizer = tiny_tokenizer()
    data = [{"text": "w3 w4", "input_ids": [3, 4], "token_type_ids": [0, 1], "attention_mask": [1, 1]}]
    found = lsim.analyze(tiny_bert(), data * 2, "cosine", column="text", tokenizer=tokenizer)
    assert found["cosine"].provenance.tokens == 6
    with refused("token_type_ids"):
        lsim.analyze(tiny_bert(), data, "cosine")


def test_what_runs_under_attach_gets_every_input():
    """The way that the refusal names gives the numbers of the pair."""
    model, data, seen = tiny_bert(), pairs(), []
    model.bert.encoder.layer[2].register_forward_hook(lambda _m, _a, out: seen.append(out.double()))
    with lsim.attach(model, lsim.Cosine(center="none")) as probe, torch.no_grad():
        model.bert.embeddings.register_forward_hook(lambda _m, _a, out: seen.append(out.double()))
        model(**data)
    expected = torch.nn.functional.cosine_similarity(seen[0], seen[1], dim=-1).mean()
    assert float(probe.results()["cosine"].values[0, -1]) == pytest.approx(float(expected), abs=1e-6)


def test_images_with_further_inputs_are_not_trained_on():
    from transformers import ViTConfig, ViTForImageClassification

    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    vit = ViTForImageClassification(ViTConfig(**small, image_size=8, patch_size=4, num_labels=3))
    data = {"pixel_values": torch.randn(6, 3, 8, 8), "labels": torch.tensor([0, 1, 2] * 2), "bool_masked_pos": torch.ones(6, 4)}
    with refused("bool_masked_pos"):
        lsim.finetune_aligned(vit, data, STEP)
    with refused("pixel_values"):
        lsim.analyze(vit, data, "cosine")


def test_a_bridge_takes_what_its_hugging_face_model_takes():
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    hf = tiny_llama()
    bridge = build_bridge_from_module(hf, "LlamaForCausalLM", hf_config=hf.config)
    tokens = random_tokens(2)
    with refused("position_ids"):
        lsim.analyze(bridge, {"input_ids": tokens, "position_ids": torch.arange(20).expand(2, -1)}, "cosine")


def test_a_stitched_model_takes_what_either_half_takes():
    joined = lsim.stitch(tiny_llama(), tiny_gpt2(), random_tokens(6), at=(1, 1), adapter="identity").model
    tokens = random_tokens(2)
    with refused("token_type_ids"):
        lsim.analyze(joined, {"input_ids": tokens, "token_type_ids": torch.zeros_like(tokens)}, "cosine")
