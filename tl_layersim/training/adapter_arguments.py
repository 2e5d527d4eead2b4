"""Validation of a training of adapters: models that cannot be trained, and the blocks that get an adapter."""

from __future__ import annotations

from typing import Any

from ..core.errors import LayersimError
from ..core.wording import brief
from ..models.activation_checks import need_stream
from ..models.model_info import Model
from ..stitching.stitched_model import StitchedModel
from .trainable_weights import no_known_head, refuse_float16


def no_traced_model(model: Any) -> LayersimError:
    """The error for a model that is not an nnsight model."""
    instead = (
        "the nnsight model of its back" if isinstance(model, StitchedModel) else "nnsight.NNsight(model) or finetune_aligned"
    )
    return LayersimError(f"`model` is {type(model).__name__}; adapters are trained in an nnsight model. Use {instead}.")


def refuse_untrainable(model: Model) -> None:
    """Refuse, before any data is read, a model that adapters cannot be trained through.

    Raises:
        LayersimError: the server does not differentiate, the head or the width is unknown, or the weights are in float16.
    """
    need_stream(model, "Aligned training")
    if model.calls != "gradients":
        raise LayersimError(
            f"`model` is on a server that runs {model.name} in a sandbox without gradients; adapters need a trusted key."
        )
    if model.head is None:
        raise no_known_head(model)
    if model.d_model is None:
        raise LayersimError(
            f"The width of {model.name} is not known. Set model.config.hidden_size before nnsight wraps the model."
        )
    refuse_float16(model)


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
        raise LayersimError(
            f"`at` is {brief(at)}; it must be different blocks of {model.name}, from 0 to {count - 1} or from "
            f"{model.layers[1]} to {model.layers[-1]}."
        )
    return sorted(valid)
