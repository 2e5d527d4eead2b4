"""Refusals of models whose weights cannot be trained in place: offloaded and quantised weights."""

from __future__ import annotations

from typing import Any

import torch

from ..architectures.heads import classes_with_head
from ..core.errors import LayersimError
from ..models.model_info import Model
from ..models.quantised import refuse_quantised


def refuse_offloaded(module: torch.nn.Module) -> None:
    """Refuse a model with offloaded weights, which are copies for the time of a call: an optimiser would not change them.

    Args:
        module: the model.

    Raises:
        LayersimError: names the first offloaded weight.
    """
    away = [name for name, parameter in module.named_parameters() if parameter.is_meta]
    if away:
        raise LayersimError(
            f"`model` has {len(away)} offloaded weights, such as {away[0]}, which cannot be trained. Load it without "
            "device_map=."
        )


def refuse_float16(model: Model) -> None:
    """Refuse a model in float16, in which gradients below 6e-8 are 0.

    Raises:
        LayersimError: the weights are in float16.
    """
    if model.dtype == "torch.float16":
        raise LayersimError("`model` is in float16, in which small gradients are 0. Load it in float32 or bfloat16.")


def no_known_head(model: Model) -> LayersimError:
    """The error for a model whose final norm and head are not known."""
    return LayersimError(
        f"{model.name} has no known head, so its layers make no predictions that could be trained. Load it by "
        f"{classes_with_head(model.source)}, or open_model(model, unembed=[final norm, head])."
    )


def refuse_frozen_integers(model: Any, lora: Any) -> None:
    """Refuse a quantised model without adapters, of which norms and embeddings alone would be trained.

    Args:
        model: the model.
        lora: the setting of the training; its adapters are merged into the weights at the end, which are then rounded again.

    Raises:
        LayersimError: the model has quantised weights and no adapters of its own.
    """
    if lora is None and hasattr(model, "peft_config"):
        return
    with_lora = "" if lora is None else ", and LoRA adapters cannot be merged into them without rounding"
    refuse_quantised(
        model,
        f"`model` has quantised weights, which cannot be trained{with_lora}",
        do="peft.get_peft_model(model, peft.LoraConfig(...)) without lora=",
    )
