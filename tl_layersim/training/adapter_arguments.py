"""Validation of a training of adapters: models that cannot be trained, and the blocks that get an adapter."""

from __future__ import annotations

from typing import Any

from ..core.errors import LayersimError
from ..models.activation_checks import need_stream
from ..models.layout import classes_with_head
from ..models.model_info import Model
from ..stitching.stitched_model import StitchedModel


def no_traced_model(model: Any) -> LayersimError:
    """The error for a model that is not an nnsight model."""
    stitched = isinstance(model, StitchedModel)
    return LayersimError(
        "`model` must be an nnsight model: adapters are trained inside its traces.",
        given=f"{'a stitched model' if stitched else type(model).__name__}",
        expected="a TransformersModel or NNsight(module)",
        do="train them on the nnsight model of its back"
        if stitched
        else "finetune_aligned(model, data), which trains a model in this process; or nnsight.NNsight(model)",
    )


def refuse_untrainable(model: Model, rank: int) -> None:
    """Refuse, before any data is read, a model that adapters cannot be trained through.

    Raises:
        LayersimError: the server does not differentiate, the head or the width is unknown, the rank exceeds the width, or the
            weights are in float16.
    """
    need_stream(model, "Aligned training")
    if model.calls != "gradients":
        raise LayersimError(
            "`model` cannot train adapters: its server runs it in a sandbox without gradients.",
            given=model.source,
            expected="a trusted server, or a model that runs in this process",
            do="ask its operator for a trusted key, or load the model here; trained adapters can be applied in a sandbox too",
        )
    if model.head is None:
        raise LayersimError(
            f"{model.name} has no known head, so its layers make no predictions that could be trained.",
            given=model.source,
            expected="a model with logits",
            do=f"load it by {classes_with_head(model.source)}; or unembed=['path.of.final_norm', 'path.of.head']",
        )
    if model.d_model is None:
        raise LayersimError(
            f"The width of {model.name} is not known.",
            given="a configuration without hidden_size",
            expected="model.config.hidden_size",
            do="model.config.hidden_size = the width of the residual stream, before nnsight wraps the model",
        )
    if rank > model.d_model:
        raise LayersimError(
            f"`rank` must be at most {model.d_model}, the model's width.",
            given=f"rank={rank}",
            expected=f"1 to {model.d_model}",
            do="rank=8",
        )
    if model.dtype == "torch.float16":
        raise LayersimError(
            f"Gradients through {model.name} in float16 vanish: the smallest number of float16 is 6e-8.",
            given="float16 weights",
            expected="float32, or bfloat16, which has float32's range",
            do="load it in bfloat16",
        )


def block_numbers(model: Model, at: list[int | str] | None) -> list[int]:
    """Numbers of the blocks that get an adapter, in order.

    Args:
        model: whose blocks they are.
        at: numbers from 0 or names of the blocks' outputs; None for all blocks.

    Raises:
        LayersimError: a block does not exist, or is named twice.
    """
    count = len(model.layers) - 1
    if at is None:
        return list(range(count))
    names = {name: number for number, name in enumerate(model.layers[1:])}
    numbers = [names.get(block) if isinstance(block, str) else block for block in at]
    valid = [number for number in numbers if number is not None and not isinstance(number, bool) and 0 <= number < count]
    if len(set(valid)) < len(at) or not at:
        wrong = [block for block, number in zip(at, numbers, strict=True) if number not in valid]
        raise LayersimError(
            f"`at` contains {wrong[0]!r}, which is no block of {model.name}."
            if wrong
            else "`at` must be a list of different blocks.",
            given=f"at={at}",
            expected=f"different numbers from 0 to {count - 1}, or names from {model.layers[1]} to {model.layers[-1]}",
            do=f"at=[{count // 2}], or at=None for all blocks",
        )
    return sorted(valid)
