"""Untrained twins: models of the same architecture with fresh weights."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ..architectures.transformer_lens import is_transformer_lens
from ..core.arguments import Seed, typed
from ..core.errors import LayersimError
from ..core.wording import with_article
from .identity import edits_of, hooks_on
from .open_local import OpenedModel, is_nnsight


@typed
def untrained(model: Any, seed: Seed = 0) -> Any:
    """Make a model of the same architecture with fresh weights, as its class initialises them.

    Two trained models are similar because of their training, and because they read the same tokens with the same architecture.
    Untrained models show only the second effect.

    Args:
        model: a Hugging Face model, a HookedTransformer, a TransformerBridge, or an nnsight model in this process; or what
            `open_model` returns.
        seed: seed of the weights. The state of torch's random numbers is left as it is.

    Returns:
        The model in evaluation mode, with the dtype, the device and the tokenizer of `model`. For an nnsight model it is a
        Hugging Face model.

    Raises:
        LayersimError: the model cannot be made from a configuration, or its configuration gives other shapes; or it has hooks
            or nnsight edits, which the twin would lack.

    Examples:
        >>> import tl_layersim as lsim
        >>> from tl_layersim.sources import untrained
        >>> model = lsim.demo_model()
        >>> twin = untrained(model)
        >>> twin.config.hidden_size == model.config.hidden_size, untrained(model, seed=1) is twin
        (True, False)
    """
    model = OpenedModel.of(model).model
    refuse_changed(model)
    if is_nnsight(model):
        made = untrained(model._module, seed)
        made.tokenizer = getattr(model, "tokenizer", None)
        return made
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = _made(model)
    weight = next(model.parameters())
    made = made.to(device=weight.device, dtype=weight.dtype).eval()
    shapes, own = ({name: tuple(value.shape) for name, value in one.state_dict().items()} for one in (model, made))
    if shapes != own:
        different = next(name for name in shapes | own if shapes.get(name) != own.get(name))
        raise LayersimError(
            f"`model` has no untrained twin: {different} has shape {shapes.get(different)}, but its configuration gives "
            f"{own.get(different)}."
        )
    if hasattr(model, "tokenizer") and not hasattr(made, "tokenizer"):
        made.tokenizer = model.tokenizer
    return made


def refuse_changed(model: Any) -> None:
    """Raise an error if a model has hooks or nnsight edits, which a model with fresh weights would lack.

    Args:
        model: any model; only torch modules can have hooks.

    Raises:
        LayersimError: names the changes.
    """
    edits, module = (edits_of(model), model._module) if is_nnsight(model) else ("", model)
    hooks = hooks_on(module) if isinstance(module, torch.nn.Module) else ""
    if edits or hooks:
        raise LayersimError(
            f"`model` has changes that a model with fresh weights would lack: {'; '.join(filter(None, (edits, hooks)))}. "
            "Make untrained(model) first, and register the hooks on both."
        )


def _made(model: Any) -> Any:
    """Make a model of the same class from a model's configuration."""
    if is_transformer_lens(model):
        original = getattr(model, "original_model", None)
        if original is None:
            cfg = copy.deepcopy(model.cfg)
            cfg.init_weights, cfg.seed = True, None
            return type(model)(cfg, tokenizer=model.tokenizer)
        if not getattr(model, "compatibility_mode", False):
            from transformer_lens.model_bridge.sources import build_bridge_from_module

            fresh, kind = type(original)(copy.deepcopy(original.config)), type(original).__name__
            return build_bridge_from_module(fresh, kind, hf_config=fresh.config, tokenizer=model.tokenizer)
    elif hasattr(type(model), "_from_config") and getattr(model, "config", None) is not None:
        return type(model)(copy.deepcopy(model.config))
    raise LayersimError(
        f"`model` is {with_article(type(model).__name__)}, which cannot be made from a configuration; it must be a Hugging "
        "Face model, a HookedTransformer, or a TransformerBridge without compatibility mode."
    )
