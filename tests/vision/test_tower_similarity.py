"""`tower_similarity` against the models' own features after every block, and the pairs that it refuses."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as hf

import tl_layersim as lsim
from tl_layersim.vision import tower_similarity

from ..models.clip_models import KINDS, clip_of, features, pairs
from ..oracles.cka import oracle_cka


def oracle(model, data, layers=(5, 4)) -> dict[str, np.ndarray]:
    """Equation 23 and its means, pair by pair."""
    vision = [features(model, "vision", data, blocks) for blocks in range(layers[0])]
    text = [features(model, "text", data, blocks) for blocks in range(layers[1])]
    rows = len(data["input_ids"])

    def cosine(a, b) -> float:
        return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))

    def over(xs, ys, chosen, reduce):
        return np.array([[reduce([cosine(x[i], y[j]) for i, j in chosen]) for y in ys] for x in xs])

    matched = [(i, i) for i in range(rows)]
    mismatched = [(i, j) for i in range(rows) for j in range(rows) if i != j]
    return {
        "values": over(vision, text, matched, np.mean),
        "std": over(vision, text, matched, np.std),
        "mismatched": over(vision, text, mismatched, np.mean) if mismatched else np.full(layers, np.nan),
        "vision": over(vision, vision, matched, np.mean),
        "text": over(text, text, matched, np.mean),
    }


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [9, 4])
def test_every_kind_of_model_equals_its_own_features_after_every_block(kind, batch_size):
    model = clip_of(kind)
    data = pairs()
    result = tower_similarity(model, lsim.Data(data, batch_size=batch_size))

    for name, expected in oracle(model, data).items():
        np.testing.assert_allclose(getattr(result, name).numpy(), expected, atol=1e-10, rtol=0, err_msg=name)
    assert result.layers == ("vision.blocks.0.hook_resid_pre", *(f"vision.blocks.{i}.hook_resid_post" for i in range(4)))
    assert result.text_layers == ("text.blocks.0.hook_resid_pre", *(f"text.blocks.{i}.hook_resid_post" for i in range(3)))
    assert (result.pairs, result.provenance.tokens) == (9, 9)
    torch.testing.assert_close(result.vision_to_last[1], result.values[:, -1])
    torch.testing.assert_close(result.text_to_last[2], result.mismatched[-1])


def test_the_last_layers_are_the_models_own_embeddings():
    model = clip_of()
    data = pairs()
    with torch.no_grad():
        output = model(**data)
    cosines = output.image_embeds @ output.text_embeds.T
    result = tower_similarity(model, data)

    torch.testing.assert_close(result.values[-1, -1], cosines.diagonal().mean())

    mismatched = (cosines.sum() - cosines.diagonal().sum()) / 72
    torch.testing.assert_close(result.mismatched[-1, -1], mismatched)


def test_cka_takes_residuals_of_unequal_width_before_the_norms():
    model = clip_of()
    data = pairs(24)
    with torch.no_grad():
        vision = model.vision_model(data["pixel_values"], output_hidden_states=True).hidden_states
        text = model.text_model(data["input_ids"], data["attention_mask"], output_hidden_states=True).hidden_states
    ends = (data["input_ids"] == 98).int().argmax(1)
    images = np.stack([layer[:, 0].numpy() for layer in vision[1:]])
    texts = np.stack([layer[torch.arange(24), ends].numpy() for layer in text])
    result = tower_similarity(model, lsim.Data(data, batch_size=24))
    expected = oracle_cka([images], [texts])["values"]

    np.testing.assert_allclose(result.cka[1:].numpy(), expected, atol=1e-8, rtol=0)
    assert result.cka.shape == (5, 4)
    assert bool(result.cka[0].isnan().all())


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_padding_and_the_order_of_batches_change_nothing():
    model = clip_of()
    data = pairs()
    whole = tower_similarity(model, data)
    rows = [{name: values[i] for name, values in data.items()} for i in reversed(range(9))]
    wider = {
        "input_ids": torch.nn.functional.pad(data["input_ids"], (0, 3)),
        "attention_mask": torch.nn.functional.pad(data["attention_mask"], (0, 3)),
        "pixel_values": data["pixel_values"],
    }

    for form in (rows, wider, [wider]):
        result = tower_similarity(model, lsim.Data(form, batch_size=4))
        for name in ("values", "std", "mismatched", "vision", "text"):
            torch.testing.assert_close(getattr(result, name), getattr(whole, name), atol=1e-12, rtol=0)


@pytest.mark.filterwarnings("ignore:`cka` is NaN")
def test_one_pair_has_no_other_pair_and_no_cka():
    model = clip_of()
    data = pairs(1)
    result = tower_similarity(model, data)

    np.testing.assert_allclose(result.values.numpy(), oracle(model, data)["values"], atol=1e-10)
    assert all(bool(undefined.isnan().all()) for undefined in (result.mismatched, result.cka))
    assert bool((result.std == 0).all())
    assert math.isnan(result.headline()["the same with the texts of other pairs"])


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_batches_of_one_pair_are_one_pool():
    batched, whole = (tower_similarity(clip_of(), lsim.Data(pairs(), batch_size=size)) for size in (1, 9))
    torch.testing.assert_close(batched.values, whole.values, atol=1e-12, rtol=0)
    torch.testing.assert_close(batched.cka, whole.cka, atol=1e-12, rtol=0, equal_nan=True)
    assert bool(batched.cka[1:].isfinite().all())


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lower_precision_is_near_float64(dtype):
    model = copy.deepcopy(clip_of()).to(dtype)
    result = tower_similarity(model, pairs())
    exact = tower_similarity(clip_of(), pairs())
    assert result.values.dtype == torch.float64
    torch.testing.assert_close(result.values, exact.values, atol=3e-2 if dtype == torch.bfloat16 else 1e-5, rtol=0)


def test_the_norm_may_come_after_the_projection_as_equation_23_is_printed():
    model = clip_of()
    data = pairs()
    with torch.no_grad():
        images = model.vision_model(data["pixel_values"], output_hidden_states=True).hidden_states
        texts = model.text_model(data["input_ids"], data["attention_mask"], output_hidden_states=True).hidden_states
        ends = (data["input_ids"] == 98).int().argmax(1)
        v = [model.visual_projection(layer[:, 0]) for layer in images]
        t = [model.text_projection(layer[torch.arange(9), ends]) for layer in texts]
    normed = [[torch.nn.functional.layer_norm(x, x.shape[-1:], eps=0) for x in side] for side in (v, t)]
    result = tower_similarity(model, data, norm="after")
    expected = [[torch.nn.functional.cosine_similarity(a, b).mean() for b in normed[1]] for a in normed[0]]

    np.testing.assert_allclose(result.values.numpy(), np.array(expected), atol=1e-10)
    assert result.provenance.options["norm"] == "after"


def test_a_model_that_projects_in_another_way_is_refused():
    class Own(hf.CLIPModel):
        def forward(self, **inputs):
            output = super().forward(**inputs)
            output.image_embeds = output.image_embeds.flip(-1)
            return output

    model = copy.deepcopy(clip_of())
    model.__class__ = Own
    with pytest.raises(lsim.LayersimError, match="`image_embeds`"):
        tower_similarity(model, pairs())


DATA = pairs()
TOKENS = DATA["input_ids"]
MASK = DATA["attention_mask"]
PIXELS = DATA["pixel_values"]
BAD = {
    "texts alone": ({"input_ids": TOKENS, "attention_mask": MASK}, "texts without images"),
    "tokens alone": (torch.full((9, 4), 98), "texts without images"),
    "images alone": (PIXELS, "`data`.*`input_ids`"),
    "images in a mapping": ({"pixel_values": PIXELS}, "`data`.*pixel_values"),
    "another size": ({**DATA, "pixel_values": PIXELS[..., :4]}, r"CLIPVisionModel.*pixel_values"),
    "fewer images": ({**DATA, "pixel_values": PIXELS[:3]}, r"`pixel_values`.*\(3, 3, 8, 8\).* 9\b"),
    "no end of text": ({**DATA, "input_ids": TOKENS.masked_fill(TOKENS == 98, 5)}, r"`data`.* 7 .* 98\b"),
    "too long": (
        {
            "input_ids": torch.cat([TOKENS, TOKENS, TOKENS], 1),
            "pixel_values": PIXELS,
            "attention_mask": torch.cat([MASK] * 3, 1),
        },
        r"`data`.* 27 .*\b24\b",
    ),
    "whole numbers": ({**DATA, "pixel_values": (PIXELS * 9).long()}, "must be floating-point"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_pairs_are_refused(case):
    data, message = BAD[case]
    with pytest.raises(lsim.LayersimError, match=message):
        tower_similarity(clip_of(), data)


def test_other_models_are_refused():
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    siglip = hf.SiglipModel(
        hf.SiglipConfig(text_config=small | {"vocab_size": 99}, vision_config=small | {"image_size": 8, "patch_size": 4})
    )

    with pytest.raises(lsim.LayersimError, match=r"`clip`.*SiglipModel.*CLIPModel"):
        tower_similarity(siglip, pairs())
    for model in (clip_of().vision_model, lsim.demo_model(), "openai/clip-vit-base-patch32"):
        with pytest.raises(lsim.LayersimError, match=r"`clip` is .*CLIPModel, "):
            tower_similarity(model, pairs())


def test_texts_that_are_all_equal_have_cosines_and_no_cka_before_rounding():
    data = pairs()
    equal_texts = {name: data[name][:1].expand(9, -1) for name in ("input_ids", "attention_mask")}
    result = tower_similarity(clip_of(), {**data, **equal_texts})
    assert bool(result.cka[:, 0].isnan().all())

    # A column without a value is left out of the figure. The other columns hold rounding, or nothing on some machines.
    without_rounding = replace(result, cka=result.cka.nan_to_num(0.5).index_fill(1, torch.tensor(0), math.nan))
    np.testing.assert_array_equal(without_rounding.plot("cka").data[0].z, without_rounding.cka[:, 1:])
    assert result.plot().layout.title.subtitle.text.endswith(" · 9 pairs")
    assert result.plot("vision").layout.title.subtitle.text.endswith(" · 9 images")
    assert result.plot("text").layout.title.subtitle.text.endswith(" · 9 texts")

    curves = result.plot("text_to_last")
    assert curves.layout.title.text == "Cosine of text layers to the last layers"
    assert curves.data[-1].name == "other tower, mismatched pairs"
    torch.testing.assert_close(result.mismatched, result.values, atol=1e-12, rtol=0)


def test_a_zero_projection_has_no_cosine():
    model = copy.deepcopy(clip_of())
    torch.nn.init.zeros_(model.text_projection.weight)
    with pytest.raises(lsim.LayersimError, match="vectors of the text tower are zero"):
        tower_similarity(model, pairs())


@pytest.mark.heavy("draws every figure")
def test_the_model_is_not_changed_and_the_result_survives_a_file(tmp_path):
    model = copy.deepcopy(clip_of()).train()
    data = pairs()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]
    result = tower_similarity(model, data, checkpoint=tmp_path / "run")

    assert all(module.training for module in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert hooks == [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]

    again = lsim.load(result.save(tmp_path / "towers.safetensors"))
    for name, axes in result.tensor_fields().items():
        assert torch.equal(getattr(again, name).nan_to_num(7), getattr(result, name).nan_to_num(7))
        assert result.plot(name).data, axes

    frame = result.to_frame()
    assert list(frame.columns[:3]) == ["vision_layer", "text_layer", "values"]
    page = lsim.Report({"towers": result}).to_html(tmp_path / "page.html").read_text()
    assert "After block of the vision tower" in page


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_images_and_texts_are_read_through_the_processor():
    datasets = pytest.importorskip("datasets")
    from ..models.clip_processor import image, processor, small_clip

    clip_processor = processor()
    model = small_clip(clip_processor)
    texts = ["a cat.", "a dog here.", "two birds.", "a.", "frog.", "a red cat."]
    images = [image(seed) for seed in range(6)]
    rows = datasets.Dataset.from_dict({"image": images, "text": texts})
    inputs = clip_processor(images=images, text=texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        output = model(**inputs)
    result = tower_similarity(model, lsim.Data(rows, tokenizer=clip_processor, batch_size=4))
    expected = (output.image_embeds * output.text_embeds).sum(-1).mean().double()
    torch.testing.assert_close(result.values[-1, -1], expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        result.values, tower_similarity(model, lsim.Data(dict(inputs), batch_size=4)).values, atol=1e-6, rtol=0
    )
    with pytest.raises(lsim.LayersimError, match=r"end-of-text token(.|\n)*truncation=True"):
        tower_similarity(model, lsim.Data({"image": images, "text": ["a cat " * 20] * 6}, tokenizer=clip_processor))


@pytest.mark.parametrize("batch_size", [9, 4])
def test_texts_that_are_padded_on_the_left_are_read_without_padding(batch_size):
    model = clip_of()
    data = pairs()
    ids = data["input_ids"]
    mask = data["attention_mask"].bool()
    left_ids = torch.full_like(ids, 1)
    left_mask = torch.zeros_like(mask)
    for row, row_ids in enumerate(ids):
        length = int(mask[row].sum())
        left_ids[row, len(row_ids) - length :] = row_ids[mask[row]]
        left_mask[row, len(row_ids) - length :] = True

    assert not bool(left_mask[:, 0].all())

    moved = {**data, "input_ids": left_ids, "attention_mask": left_mask.long()}
    expected, result = (tower_similarity(model, lsim.Data(padded, batch_size=batch_size)) for padded in (data, moved))
    torch.testing.assert_close(result.values, expected.values)
    torch.testing.assert_close(result.text, expected.text)
