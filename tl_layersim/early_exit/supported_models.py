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

from ..architectures.blocks import encoder_and_decoder
from ..architectures.output_heads import no_cache
from ..architectures.transformer_lens import is_transformer_lens
from ..architectures.unembed import Unembed, rounding
from ..core.errors import LayersimError, excerpt
from ..core.wording import with_article
from ..data.batches import Batch
from ..data.non_token_inputs import PIXELS, TOKEN_IDS
from ..remote.open_model import open_source
from ..sources.activation_checks import need_stream
from ..sources.hooked_module import HookedSource
from ..sources.open_local import OpenedModel
from ..sources.out_of_memory import is_out_of_memory
from ..sources.partial_forward import LocalSplitModel, logits_of, no_known_head
from .exit_decisions import ExitCheck, ExitLens
from .segments import Decoding, FullSequence

# Tokens of the synthetic prompt, padding of its second row, and new tokens.
PROMPT, PAD, NEW = 5, 2, 6


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
    source = None if opened.on_server or is_transformer_lens(model) else open_source(opened, either_stack=either_stack)
    if type(source) is not HookedSource or not hasattr(model, "config"):
        raise not_hugging_face(model)
    need_stream(source.model, "Early exit")
    split_model = LocalSplitModel(source, source.model)
    if split_model.source.unembed is None:
        raise no_known_head(source.model)
    devices = {str(p.device) for p in model.parameters()}
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
    has_tokens = not reads_pixels(split_model)
    if not has_tokens:
        one = torch.ones(1, 1, dtype=torch.bool)
        return Batch(torch.zeros(1, 1, dtype=torch.int64), one, one, 0, inputs=inputs, has_tokens=False)
    tokens = inputs.pop(split_model.model.token_input)
    every = torch.ones_like(tokens, dtype=torch.bool)
    return Batch(tokens, every, every, 0, inputs=inputs)


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
    generator = torch.Generator().manual_seed(0)
    config: Any = split_model.module.config
    main = getattr(split_model.module, "main_input_name", TOKEN_IDS)
    if main not in (TOKEN_IDS, PIXELS):
        raise LayersimError(
            f"`model` is {with_article(type(split_model.module).__name__)}, which takes `{main}`; it must take token ids or "
            "images. The analyzer ExitCurve measures the exits of other models."
        )
    if main == TOKEN_IDS:
        vocabulary = split_model.model.vocabulary or 2
        ids = torch.randint(0, vocabulary, (rows, length), generator=generator)
        pad = getattr(config, "pad_token_id", None)
        # Classifiers take the first padding token as the end of a row.
        ids = torch.where(ids == pad, (ids + 1) % vocabulary, ids) if isinstance(pad, int) else ids
        ids = ids.to(split_model.device)
        # An encoder-decoder also needs tokens for its decoder.
        return {"input_ids": ids} | ({"decoder_input_ids": ids} if encoder_and_decoder(split_model.module) else {})
    config = getattr(config, "vision_config", config)
    if (size := getattr(config, "image_size", None)) is None:
        raise LayersimError("`model` reads images of unknown size: its configuration has no image_size.")
    height, width = (size, size) if isinstance(size, int) else size
    pixels = torch.randn(rows, config.num_channels, height, width, generator=generator)
    return {"pixel_values": pixels.to(device=split_model.device, dtype=next(split_model.module.parameters()).dtype)}


def is_causal(split_model: LocalSplitModel) -> bool:
    """Whether a residual does not depend on later tokens."""
    given = synthetic_inputs(split_model, 1, 6)["input_ids"]
    other = given.clone()
    other[0, -1] = (other[0, -1] + 1) % max(2, split_model.model.vocabulary or 2)

    def last_residual(ids: Tensor) -> Tensor:
        module = split_model.module
        return split_model.read(len(split_model.blocks), lambda: module(input_ids=ids, **no_cache(split_model.module)))

    with torch.no_grad():
        a, b = last_residual(given), last_residual(other)
    return relative_gap(a[0, :-1], b[0, :-1]) < 1e-3


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
    depths = torch.tensor([[ends[(step + 2 * row) % len(ends)] for row in range(2)] for step in range(NEW)] + [[ends[-1]] * 2])
    check = ExitCheck(lens, depths[0])
    state = Decoding(split_model, ends, check, ids[:, :PROMPT], attended[:, :PROMPT], PROMPT + NEW)
    with state.hooked():
        for step in range(NEW + 1):
            if step:
                state.append(ids[:, PROMPT + step - 1])
            check.rule = depths[step]
            state.run()
    for row in range(2):
        own = logits_of(split_model.module(input_ids=ids[row : row + 1, PAD * row :], **no_cache(split_model.module)))[0, -1]
        ours = state.exited[row][0][0]
        _refuse_different(split_model, ours, own, "when generated tokens exit early")


def check_full_sequence(split_model: LocalSplitModel, lens: ExitLens, ends: tuple[int, ...], causal: bool) -> int:
    """Raise an error if a forward pass with early exit does not give the model's own logits.

    One row and most positions exit early.

    Returns:
        The number of outputs of the head.

    Raises:
        LayersimError: the logits differ by more than rounding.
    """
    inputs, unembed = synthetic_inputs(split_model, 2, 6), lens.unembed
    positions, every = positions_read(split_model, unembed.reads, inputs), unembed.reads == "every"
    layers = torch.full(positions.shape, ends[0])
    # The second row runs through all blocks, or its fourth position does.
    layers[1, 3 if every else slice(None)] = ends[-1]
    passes = FullSequence(split_model, ends, ExitCheck(lens, layers.flatten()), inputs, positions, causal)
    passes.run()
    own = logits_of(split_model.module(**inputs, **no_cache(split_model.module)))[1]
    ours = passes.logits[1][positions[1]][3 if every else -1]
    _refuse_different(split_model, ours, own if own.dim() == 1 else own[3], "when positions exit early")
    return own.shape[-1]


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
    chosen = torch.zeros_like(ids, dtype=torch.bool)
    if reads == "first":
        chosen[:, 0] = True
        return chosen
    pad = getattr(split_model.module.config, "pad_token_id", None)
    real = ids != pad if isinstance(pad, int) else torch.ones_like(chosen) if attended is None else attended
    last = (real * torch.arange(1, ids.shape[1] + 1, device=ids.device)).argmax(1)
    return chosen.scatter(1, last[:, None], True)


def relative_gap(a: Tensor, b: Tensor) -> float:
    """The norm of a - b divided by the norm of b."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def _refuse_different(split_model: LocalSplitModel, ours: Tensor, own: Tensor, when: str) -> None:
    gap = relative_gap(ours, own) if ours.shape == own.shape else float("inf")
    if not gap <= rounding(own.dtype, next(split_model.module.parameters()).dtype):
        raise LayersimError(
            f"{split_model.model.name} gives different logits {when}: the difference is {gap:.3g} of their norm. Blocks must "
            "run one after the other; open_model(model, layers=[...], unembed=[...]) names the blocks and the head."
        )
