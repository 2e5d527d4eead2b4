"""`Anatomy`: what the modules of a model alone show, against paths that are written down."""

from __future__ import annotations

import pytest
import torch

from tl_layersim import LayersimError
from tl_layersim.architectures.blocks import anatomy_of, choose_blocks, choose_stacks

from ..models.clip_models import clip_of
from .site_cases import model_of


def stacks_by_name(model) -> dict[str, tuple[str, ...]]:
    return {stack.name: stack.blocks for stack in anatomy_of(model).stacks}


def test_a_decoder_has_one_stack_without_a_name():
    model = model_of("llama")
    anatomy = choose_blocks(model, anatomy_of(model), None)
    assert (anatomy.kind, anatomy.library, anatomy.stack) == ("one stack", "transformers", "")
    assert stacks_by_name(model) == {"": ("model.layers.0", "model.layers.1")}
    assert anatomy.blocks == ("model.layers.0", "model.layers.1")
    assert anatomy.config is model.config
    assert anatomy.embedding is model.model.embed_tokens
    assert (anatomy.post_norm, anatomy.has_convolution, anatomy.named) == (False, False, False)


def test_an_encoder_decoder_is_read_at_its_decoder():
    model = model_of("t5")
    anatomy = choose_blocks(model, anatomy_of(model), None)
    encoder = ("encoder.block.0", "encoder.block.1")
    decoder = ("decoder.block.0", "decoder.block.1")
    assert anatomy.kind == "encoder-decoder"
    assert stacks_by_name(model) == {"encoder": encoder, "decoder": decoder}
    assert (anatomy.blocks, anatomy.stack) == (decoder, "decoder")
    assert anatomy.stacks_with(["encoder.block.1.layer.0", "decoder.final_layer_norm"]) == ["encoder", "decoder"]
    assert anatomy.stack_of([*encoder, *decoder]) == ""
    assert anatomy.is_last_stack(decoder)
    assert not anatomy.is_last_stack(encoder)
    assert choose_stacks(model, anatomy, None).blocks == (*encoder, *decoder)


def test_stages_are_stacks_and_the_last_one_is_read():
    model = model_of("swin")
    anatomy = choose_blocks(model, anatomy_of(model), None)
    last = tuple(f"swin.encoder.layers.1.blocks.{number}" for number in range(2))
    assert anatomy.kind == "stages"
    assert list(stacks_by_name(model)) == ["stages.0", "stages.1"]
    assert (anatomy.blocks, anatomy.stack) == (last, "stages.1")
    assert anatomy.has_convolution


def test_towers_are_two_stacks_and_neither_is_read_by_default():
    clip = clip_of()
    anatomy = anatomy_of(clip)
    assert anatomy.kind == "towers"
    text = tuple(f"text_model.encoder.layers.{number}" for number in range(3))
    vision = tuple(f"vision_model.encoder.layers.{number}" for number in range(4))
    assert stacks_by_name(clip) == {"text": text, "vision": vision}
    with pytest.raises(LayersimError, match="CLIPModel"):
        choose_blocks(clip, anatomy, None)
    chosen = choose_blocks(clip, anatomy, text[1:])
    assert (chosen.blocks, chosen.named, chosen.stack) == (text[1:], True, "text")
    assert chosen.numbers(chosen.blocks) == [1, 2]
    assert chosen.config is clip.text_model.config


def test_blocks_of_bert_end_in_a_norm():
    model = model_of("bert")
    assert choose_blocks(model, anatomy_of(model), None).post_norm


def test_blocks_of_a_class_outside_the_table_are_unknown():
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
    anatomy = choose_blocks(model, anatomy_of(model), None)
    assert anatomy.library == "torch"
    assert anatomy.unknown_blocks == ("layers.0", "layers.1", "layers.2")
    assert (anatomy.config, anatomy.embedding) == (None, None)
    # Modules inside a block have no number among the blocks.
    model.layers[0] = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert choose_blocks(model, anatomy_of(model), ["layers.0.0"]).numbers(["layers.0.0"]) is None
