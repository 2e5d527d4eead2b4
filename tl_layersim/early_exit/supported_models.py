"""Checks that a model supports early exit, and that the logits of early exit are right.

Supported are Hugging Face language models and classifiers in this process, on one device. The checks run a few synthetic
tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..architectures.blocks import is_transformer_lens
from ..architectures.unembed import Unembed, rounding
from ..core.errors import LayersimError, excerpt
from ..core.wording import with_article
from ..data.batches import Batch
from ..data.input_names import PIXELS, TOKEN_IDS
from ..remote.open_model import open_source
from ..sources.activation_checks import need_stream
from ..sources.hooked_module import HookedSource
from ..sources.open_local import OpenedModel
from ..sources.out_of_memory import is_out_of_memory
from ..sources.partial_forward import LocalSplitModel, logits_of, no_known_head
from .exit_decisions import ExitCheck, ExitLens
from .segments import Decoding, FullSequence

# Tokens of the synthetic prompt, padding of its second row, and new tokens.
PROMPT = 5
PAD = 2
NEW = 6


def open_for_early_exit(model: Any, either_stack: bool = False) -> tuple[LocalSplitModel, Unembed]:
    """Split a model between its blocks for early exit. Returns the split model, and its final norm and head.

    Args:
        model: the model, or an `OpenedModel`.
        either_stack: whether the decoder of an encoder-decoder is taken, too.

    Raises:
        LayersimError: early exit does not support the model.
    """
    opened = OpenedModel.of(model)
    model = opened.model
    # The blocks of nnsight and of TransformerLens do not use the cache of transformers.
    source = None
    if not opened.on_server and not is_transformer_lens(model):
        source = open_source(opened, either_stack=either_stack)
    if type(source) is not HookedSource or not hasattr(model, "config"):
        raise not_hugging_face(model)
    need_stream(source.model, "Early exit")
    split_model = LocalSplitModel(source, source.model)
    if split_model.source.unembed is None:
        raise no_known_head(source.model)
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1 or "meta" in devices:
        raise LayersimError(
            f"`model` has weights on {', '.join(sorted(devices))}; all weights must be on one device. Load the model without "
            "device_map=."
        )
    with split_model.evaluating(), refusing_crashes(split_model):
        split_model.settle(_synthetic_row(split_model))
    need_stream(source.model, "Early exit")
    assert source.unembed is not None
    return split_model, source.unembed


def _synthetic_row(split_model: LocalSplitModel) -> Batch:
    """A row of synthetic inputs."""
    inputs = {name: values.cpu() for name, values in synthetic_inputs(split_model, 1, PROMPT + NEW).items()}
    if reads_pixels(split_model):
        no_tokens = torch.zeros(1, 1, dtype=torch.int64)
        counted = torch.ones(1, 1, dtype=torch.bool)
        return Batch(no_tokens, counted, counted, 0, inputs=inputs, has_tokens=False)
    tokens = inputs.pop(split_model.model.token_input)
    counted = torch.ones_like(tokens, dtype=torch.bool)
    return Batch(tokens, counted, counted, 0, inputs=inputs)


def not_hugging_face(model: Any) -> LayersimError:
    """The error for a model that is not a Hugging Face model."""
    return LayersimError(
        f"`model` is a {type(model).__name__}; it must be a Hugging Face model in this process. The analyzer ExitCurve "
        "measures the exits of other models."
    )


def reads_pixels(split_model: LocalSplitModel) -> bool:
    """Whether the model reads images."""
    return getattr(split_model.module, "main_input_name", TOKEN_IDS) == PIXELS


def synthetic_inputs(split_model: LocalSplitModel, rows: int, length: int) -> dict[str, Tensor]:
    """Random token ids (`row pos`) or images (`row channel height width`), the same at each call.

    Raises:
        LayersimError: the model reads images, and its configuration has no size.
    """
    model = split_model.module
    description = split_model.model
    generator = torch.Generator().manual_seed(0)
    config: Any = model.config
    main_input = getattr(model, "main_input_name", TOKEN_IDS)
    if main_input not in (TOKEN_IDS, PIXELS):
        raise LayersimError(
            f"`model` is {with_article(type(model).__name__)}, which takes `{main_input}`; it must take "
            "token ids or images. The analyzer ExitCurve measures the exits of other models."
        )
    if main_input == TOKEN_IDS:
        vocabulary = description.vocabulary or 2
        ids = torch.randint(0, vocabulary, (rows, length), generator=generator)
        pad = getattr(config, "pad_token_id", None)
        # Classifiers take the first padding token as the end of a row.
        if isinstance(pad, int):
            ids = torch.where(ids == pad, (ids + 1) % vocabulary, ids)
        ids = ids.to(split_model.device)
        inputs = {"input_ids": ids}
        # An encoder-decoder also needs tokens for its decoder.
        if split_model.source.anatomy.kind == "encoder-decoder":
            inputs["decoder_input_ids"] = ids
        return inputs
    config = getattr(config, "vision_config", config)
    size = getattr(config, "image_size", None)
    if size is None:
        raise LayersimError("`model` reads images of unknown size: its configuration has no image_size.")
    height, width = (size, size) if isinstance(size, int) else size
    pixels = torch.randn(rows, config.num_channels, height, width, generator=generator)
    dtype = next(model.parameters()).dtype
    return {"pixel_values": pixels.to(device=split_model.device, dtype=dtype)}


def is_causal(split_model: LocalSplitModel) -> bool:
    """Whether a residual does not depend on later tokens."""
    model = split_model.module
    description = split_model.model
    ids = synthetic_inputs(split_model, 1, 6)["input_ids"]
    ids_with_other_last = ids.clone()
    ids_with_other_last[0, -1] = (ids[0, -1] + 1) % max(2, description.vocabulary or 2)

    def last_residual(input_ids: Tensor) -> Tensor:
        return split_model.read(
            len(split_model.blocks), lambda: model(input_ids=input_ids, **split_model.source.anatomy.without_cache)
        )

    with torch.no_grad():
        residual = last_residual(ids)
        residual_with_other_last = last_residual(ids_with_other_last)
    return relative_gap(residual[0, :-1], residual_with_other_last[0, :-1]) < 1e-3


@contextmanager
def refusing_crashes(split_model: LocalSplitModel) -> Iterator[None]:
    """Turn an exception of the model into a `LayersimError`.

    Raises:
        LayersimError: the model raised an exception.
    """
    try:
        yield
    except LayersimError:
        raise
    # Models of other libraries raise errors of any class.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise LayersimError(
            f"{split_model.model.name} cannot run segment by segment: {type(error).__name__}: {excerpt(str(error), 240)}. "
            "Early exit needs blocks that share one residual stream, and attention that reads the given cache."
        ) from error


def check_decoding(split_model: LocalSplitModel, lens: ExitLens, ends: tuple[int, ...]) -> None:
    """Raise an error if decoding with early exit does not give the model's own logits.

    Two rows are decoded, one of them padded, with exits at all depths.

    Raises:
        LayersimError: the logits differ by more than rounding.
    """
    ids = synthetic_inputs(split_model, 2, PROMPT + NEW)["input_ids"]
    attended = torch.ones_like(ids, dtype=torch.bool)
    attended[1, :PAD] = False
    # Another depth at each step and in each row; all blocks at the last step.
    depths_by_step = []
    for step in range(NEW):
        depths_by_step.append([ends[step % len(ends)], ends[(step + 2) % len(ends)]])
    depths_by_step.append([ends[-1], ends[-1]])
    depths = torch.tensor(depths_by_step)
    check = ExitCheck(lens, depths[0])
    decoding = Decoding(split_model, ends, check, ids[:, :PROMPT], attended[:, :PROMPT], PROMPT + NEW)
    with decoding.hooked():
        for step in range(NEW + 1):
            if step:
                decoding.append(ids[:, PROMPT + step - 1])
            check.rule = depths[step]
            decoding.run()
    model = split_model.module
    without_cache = split_model.source.anatomy.without_cache
    for row in range(2):
        row_without_padding = ids[row : row + 1, PAD * row :]
        model_logits = logits_of(model(input_ids=row_without_padding, **without_cache))[0, -1]
        exit_logits = decoding.exited[row][0][0]
        _refuse_different(split_model, exit_logits, model_logits, "when generated tokens exit early")


def check_full_sequence(split_model: LocalSplitModel, lens: ExitLens, ends: tuple[int, ...], causal: bool) -> int:
    """Raise an error if a forward pass with early exit does not give the model's own logits.

    One row and most positions exit early.

    Returns:
        The number of outputs of the head.

    Raises:
        LayersimError: the logits differ by more than rounding.
    """
    model = split_model.module
    inputs = synthetic_inputs(split_model, 2, 6)
    positions = positions_read(split_model, lens.unembed.reads, inputs)
    reads_every = lens.unembed.reads == "every"
    layers = torch.full(positions.shape, ends[0])
    # The second row runs through all blocks, or its fourth position does.
    layers[1, 3 if reads_every else slice(None)] = ends[-1]
    passes = FullSequence(split_model, ends, ExitCheck(lens, layers.flatten()), inputs, positions, causal)
    passes.run()
    model_logits = logits_of(model(**inputs, **split_model.source.anatomy.without_cache))[1]
    outputs = model_logits.shape[-1]
    if model_logits.dim() > 1:
        model_logits = model_logits[3]
    exit_logits = passes.logits[1][positions[1]][3 if reads_every else -1]
    _refuse_different(split_model, exit_logits, model_logits, "when positions exit early")
    return outputs


def positions_read(
    split_model: LocalSplitModel, reads: str, inputs: dict[str, Tensor], attended: Tensor | None = None
) -> Tensor:
    """Mask (`row pos`) of the positions at which the head gives logits. It is `row 1` if the head pools, and for images.

    Args:
        split_model: the model.
        reads: "every", "first" or "last" position, or "rows".
        inputs: arguments of the model's forward by name.
        attended: `row pos`, False at padding.
    """
    if reads_pixels(split_model):
        # The number of patches is known only after a forward pass; one entry stands for the row.
        return torch.ones(len(inputs["pixel_values"]), 1, dtype=torch.bool, device=split_model.device)
    ids = inputs["input_ids"]
    if reads == "rows":
        return torch.ones(len(ids), 1, dtype=torch.bool, device=ids.device)
    if reads == "every":
        return torch.ones_like(ids, dtype=torch.bool) if attended is None else attended
    positions = torch.zeros_like(ids, dtype=torch.bool)
    if reads == "first":
        positions[:, 0] = True
        return positions
    pad = getattr(split_model.module.config, "pad_token_id", None)
    if isinstance(pad, int):
        is_token = ids != pad
    elif attended is not None:
        is_token = attended
    else:
        is_token = torch.ones_like(positions)
    last = (is_token * torch.arange(1, ids.shape[1] + 1, device=ids.device)).argmax(1)
    return positions.scatter(1, last[:, None], True)


def relative_gap(a: Tensor, b: Tensor) -> float:
    """The norm of a - b divided by the norm of b."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def _refuse_different(split_model: LocalSplitModel, exit_logits: Tensor, model_logits: Tensor, when: str) -> None:
    gap = relative_gap(exit_logits, model_logits) if exit_logits.shape == model_logits.shape else float("inf")
    # A gap that is NaN is refused, too.
    if not gap <= rounding(model_logits.dtype, next(split_model.module.parameters()).dtype):
        raise LayersimError(
            f"{split_model.model.name} gives different logits {when}: the difference is {gap:.3g} of their norm. Blocks must "
            "run one after the other; open_model(model, layers=[...], unembed=[...]) names the blocks and the head."
        )
