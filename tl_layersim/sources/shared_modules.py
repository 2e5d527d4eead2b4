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
        opened_a, opened_b = OpenedModel.of(a), OpenedModel.of(b)
        if opened_a.on_server or opened_b.on_server:
            continue
        module_a, module_b = _module(opened_a.model), _module(opened_b.model)
        if module_a is None or module_b is None or _edits(opened_a.model) != _edits(opened_b.model):
            continue
        shared = _weighted(module_a).keys() & _weighted(module_b).keys()
        sizes = _weighted(module_a)
        smaller = min(sum(sizes.values()), sum(_weighted(module_b).values()))
        if not shared or sum(sizes[module] for module in shared) <= ONE_MODEL * smaller:
            continue
        same_object = opened_a.given is opened_b.given
        adapted = has_adapters(module_a) or has_adapters(module_b)
        if same_object and not adapted:
            continue
        why = "adapters change their base model in place" if adapted else "a change of one is a change of the other"
        kinds = [type(opened.given).__name__ for opened in (opened_a, opened_b)]
        text = (
            f"`{name_a}` ({kinds[0]}) and `{name_b}` ({kinds[1]}) run the same modules, and {why}, so both give the same "
            "activations. Load the first model again, or copy it (copy.deepcopy) before it is changed."
        )
        if adapted and not same_object:
            raise LayersimError(text)
        warn(text)


def has_adapters(module: torch.nn.Module) -> bool:
    """Whether a module holds layers of peft."""
    return any(cls.__module__.split(".")[0] == "peft" for part in module.modules() for cls in type(part).__mro__)


def _module(model: Any) -> torch.nn.Module | None:
    """The torch module of a model in this process; None if it has none."""
    module = model._module if is_nnsight(model) else model
    return module if isinstance(module, torch.nn.Module) else None


def _edits(model: Any) -> str:
    return edits_of(model) if is_nnsight(model) else ""


def _weighted(module: torch.nn.Module) -> dict[torch.nn.Module, int]:
    """The submodules that hold weights of their own, with the number of these."""
    sizes = {part: sum(weight.numel() for weight in part.parameters(recurse=False)) for part in module.modules()}
    return {part: size for part, size in sizes.items() if size}
