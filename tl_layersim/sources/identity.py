"""Identity of a model: a checksum of its weights, and changes such as hooks."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from functools import cached_property
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module

from ..architectures.module_paths import modules_by_path
from ..core.code_digests import (
    OWN_PACKAGES,
    ObjectTexts,
    ValueNames,
    closure_of,
    defined_in,
    forward_methods,
    with_unknown_values,
)
from ..core.errors import LayersimError
from ..core.tensor_digests import digest_of_tensor
from .hooks import every_module


def is_plain(parameter: Tensor) -> bool:
    """Whether a parameter is unquantised: not stored as integers, 8-bit floats or packed tensors.

    Examples:
        >>> import torch
        >>> is_plain(torch.zeros(2, 2)), is_plain(torch.zeros(2, 2, dtype=torch.int8))
        (True, False)
    """
    # Tensors that are sharded over processes are a subclass too.
    packed = hasattr(parameter, "__tensor_flatten__") and not hasattr(parameter, "placements")
    return parameter.is_floating_point() and parameter.dtype.itemsize > 1 and not packed


def is_quantised(module: torch.nn.Module) -> bool:
    """Whether a module's own weights are quantised; weights of submodules do not count."""
    # GPTQ and AWQ pack weights in a buffer.
    if "qweight" in module._buffers:
        return True
    return any(parameter is not None and not is_plain(parameter) for parameter in module._parameters.values())


def plain_parts(value: Tensor) -> Iterator[Tensor]:
    """The plain tensors inside a tensor subclass; the tensor itself if it is plain.

    Args:
        value: a parameter or a buffer.
    """
    if is_plain(value) or not hasattr(value, "__tensor_flatten__"):
        yield value
        return
    names, _ = value.__tensor_flatten__()
    for name in names:
        yield from plain_parts(getattr(value, name))


def refuse_quantised(module: torch.nn.Module, what: str, do: str) -> None:
    """Raise an error if a model has quantised weights.

    Args:
        module: the model.
        what: the reason, as a sentence without its full stop.
        do: the call to make instead.

    Raises:
        LayersimError: the model has quantised weights.
    """
    class_by_path: dict[str, str] = {}
    for path, submodule in module.named_modules():
        if is_quantised(submodule):
            class_by_path[path] = type(submodule).__name__
    if class_by_path:
        kinds = ", ".join(sorted(set(class_by_path.values())))
        example = next(iter(class_by_path))
        raise LayersimError(f"{what}: {len(class_by_path)} modules ({kinds}), such as {example}. Use {do}.")


# Attributes of a module, or of torch for all modules, that hold hooks.
KINDS_OF_HOOKS = {
    "forward hook": "_forward_hooks",
    "forward pre-hook": "_forward_pre_hooks",
    "backward hook": "_backward_hooks",
    "backward pre-hook": "_backward_pre_hooks",
}
# Kind of a change, in its description.
EDIT = "nnsight edit"


def hooks_on(module: torch.nn.Module) -> str:
    """Describe a model's hooks and replaced forward methods as text.

    Each entry has the place, the qualified name, and a digest of code and captured values. Hooks of this package, nnsight,
    accelerate, transformers, TransformerLens and torch are left out. Hooks that users add to hook points of TransformerLens
    count, and so do hooks that only observe.

    Args:
        module: the model.

    Returns:
        "" if there are none. `UNKNOWN_CONTENTS` marks a hook that is not a function, or holds objects that cannot be named
        (`ValueNames`).

    Examples:
        >>> module = torch.nn.Linear(2, 2)
        >>> module._forward_hooks[0] = len
        >>> hooks_on(module).split(" sha256 ")[0]
        'forward hook of Linear: builtins.len'
    """
    paths = _paths(module)
    changes: list[tuple[str, Any]] = []
    for path, kind, hook in _hooks_in(paths):
        function = _user_function(hook)
        if not _is_of_known_package(function):
            changes.append((f"{kind} of {path}", function))
    methods_of_classes: dict[type, list[str]] = {}
    for submodule, path in paths.items():
        module_class = type(submodule)
        if module_class not in methods_of_classes:
            # With `forward` first, which may be no function.
            methods_of_classes[module_class] = list(dict.fromkeys(["forward", *forward_methods(module_class)]))
        for method in methods_of_classes[module_class]:
            # An entry of the module itself takes the place of the method of its class.
            if method in vars(submodule):
                function = _replacement(submodule, method)
                if function is not None:
                    changes.append((f"{method} of {path}", function))
    module_names = {id(submodule): f"module {path}" for submodule, path in paths.items()}
    descriptions: list[str] = []
    for place, function in changes:
        names = ValueNames(module_names)
        descriptions.append(with_unknown_values(f"{place}: {names.function(function)}", names))
    return "; ".join(descriptions)


def _hooks_in(paths: dict[torch.nn.Module, str]) -> Iterator[tuple[str, str, Any]]:
    """The hooks of modules, then those of torch for all modules: the path of the module, the kind of the hook, and the hook.

    Args:
        paths: paths of the modules.
    """
    for submodule, path in paths.items():
        for kind, attribute in KINDS_OF_HOOKS.items():
            for hook in getattr(submodule, attribute).values():
                yield path, kind, hook
    for kind, attribute in KINDS_OF_HOOKS.items():
        for hook in getattr(torch_module, f"_global{attribute}").values():
            yield "every module", kind, hook


def edits_of(model: Any) -> str:
    """Describe the edits of an nnsight model (`model.edit()`) as text.

    Args:
        model: an nnsight model.

    Returns:
        "" if there are none. `UNKNOWN_CONTENTS` marks an edit that holds objects that cannot be named (`ValueNames`).
    """
    from nnsight.intervention.serialization import reduce_block

    object_names = {id(envoy): f"envoy {envoy.path}" for envoy in model.modules()}
    for submodule, path in _paths(model._module).items():
        object_names[id(submodule)] = f"module {path}"
    descriptions: list[str] = []
    for edit in model._edits:
        # An edit of a model that was deserialised has no source.
        source, *scopes = ("", {"edit": edit}) if edit.node is None else reduce_block(edit.node, edit.glbls, edit.lcls)
        names_in_edit = dict(object_names)
        for scope in scopes:
            for value in scope.values():
                is_envoy = hasattr(type(value), "interleave")
                if is_envoy:
                    names_in_edit |= {id(envoy): f"envoy {envoy.path}" for envoy in value.modules()}
        names = ValueNames(names_in_edit)
        descriptions.append(with_unknown_values(f"{EDIT} sha256 {names.digest(source.strip(), scopes)}", names))
    return "; ".join(descriptions)


def refuse_edits(changes: str, what: str) -> None:
    """Raise an error if an nnsight model has edits, which only a trace applies.

    Args:
        changes: changes to the model, see `edits_of`.
        what: the analyzer or function, for the message.

    Raises:
        LayersimError: the model has edits.
    """
    if EDIT in changes:
        raise LayersimError(
            f"{what} would ignore the edits of the model, because it calls blocks outside a trace: {changes}. Use a forward "
            "hook of PyTorch, or model.clear_edits()."
        )


def _paths(module: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """The paths of all submodules; the path of the model is its class name."""
    paths: dict[torch.nn.Module, str] = {}
    original_model = vars(module).get("original_model")
    if isinstance(original_model, torch.nn.Module):
        for path, submodule in modules_by_path(original_model).items():
            paths[submodule] = f"original_model.{path}"
    # Modules that a bridge lists too have the bridge's path.
    for path, submodule in modules_by_path(module).items():
        paths[submodule] = path
    return {submodule: paths[submodule] or type(submodule).__name__ for submodule in every_module(module)}


def _user_function(hook: Any) -> Any:
    """Remove wrappers by TransformerLens and `torch.no_grad()` from a hook, and return the function inside."""
    while defined_in(hook) == "transformer_lens.hook_points" and getattr(hook, "__closure__", None):
        captured_values = [cell.cell_contents for cell in hook.__closure__]
        captured = dict(zip(hook.__code__.co_freevars, captured_values, strict=True))
        wrapped_hook = captured.get("hook", captured.get("full_hook"))
        if wrapped_hook is None:
            break
        hook = wrapped_hook
    return inspect.unwrap(hook, stop=lambda function: not _is_wrapper(function))


def _replacement(module: torch.nn.Module, name: str) -> Any:
    """The function that replaces a method of a module; None if there is none."""
    function = vars(module).get(name)
    method = getattr(type(module), name, None)
    # nnsight puts an object in the place of forward, whose body is that of the class, or a function that calls the other one.
    function = getattr(getattr(function, "state", None), "body", function)

    def is_from_class(function: Any) -> bool:
        # A method of another module computes with that module's weights.
        return getattr(function, "__func__", function) is method and getattr(function, "__self__", module) is module

    def is_bound_to_another_layer(function: Any) -> bool:
        owner = getattr(function, "__self__", None)
        return isinstance(owner, torch.nn.Module) and owner is not module

    def is_replacement(function: Any) -> bool:
        # A method that a library has wrapped has `__wrapped__`, which is a function without the module it is bound to.
        return is_from_class(function) or is_bound_to_another_layer(function) or not _is_wrapper(function)

    if not callable(function) or is_from_class(function):
        return None
    if defined_in(function).startswith("nnsight."):
        captured = inspect.getclosurevars(function).nonlocals
        function = captured.get("forward", function)
    function = inspect.unwrap(function, stop=is_replacement)
    if is_from_class(function) or (_is_of_known_package(function) and not is_bound_to_another_layer(function)):
        return None
    return function


def _is_of_known_package(function: Any) -> bool:
    return f"{defined_in(function)}.".startswith(OWN_PACKAGES)


def _is_wrapper(function: Any) -> bool:
    """Whether a function is a wrapper of a library that leaves the numbers as they are. Autocast changes them."""
    plain = getattr(function, "__func__", function)
    is_autocast = isinstance(plain, FunctionType) and any(isinstance(value, torch.autocast) for value in closure_of(plain))
    return _is_of_known_package(function) and not is_autocast


class StoredWeights:
    """The weights of a model in this process, whose checksum is computed when needed.

    Pickling or copying replaces the object by its checksum, a str.

    Args:
        module: the model.

    Attributes:
        module: the model.

    Examples:
        >>> module = torch.nn.Linear(2, 2)
        >>> str(StoredWeights(module)) == hash_weights(module)
        True
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    @cached_property
    def _checksum(self) -> str:
        return hash_weights(self.module)

    def __str__(self) -> str:
        return self._checksum

    def again(self) -> StoredWeights:
        """A new `StoredWeights` of the same module, without the stored checksum."""
        return StoredWeights(self.module)

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self._checksum,)


@torch.no_grad()
def hash_weights(module: torch.nn.Module) -> str:
    """Checksum of weights and module settings; "" if not all weights are in this process.

    It has 12 hex digits and covers all bytes of parameters and buffers, and each module's class and attributes (numbers, texts,
    tensors, functions, objects of users' classes and collections of them), such as the epsilon of a norm or the scaling of a
    LoRA adapter. Code of classes counts if it is neither Python's, PyTorch's nor of a library that loads and runs models.

    Equal bits have equal checksums on every device and in every memory layout. Dtypes, shapes and the order of the tensors
    count, names do not. For quantised weights, the stored integers and scales count. Weights that accelerate has offloaded are
    read one by one from the memory or the disk that holds them. The checksum guards against mistakes, not attackers.

    Args:
        module: the model. Sharded tensors (`DTensor`) and weights that were not loaded give "".

    Examples:
        >>> module = torch.nn.Linear(2, 2)
        >>> before = hash_weights(module)
        >>> module.weight.data[0, 0] += 1e-3
        >>> hash_weights(module) == before
        False
    """
    checksum = hashlib.sha256()
    digests: dict[int, bytes] = {}
    count = 0
    modules = every_module(module)
    for tensor, is_held in _stored_tensors(modules):
        if tensor.is_meta or hasattr(tensor, "placements"):
            return ""
        # Tied weights are one tensor. The address of one that is read or made for the checksum may be that of the next.
        digest = digests[id(tensor)] if id(tensor) in digests else digest_of_tensor(tensor)
        if is_held:
            digests[id(tensor)] = digest
        checksum.update(digest)
        count += 1
    module_names = {id(submodule): f"module {number}" for number, submodule in enumerate(modules)}
    texts = ObjectTexts(ValueNames(module_names))
    for submodule in modules:
        # Modules that are used twice count twice.
        children = [module_names[id(child)] for child in submodule._modules.values() if child is not None]
        checksum.update(repr([texts.settings(submodule), children]).encode())
    return checksum.hexdigest()[:12] if count else ""


def _stored_tensors(modules: Sequence[torch.nn.Module]) -> Iterator[tuple[Tensor, bool]]:
    """The tensors that determine a model's output, in the order of its modules, each with a flag.

    The flag is True for parameters and buffers that modules hold. Weights that were not loaded are on the meta device.
    """
    offloaded = _offloaded(modules)
    for submodule in modules:
        if is_quantised(submodule):
            # bitsandbytes and HQQ keep scales in objects of their own, which the state dict contains.
            for value in submodule.state_dict().values():
                if isinstance(value, Tensor):
                    for part in plain_parts(value):
                        yield part, False
            continue
        for name, value in [*submodule._parameters.items(), *submodule._buffers.items()]:
            if value is None or _is_recomputed(submodule, name):
                continue
            offloaded_copy: Tensor | None = None
            if value.is_meta:
                copies = [weights_map.get(prefix + name) for weights_map, prefix in offloaded.get(submodule, ())]
                offloaded_copy = next((copy for copy in copies if isinstance(copy, Tensor)), None)
            if offloaded_copy is None:
                yield value, True
            else:
                yield offloaded_copy, False


def _offloaded(modules: Sequence[torch.nn.Module]) -> dict[torch.nn.Module, list[tuple[Any, str]]]:
    """Where accelerate offloaded the weights: a dict from module to pairs (`weights_map`, prefix of the keys)."""
    places: dict[torch.nn.Module, list[tuple[Any, str]]] = {}
    for holder in modules:
        accelerate_hook = vars(holder).get("_hf_hook")
        # A sequence of hooks has them in `hooks`.
        for hook in getattr(accelerate_hook, "hooks", (accelerate_hook,)):
            weights_map = getattr(hook, "weights_map", None)
            if hook is None or weights_map is None:
                continue
            submodules = holder.named_modules() if hook.place_submodules else [("", holder)]
            for path, submodule in submodules:
                places.setdefault(submodule, []).append((weights_map, f"{path}." if path else ""))
    return places


def _is_recomputed(module: torch.nn.Module, name: str) -> bool:
    """Whether forward passes recompute a buffer, such as frequencies that depend on the row length."""
    if name in module._parameters or not name.endswith("inv_freq") or name.endswith("original_inv_freq"):
        return False
    rope_type = getattr(module, "rope_type", None)
    # One for each kind of layer, in models of local and global attention.
    rope_types = rope_type.values() if isinstance(rope_type, dict) else (rope_type,)
    return any(kind is not None and ("dynamic" in kind or kind == "longrope") for kind in rope_types)
