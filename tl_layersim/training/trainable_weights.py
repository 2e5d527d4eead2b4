"""Refusals of models whose weights cannot be trained in place: offloaded and quantised weights."""

from __future__ import annotations

from typing import Any

import torch

from ..core.errors import LayersimError
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
            "`model` has offloaded weights, which cannot be trained: each call loads new copies of them.",
            given=f"{len(away)} weights on a disk or on the CPU, such as {away[0]}",
            expected="all weights in the memory of one device",
            do="load the model without device_map=; analyze, compare, stitch and evaluate_layers take offloaded models",
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
    with_lora = "" if lora is None else " LoRA adapters cannot be merged into them without rounding."
    refuse_quantised(
        model,
        f"`model` has quantised weights, which cannot be trained.{with_lora}",
        do="model = peft.get_peft_model(model, peft.LoraConfig(...)) first, and lora= left out: its adapters are trained",
    )
