"""Changes of a model that are not in its weights: hooks of others, replaced forward methods, and edits of nnsight."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from ..core.errors import LayersimError
from ..core.function_code import ValueNames, defined_in
from .hooks import every_module

# Attributes of a module, or of torch for all modules, that hold hooks.
KINDS_OF_HOOKS = {
    "forward hook": "_forward_hooks",
    "forward pre-hook": "_forward_pre_hooks",
    "backward hook": "_backward_hooks",
    "backward pre-hook": "_backward_pre_hooks",
}
# Packages whose hooks belong to how a model is loaded, divided and read. The last is the placeholder of a pickled `Hook`.
OWN_PACKAGES = (
    *("tl_layersim", "nnsight", "accelerate", "transformers", "transformer_lens", "peft", "bitsandbytes", "deepspeed"),
    *("torch.nn.utils", "torch.nn.parallel", "torch.distributed", "torch.ao", "torch.utils", "torch._dynamo", "contextlib"),
)
EDIT, UNKNOWN = "nnsight edit", "whose contents are unknown"


def hooks_on(module: torch.nn.Module) -> str:
    """The hooks of others on a model's modules, and forward methods that were replaced, as text.

    It has the place, the qualified name, and a digest of code and captured values of each. Hooks of this package, nnsight,
    accelerate, transformers, TransformerLens and torch are left out. Hooks that users add to hook points of TransformerLens
    count, and so do hooks that only observe.

    Args:
        module: the model.

    Returns:
        "" if there are none. A hook that is no function, or that holds objects without a name in every process, is marked with
        `UNKNOWN`.

    Examples:
        >>> module = torch.nn.Linear(2, 2)
        >>> module._forward_hooks[0] = len
        >>> hooks_on(module).split(" sha256 ")[0]
        'forward hook of Linear: builtins.len'
    """
    paths = _paths(module)
    known = {id(sub): f"module {path}" for sub, path in paths.items()}
    found = []
    for sub, path in [*paths.items(), (None, "every module")]:
        for kind, name in KINDS_OF_HOOKS.items():
            hooks = getattr(torch_module, f"_global{name}") if sub is None else getattr(sub, name)
            for hook in hooks.values():
                function = _user_function(hook)
                if not _is_own(function):
                    names = ValueNames(known)
                    found.append(_marked(f"{kind} of {path}: {names.function(function)}", names))
    for sub, path in paths.items():
        forward = _replaced_forward(sub)
        if forward is not None and not _is_own(forward):
            names = ValueNames(known)
            found.append(_marked(f"forward of {path}: {names.function(forward)}", names))
    return "; ".join(found)


def edits_of(model: Any) -> str:
    """The edits of an nnsight model (`model.edit()`), as text: a digest of the source and the captured values of each.

    Args:
        model: of nnsight.

    Returns:
        "" if there are none. An edit that holds objects without a name in every process is marked with `UNKNOWN`.
    """
    from nnsight.intervention.serialization import reduce_block

    known = {id(envoy): f"envoy {envoy.path}" for envoy in model.modules()}
    known |= {id(sub): f"module {path}" for sub, path in _paths(model._module).items()}
    found = []
    for edit in model._edits:
        # An edit of a model that was deserialised has no source.
        source, *values = ("", {"edit": edit}) if edit.node is None else reduce_block(edit.node, edit.glbls, edit.lcls)
        names = ValueNames(known | {id(envoy): f"envoy {envoy.path}" for held in values for envoy in _envoys_in(held)})
        found.append(_marked(f"{EDIT} sha256 {names.digest(source.strip(), values)}", names))
    return "; ".join(found)


def refuse_unknown(changes: str, argument: str) -> None:
    """Refuse a run that is compared with a later one, for a model with a change that cannot be compared.

    Args:
        changes: of the model, see `hooks_on` and `edits_of`.
        argument: that names the file of the run.

    Raises:
        LayersimError: a change has contents that are unknown.
    """
    unknown = [change for change in changes.split("; ") if change.endswith(UNKNOWN)]
    if unknown:
        raise LayersimError(
            f"`{argument}` cannot be used: {', '.join(unknown)} cannot be compared with that of a later call. Write it as a "
            "function of plain values."
        )


def refuse_edits(changes: str, what: str) -> None:
    """Refuse an nnsight model with edits for what calls its modules outside of a trace, where the edits do not apply.

    Args:
        changes: of the model, see `edits_of`.
        what: the analyzer or function, for the message.

    Raises:
        LayersimError: the model has edits.
    """
    if EDIT in changes:
        raise LayersimError(
            f"{what} runs blocks of the model on their own, where {changes} does not apply. Use a forward hook of PyTorch, "
            "or model.clear_edits()."
        )


def _paths(module: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """The paths of all submodules; the model itself by its class."""
    inner = vars(module).get("original_model")
    paths: dict[torch.nn.Module, str] = {}
    for root, prefix in ((module, ""), (inner, "original_model.")):
        if isinstance(root, torch.nn.Module):
            paths = {sub: prefix + path for path, sub in root.named_modules()} | paths
    return {sub: paths[sub] or type(sub).__name__ for sub in every_module(module)}


def _envoys_in(values: Mapping[str, Any]) -> Iterator[Any]:
    """The envoys of the model, or of the copy of it that an edit was written against, among captured values."""
    for value in values.values():
        if hasattr(type(value), "interleave"):
            yield from value.modules()


def _user_function(hook: Any) -> Any:
    """The function that a user has added to a hook point of TransformerLens, which wraps it; other hooks as they are."""
    while defined_in(hook) == "transformer_lens.hook_points" and getattr(hook, "__closure__", None):
        held = dict(zip(hook.__code__.co_freevars, (cell.cell_contents for cell in hook.__closure__), strict=True))
        inner = held.get("hook", held.get("full_hook"))
        if inner is None:
            break
        hook = inner
    return hook


def _replaced_forward(module: torch.nn.Module) -> Any:
    """The forward method of a module in place of that of its class; None where it is that of its class."""
    forward = vars(module).get("forward")
    # nnsight puts an object in its place, whose body is that of the class, or a function that calls the other one.
    forward = getattr(getattr(forward, "state", None), "body", forward)
    if forward is None or getattr(forward, "__func__", forward) is type(module).forward:
        return None
    held = inspect.getclosurevars(forward).nonlocals if defined_in(forward).startswith("nnsight.") else {}
    return held.get("forward", forward)


def _is_own(function: Any) -> bool:
    home = defined_in(function)
    # A wrapper has the name of what it wraps.
    home = function.__globals__["__name__"] if hasattr(function, "__wrapped__") and hasattr(function, "__globals__") else home
    return any(home == name or home.startswith(f"{name}.") for name in OWN_PACKAGES)


def _marked(change: str, names: ValueNames) -> str:
    return f"{change} with {', '.join(dict.fromkeys(names.unknown))}, {UNKNOWN}" if names.unknown else change
