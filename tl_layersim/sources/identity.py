"""Identity of a model: a checksum of its weights, and changes such as hooks."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from functools import cached_property
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module

from ..core.code_digests import OWN_PACKAGES, ObjectTexts, ValueNames, closure_of, defined_in, forward_methods
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
    return "qweight" in module._buffers or not all(is_plain(p) for p in module._parameters.values() if p is not None)


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
    found = {path: type(sub).__name__ for path, sub in module.named_modules() if is_quantised(sub)}
    if found:
        kinds = ", ".join(sorted(set(found.values())))
        raise LayersimError(f"{what}: {len(found)} modules ({kinds}), such as {next(iter(found))}. Use {do}.")


# Attributes of a module, or of torch for all modules, that hold hooks.
KINDS_OF_HOOKS = {
    "forward hook": "_forward_hooks",
    "forward pre-hook": "_forward_pre_hooks",
    "backward hook": "_backward_hooks",
    "backward pre-hook": "_backward_pre_hooks",
}
EDIT, UNKNOWN = "nnsight edit", "whose contents are unknown"


def hooks_on(module: torch.nn.Module) -> str:
    """Describe a model's hooks and replaced forward methods as text.

    Each entry has the place, the qualified name, and a digest of code and captured values. Hooks of this package, nnsight,
    accelerate, transformers, TransformerLens and torch are left out. Hooks that users add to hook points of TransformerLens
    count, and so do hooks that only observe.

    Args:
        module: the model.

    Returns:
        "" if there are none. `UNKNOWN` marks a hook that is not a function, or holds objects that cannot be named
        (`ValueNames`).

    Examples:
        >>> module = torch.nn.Linear(2, 2)
        >>> module._forward_hooks[0] = len
        >>> hooks_on(module).split(" sha256 ")[0]
        'forward hook of Linear: builtins.len'
    """
    paths = _paths(module)
    known = {id(sub): f"module {path}" for sub, path in paths.items()}
    places = [
        (f"{kind} of {path}", hook)
        for sub, path in [*paths.items(), (None, "every module")]
        for kind, name in KINDS_OF_HOOKS.items()
        for hook in (getattr(torch_module, f"_global{name}") if sub is None else getattr(sub, name)).values()
    ]
    changes = [(place, function) for place, hook in places if not _is_own(function := _user_function(hook))]
    for sub, path in paths.items():
        changes += [(f"{name} of {path}", function) for name, function in _replaced_methods(sub).items()]
    found = []
    for place, function in changes:
        names = ValueNames(known)
        found.append(_marked(f"{place}: {names.function(function)}", names))
    return "; ".join(found)


def edits_of(model: Any) -> str:
    """Describe the edits of an nnsight model (`model.edit()`) as text.

    Args:
        model: an nnsight model.

    Returns:
        "" if there are none. `UNKNOWN` marks an edit that holds objects that cannot be named (`ValueNames`).
    """
    from nnsight.intervention.serialization import reduce_block

    known = {id(envoy): f"envoy {envoy.path}" for envoy in model.modules()}
    known |= {id(sub): f"module {path}" for sub, path in _paths(model._module).items()}
    found = []
    for edit in model._edits:
        # An edit of a model that was deserialised has no source.
        source, *values = ("", {"edit": edit}) if edit.node is None else reduce_block(edit.node, edit.glbls, edit.lcls)
        envoys = [value for held in values for value in held.values() if hasattr(type(value), "interleave")]
        names = ValueNames(known | {id(sub): f"envoy {sub.path}" for envoy in envoys for sub in envoy.modules()})
        found.append(_marked(f"{EDIT} sha256 {names.digest(source.strip(), values)}", names))
    return "; ".join(found)


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
    inner = vars(module).get("original_model")
    more = inner.named_modules() if isinstance(inner, torch.nn.Module) else ()
    paths = {sub: f"original_model.{path}" for path, sub in more} | {sub: path for path, sub in module.named_modules()}
    return {sub: paths[sub] or type(sub).__name__ for sub in every_module(module)}


def _user_function(hook: Any) -> Any:
    """Remove wrappers by TransformerLens and `torch.no_grad()` from a hook, and return the function inside."""
    while defined_in(hook) == "transformer_lens.hook_points" and getattr(hook, "__closure__", None):
        held = dict(zip(hook.__code__.co_freevars, (cell.cell_contents for cell in hook.__closure__), strict=True))
        inner = held.get("hook", held.get("full_hook"))
        if inner is None:
            break
        hook = inner
    return inspect.unwrap(hook, stop=lambda inner: not _is_wrapper(inner))


def _replaced_methods(module: torch.nn.Module) -> dict[str, Any]:
    """The functions that replace a module's `forward`, or methods that its forward calls, by the name of the method."""
    methods = forward_methods(type(module))
    found = {}
    for name in ("forward", *(name for name in methods if name != "forward")):
        function = _replacement(module, name)
        if function is not None:
            found[name] = function
    return found


def _replacement(module: torch.nn.Module, name: str) -> Any:
    """The function that replaces a method of a module; None if there is none."""
    function, method = vars(module).get(name), getattr(type(module), name, None)
    # nnsight puts an object in the place of forward, whose body is that of the class, or a function that calls the other one.
    function = getattr(getattr(function, "state", None), "body", function)

    def is_from_class(function: Any) -> bool:
        # A method of another module computes with that module's weights.
        return getattr(function, "__func__", function) is method and getattr(function, "__self__", module) is module

    def is_of_another_module(function: Any) -> bool:
        owner = getattr(function, "__self__", None)
        return isinstance(owner, torch.nn.Module) and owner is not module

    def is_replacement(function: Any) -> bool:
        # A method that a library has wrapped has `__wrapped__`, which is a function without the module it is bound to.
        return is_from_class(function) or is_of_another_module(function) or not _is_wrapper(function)

    if not callable(function) or is_from_class(function):
        return None
    held = inspect.getclosurevars(function).nonlocals if defined_in(function).startswith("nnsight.") else {}
    function = held.get("forward", function)
    function = inspect.unwrap(function, stop=is_replacement)
    if is_from_class(function) or (_is_own(function) and not is_of_another_module(function)):
        return None
    return function


def _is_own(function: Any) -> bool:
    return f"{defined_in(function)}.".startswith(OWN_PACKAGES)


def _is_wrapper(function: Any) -> bool:
    """Whether a function is a wrapper of a library that leaves the numbers as they are. Autocast changes them."""
    inner = getattr(function, "__func__", function)
    changes = isinstance(inner, FunctionType) and any(isinstance(value, torch.autocast) for value in closure_of(inner))
    return _is_own(function) and not changes


def _marked(change: str, names: ValueNames) -> str:
    return f"{change} with {', '.join(dict.fromkeys(names.unknown))}, {UNKNOWN}" if names.unknown else change


class StoredWeights:
    """The weights of a model in this process, whose checksum is computed when needed.

    Pickling or copying replaces the object by its checksum, a str.

    Args:
        module: the model.

    Examples:
        >>> module = torch.nn.Linear(2, 2)
        >>> str(StoredWeights(module)) == hash_weights(module)
        True
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    @cached_property
    def _checksum(self) -> str:
        return hash_weights(self._module)

    def __str__(self) -> str:
        return self._checksum

    def again(self) -> StoredWeights:
        """A new `StoredWeights` of the same module, without the stored checksum."""
        return StoredWeights(self._module)

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
    whole, known, count = hashlib.sha256(), dict[int, bytes](), 0
    for tensor, is_own in _stored_tensors(module):
        if tensor.is_meta or hasattr(tensor, "placements"):
            return ""
        # Tied weights are one tensor. The address of one that is read or made for the checksum may be that of the next.
        digest = known[id(tensor)] if id(tensor) in known else digest_of_tensor(tensor)
        known |= {id(tensor): digest} if is_own else {}
        whole.update(digest)
        count += 1
    modules = every_module(module)
    numbers = {id(sub): f"module {number}" for number, sub in enumerate(modules)}
    texts = ObjectTexts(ValueNames(numbers))
    for sub in modules:
        # Modules that are used twice count twice.
        children = [numbers[id(child)] for child in sub._modules.values() if child is not None]
        whole.update(repr([texts.settings(sub), children]).encode())
    return whole.hexdigest()[:12] if count else ""


def _stored_tensors(module: torch.nn.Module) -> Iterator[tuple[Tensor, bool]]:
    """The tensors that determine a model's output, in module order, each with a flag.

    The flag is True for parameters and buffers that modules hold. Weights that were not loaded are on the meta device.
    """
    holders = _offloaded(module)
    for sub in every_module(module):
        if is_quantised(sub):
            # bitsandbytes and HQQ keep scales in objects of their own, which the state dict contains.
            stored = [value for value in sub.state_dict().values() if isinstance(value, Tensor)]
            yield from ((part, False) for value in stored for part in plain_parts(value))
            continue
        for name, value in [*sub._parameters.items(), *sub._buffers.items()]:
            if value is None or _is_recomputed(sub, name):
                continue
            held = [weights.get(path + name) for weights, path in holders.get(sub, ())] if value.is_meta else []
            read = next((one for one in held if isinstance(one, Tensor)), None)
            yield (value, True) if read is None else (read, False)


def _offloaded(module: torch.nn.Module) -> dict[torch.nn.Module, list[tuple[Any, str]]]:
    """Where accelerate offloaded the weights: a dict from module to pairs (`weights_map`, prefix of the keys)."""
    found: dict[torch.nn.Module, list[tuple[Any, str]]] = {}
    for holder in every_module(module):
        hook = vars(holder).get("_hf_hook")
        for one in getattr(hook, "hooks", (hook,)):
            weights = getattr(one, "weights_map", None)
            if one is None or weights is None:
                continue
            inside = holder.named_modules() if one.place_submodules else [("", holder)]
            for path, sub in inside:
                found.setdefault(sub, []).append((weights, f"{path}." if path else ""))
    return found


def _is_recomputed(module: torch.nn.Module, name: str) -> bool:
    """Whether forward passes recompute a buffer, such as frequencies that depend on the row length."""
    if name in module._parameters or not name.endswith("inv_freq") or name.endswith("original_inv_freq"):
        return False
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
    return any(kind is not None and ("dynamic" in kind or kind == "longrope") for kind in kinds)
