"""Validation of models of which adapters are to be trained."""

from __future__ import annotations

from typing import Any

from ..core.errors import LayersimError
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
