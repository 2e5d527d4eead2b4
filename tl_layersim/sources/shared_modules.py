"""Models that share their modules, so that a change of one is a change of the other."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from ..core.errors import LayersimError, warn
from .identity import edits_of
from .open_local import OpenedModel, is_nnsight

# Share of the smaller model's weights from which two models are one; models that share only embeddings stay below it.
ONE_MODEL = 0.5


def refuse_one_model(models: Mapping[str, Any]) -> None:
    """Raise an error or warn if two models that are to be compared run the same modules.

    Adapters of peft, and other changes of modules in place, change the base model too. Its comparison with the changed model
    shows no change. A model is compared with itself without a warning if it has no adapters.

    Args:
        models: for each argument of the caller, the model as it was given.

    Raises:
        LayersimError: two different objects run the same modules with adapters.
    """
    for (name_a, a), (name_b, b) in itertools.combinations(models.items(), 2):
        opened_a = OpenedModel.of(a)
        opened_b = OpenedModel.of(b)
        if opened_a.on_server or opened_b.on_server:
            continue
        module_a = _module(opened_a.model)
        module_b = _module(opened_b.model)
        if module_a is None or module_b is None or _edits(opened_a.model) != _edits(opened_b.model):
            continue
        sizes_a = _weight_counts(module_a)
        sizes_b = _weight_counts(module_b)
        shared_modules = sizes_a.keys() & sizes_b.keys()
        shared_size = sum(sizes_a[module] for module in shared_modules)
        smaller_size = min(sum(sizes_a.values()), sum(sizes_b.values()))
        if not shared_modules or shared_size <= ONE_MODEL * smaller_size:
            continue
        is_same_object = opened_a.given is opened_b.given
        is_adapted = has_adapters(module_a) or has_adapters(module_b)
        if is_same_object and not is_adapted:
            continue
        reason = "adapters change their base model in place" if is_adapted else "a change of one is a change of the other"
        class_a = type(opened_a.given).__name__
        class_b = type(opened_b.given).__name__
        text = (
            f"`{name_a}` ({class_a}) and `{name_b}` ({class_b}) run the same modules, and {reason}, so both give the same "
            "activations. Load the first model again, or copy it (copy.deepcopy) before it is changed."
        )
        if is_adapted and not is_same_object:
            raise LayersimError(text)
        warn(text)


def has_adapters(module: torch.nn.Module) -> bool:
    """Whether a module holds layers of peft."""
    return any(_is_of_peft(submodule) for submodule in module.modules())


def _is_of_peft(module: torch.nn.Module) -> bool:
    return any(cls.__module__.split(".")[0] == "peft" for cls in type(module).__mro__)


def _module(model: Any) -> torch.nn.Module | None:
    """The torch module of a model in this process; None if it has none."""
    module = model._module if is_nnsight(model) else model
    return module if isinstance(module, torch.nn.Module) else None


def _edits(model: Any) -> str:
    """The edits of an nnsight model as text; "" for other models."""
    return edits_of(model) if is_nnsight(model) else ""


def _weight_counts(module: torch.nn.Module) -> dict[torch.nn.Module, int]:
    """The submodules that hold weights of their own, with the number of these."""
    counts: dict[torch.nn.Module, int] = {}
    for submodule in module.modules():
        count = sum(weight.numel() for weight in submodule.parameters(recurse=False))
        if count:
            counts[submodule] = count
    return counts
