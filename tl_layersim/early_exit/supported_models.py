"""The models that early exit supports: Hugging Face language models and classifiers in this process, on one device."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ..architectures.blocks import encoder_and_decoder
from ..architectures.output_heads import CLASSES_WITH_HEAD
from ..architectures.transformer_lens import is_transformer_lens
from ..architectures.unembed import Unembed
from ..core.errors import LayersimError
from ..remote.open import open_source
from ..sources.checks import need_stream
from ..sources.hooked import HookedSource
from ..sources.inputs import no_cache
from ..sources.open import OpenedModel, is_nnsight
from ..sources.split_model import LocalSplitModel


def open_for_early_exit(model: Any, either_stack: bool = False) -> tuple[LocalSplitModel, Unembed]:
    """The blocks of a model, as a split model, and its final norm and head.

    Args:
        model: the model, or an `OpenedModel`.
        either_stack: whether the decoder of an encoder-decoder is taken, too.

    Raises:
        LayersimError: early exit does not support the model.
    """
    opened = OpenedModel.of(model)
    model = opened.model
    bare = isinstance(model, torch.nn.Module) and not hasattr(model, "config") and not hasattr(model, "open_source")
    # The blocks of nnsight and of TransformerLens do not use the cache of transformers.
    if bare or is_nnsight(model) or is_transformer_lens(model):
        raise not_hugging_face(model)
    source = open_source(opened, either_stack=either_stack)
    if type(source) is not HookedSource:
        raise not_hugging_face(model)
    need_stream(source.model, "Early exit")
    split_model = LocalSplitModel(source, source.model)
    if split_model.source.unembed is None:
        raise LayersimError(
            f"{source.model.name} has no known head, so its layers give no logits. Load it by "
            f"{CLASSES_WITH_HEAD}, or open_model(model, unembed=[final norm, head])."
        )
    devices = {str(p.device) for p in model.parameters()}
    if len(devices) > 1 or "meta" in devices:
        raise LayersimError(
            f"`model` has weights on {', '.join(sorted(devices))}; they must be on one device. Load it without device_map=."
        )
    if source.model.stream == "unknown":
        with split_model.evaluating(), torch.no_grad(), source.settling():
            split_model.module(**synthetic_inputs(split_model, 1, 6), **no_cache(split_model.module))
        need_stream(source.model, "Early exit")
    return split_model, split_model.source.unembed


def not_hugging_face(model: Any) -> LayersimError:
    """The error for a model of another library, or one without a configuration."""
    return LayersimError(
        f"`model` is of type {type(model).__name__}; it must be a Hugging Face model in this process, such as that of "
        "AutoModelForCausalLM.from_pretrained(name). ExitCurve measures exits of any model."
    )


def not_reached(split_model: LocalSplitModel, block: int) -> LayersimError:
    """The error for a forward pass that ended before a block, counted from 1."""
    return LayersimError(
        f"The forward pass of {split_model.model.name} did not reach block {block - 1}: each block must run once, in order, as "
        "a module that is not compiled. open_model(model, layers=[...]) names the blocks."
    )


def takes_cache(split_model: LocalSplitModel) -> bool:
    """Whether the model's forward takes keys and values of earlier tokens."""
    return "past_key_values" in inspect.signature(type(split_model.module).forward).parameters


def reads_pixels(split_model: LocalSplitModel) -> bool:
    """Whether the model reads images."""
    return getattr(split_model.module, "main_input_name", "input_ids") == "pixel_values"


def synthetic_inputs(split_model: LocalSplitModel, rows: int, length: int) -> dict[str, Tensor]:
    """Random inputs, the same at each call: token ids `row pos`, or images `row channel height width`.

    Raises:
        LayersimError: the model reads images whose size its configuration does not contain.
    """
    generator = torch.Generator().manual_seed(0)
    config = split_model.module.config
    if not reads_pixels(split_model):
        vocabulary = split_model.model.vocabulary or 2
        ids = torch.randint(0, vocabulary, (rows, length), generator=generator)
        pad = getattr(config, "pad_token_id", None)
        # Classifiers take the first padding token as the end of a row.
        ids = torch.where(ids == pad, (ids + 1) % vocabulary, ids) if isinstance(pad, int) else ids
        ids = ids.to(split_model.device)
        # The decoder of an encoder-decoder has tokens of its own.
        return {"input_ids": ids} | ({"decoder_input_ids": ids} if encoder_and_decoder(split_model.module) else {})
    config = getattr(config, "vision_config", config)
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if not isinstance(channels, int) or not isinstance(size, int | list | tuple):
        raise LayersimError(
            f"`model` reads images of unknown size: image_size={size} and num_channels={channels} in its configuration."
        )
    height, width = (size, size) if isinstance(size, int) else size
    pixels = torch.randn(rows, channels, height, width, generator=generator)
    return {"pixel_values": pixels.to(device=split_model.device, dtype=next(split_model.module.parameters()).dtype)}
