"""Images of several rows in one table, beside the hidden states of a plain forward pass over the same inputs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

import tl_layersim as lsim

IMAGE, VIDEO = 110, 111
# Frames, rows and columns of patches of the images in each row; four patches are one token.
GRIDS = ([(1, 4, 8), (1, 4, 4)], [(1, 4, 4)], [])
FURTHER_TOKENS = (4, 6, 9)
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 120}


@lru_cache
def qwen() -> Qwen2VLForConditionalGeneration:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    text = {**TEXT, "num_key_value_heads": 2, "rope_parameters": rope, "max_position_embeddings": 256}
    vision = {"embed_dim": 16, "hidden_size": 32, "depth": 2, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 112, "vision_end_token_id": 113}
    special = {"bos_token_id": 1, "eos_token_id": 2}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text | special, vision_config=vision, **tokens)).eval()


@lru_cache
def llava() -> LlavaForConditionalGeneration:
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = LlamaConfig(**TEXT)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-1)
    return LlavaForConditionalGeneration(config).eval()


def padded_rows(tokens_of_images: list[list[int]]) -> dict[str, torch.Tensor]:
    """Rows of the tokens of their images and further tokens, with a mask."""
    rows = []
    for sizes, count in zip(tokens_of_images, FURTHER_TOKENS, strict=True):
        ids = [5]
        for size in sizes:
            ids += [112, *[IMAGE] * size, 113]
        rows.append(torch.tensor([*ids, *range(10, 10 + count)]))
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": tokens, "attention_mask": mask}


def qwen_inputs() -> dict[str, torch.Tensor]:
    grids = torch.tensor([grid for row in GRIDS for grid in row])
    rows = padded_rows([[frames * height * width // 4 for frames, height, width in row] for row in GRIDS])
    # Two frames of 4 x 4 pixels in three colours.
    pixels = torch.randn(int(grids.prod(1).sum()), 96, generator=torch.Generator().manual_seed(1))
    kinds = (rows["input_ids"] == IMAGE).long()
    return {**rows, "pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": kinds}


def llava_inputs() -> dict[str, torch.Tensor]:
    pixels = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return {**padded_rows([[4] * len(row) for row in GRIDS]), "pixel_values": pixels}


CASES = {"grids of patches": (qwen, qwen_inputs), "images of one size": (llava, llava_inputs)}


def cosine_to_block(model: Any, inputs: dict[str, torch.Tensor], counted: torch.Tensor) -> float:
    """Mean cosine of the embedding and the residual after two blocks, from a plain forward pass."""
    with torch.no_grad():
        hidden = model(**inputs, output_hidden_states=True).hidden_states
    first, last = hidden[0][counted].double(), hidden[2][counted].double()
    return float(torch.cosine_similarity(first, last, dim=-1).mean())


def measured(model: Any, data: Any, **options: Any) -> Any:
    return lsim.analyze(model, lsim.Data(data, **options), lsim.Cosine(center="none"))["cosine"]


@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize("case", CASES)
def test_rows_have_their_own_images(case, batch_size):
    build, make = CASES[case]
    model, inputs = build(), make()
    found = measured(model, inputs, batch_size=batch_size)
    right = cosine_to_block(model, inputs, inputs["attention_mask"].bool())
    assert found.values[0, 2].item() == pytest.approx(right, abs=1e-6)
    assert found.provenance.tokens == int(inputs["attention_mask"].sum())


def test_the_order_of_batches_does_not_change_the_rows():
    inputs = qwen_inputs()
    assert len({measured(qwen(), inputs, batch_size=size).provenance.data for size in (1, 2, 8)}) == 1


@pytest.mark.parametrize("positions", ["image", "text"])
def test_positions_of_images_and_of_text(positions):
    inputs = qwen_inputs()
    of_images = inputs["input_ids"] == IMAGE
    counted = inputs["attention_mask"].bool() & (of_images if positions == "image" else ~of_images)
    found = measured(qwen(), inputs, positions=positions)
    assert found.provenance.tokens == int(counted.sum())
    assert found.values[0, 2].item() == pytest.approx(cosine_to_block(qwen(), inputs, counted), abs=1e-6)


def test_positions_of_images_need_image_tokens():
    with pytest.raises(lsim.LayersimError, match="`positions` is 'image'"):
        measured(lsim.demo_model(), torch.randint(3, 100, (4, 12)), positions="image")


@pytest.mark.parametrize(
    ("name", "value"),
    [("image_grid_thw", torch.tensor([[1, 4, 4], [1, 4, 4], [1, 4, 8]])), ("pixel_values", torch.randn(60, 96))],
)
def test_images_that_do_not_fit_their_rows_are_refused(name, value):
    with pytest.raises(lsim.LayersimError, match=name):
        measured(qwen(), qwen_inputs() | {name: value})


def test_images_of_unequal_numbers_of_tokens_are_refused():
    inputs = llava_inputs()
    with pytest.raises(lsim.LayersimError, match="`pixel_values`"):
        measured(llava(), inputs | {"pixel_values": torch.randn(5, 3, 8, 8)})


def test_image_tokens_without_images_are_named():
    inputs = qwen_inputs()
    without = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    with pytest.warns(lsim.LayersimWarning, match=r"16 image tokens .*`pixel_values`"):
        measured(qwen(), without)
