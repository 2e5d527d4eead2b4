"""What can leave early: language models and classifiers of this process, as Hugging Face wrote them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..models.hooked import HookedSource
from ..models.hooks import on_leave
from ..models.layout import classes_with_head
from ..models.split_model import LocalSplitModel
from ..models.transformer_lens import is_transformer_lens
from ..models.unembed import Unembed
from ..models.validation import need_stream
from ..remote.open import open_source


def opened(model: Any, layers: list[str] | None, unembed: list[str] | None) -> tuple[LocalSplitModel, Unembed]:
    """A model's blocks and its lens.

    Raises:
        LayersimError: its layers cannot be left out here.
    """
    if any(cls.__module__.split(".")[0] == "nnsight" for cls in type(model).__mro__):
        raise LayersimError(
            "Early exit runs a model's own modules, and nnsight's handles are none.",
            given=type(model).__name__,
            expected="the Hugging Face model inside it, in this process",
            do="EarlyExit(AutoModelForCausalLM.from_pretrained(name)): the same weights; a model on a server cannot exit early",
        )
    if is_transformer_lens(model):
        raise LayersimError(
            "TransformerLens's models keep their own caches of keys and values.",
            given=type(model).__name__,
            expected="a Hugging Face model",
            do="EarlyExit(AutoModelForCausalLM.from_pretrained(name)): the same weights",
        )
    source = open_source(model, layers=layers, unembed=unembed)
    if type(source) is not HookedSource:
        raise LayersimError(
            "Early exit runs a model's own blocks, one after the other.",
            given=type(model).__name__,
            expected="a Hugging Face model, in this process",
            do="EarlyExit of the model itself",
        )
    need_stream(source.model, "Early exit")
    half = LocalSplitModel(source, source.model)
    if half.source.unembed is None:
        raise LayersimError(
            "This model has no head that is known, so no layer can say anything.",
            given=type(model).__name__,
            expected="a model with logits",
            do=f"load it by {classes_with_head(type(model).__name__)}; or unembed=[paths of the final norm and the head]",
        )
    places = {str(p.device) for p in model.parameters()}
    if len(places) > 1 or "meta" in places:
        raise LayersimError(
            "Early exit needs a model in one place.",
            given=f"weights on {', '.join(sorted(places))}",
            expected="one device",
            do="model.to('cuda'), or load it without device_map=",
        )
    if source.model.stream == "unknown":
        with half.evaluating(), torch.no_grad(), source.settling():
            half.module(**synthetic(half, 1, 6), **no_cache(half))
        need_stream(source.model, "Early exit")
    return half, half.source.unembed


def takes_cache(half: LocalSplitModel) -> bool:
    """Whether the model's forward takes keys and values of tokens that ran before."""
    return "past_key_values" in inspect.signature(type(half.module).forward).parameters


def no_cache(half: LocalSplitModel) -> dict[str, bool]:
    """What keeps the model from filling a cache of its own."""
    return {"use_cache": False} if hasattr(getattr(half.module, "config", None), "use_cache") else {}


def reads_pixels(half: LocalSplitModel) -> bool:
    """Whether the model reads images."""
    return getattr(half.module, "main_input_name", "input_ids") == "pixel_values"


def synthetic(half: LocalSplitModel, rows: int, length: int) -> dict[str, Tensor]:
    """Something the model can read, the same at each call: token ids `row pos`, or images `row channel height width`.

    Raises:
        LayersimError: it reads images of a size that its configuration does not say.
    """
    generator = torch.Generator().manual_seed(0)
    config = half.module.config
    if not reads_pixels(half):
        ids = torch.randint(0, half.model.vocabulary or 2, (rows, length), generator=generator)
        pad = getattr(config, "pad_token_id", None)
        # A classifier takes padding tokens for the end of a row.
        ids = torch.where(ids == pad, (ids + 1) % (half.model.vocabulary or 2), ids) if isinstance(pad, int) else ids
        return {"input_ids": ids.to(half.device)}
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if not isinstance(channels, int) or not isinstance(size, int | list | tuple):
        raise LayersimError(
            "What this model reads is not known.",
            given=f"image_size={size}, num_channels={channels} in its configuration",
            expected="both, or a model of tokens",
            do="set them in model.config",
        )
    height, width = (size, size) if isinstance(size, int) else size
    pixels = torch.randn(rows, channels, height, width, generator=generator)
    return {"pixel_values": pixels.to(device=half.device, dtype=next(half.module.parameters()).dtype)}


def note_tuples(half: LocalSplitModel) -> None:
    """Find out once what each block gives, also of a model that reads no tokens."""
    if not reads_pixels(half):
        half.tuples()
        return
    found: list[int] = []
    handles = [
        on_leave(block, lambda _m, _a, out: found.append(len(out) if isinstance(out, tuple) else 0)) for block in half.blocks
    ]
    try:
        with torch.no_grad():
            half.module(**synthetic(half, 1, 1))
    finally:
        for handle in handles:
            handle.remove()
    half._tuples = found
