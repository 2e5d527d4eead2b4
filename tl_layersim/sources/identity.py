"""Identity of a model: a checksum of its weights, and changes such as hooks."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterator
from functools import cache, cached_property, partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules import module as torch_module

from ..core.code_digests import ValueNames, defined_in
from ..core.errors import LayersimError
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
# Packages whose hooks belong to how a model is loaded, divided and read. The last has the placeholder of a pickled `ProbeHook`.
OWN_PACKAGES = (
    *("tl_layersim.", "nnsight.", "accelerate.", "transformers.", "transformer_lens.", "peft.", "bitsandbytes.", "deepspeed."),
    *("torch.nn.utils.", "torch.nn.parallel.", "torch.distributed.", "torch.ao.", "torch.utils.", "torch._dynamo."),
    "contextlib.",
)
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
        (f"{kind} of {path}", _user_function(hook))
        for sub, path in [*paths.items(), (None, "every module")]
        for kind, name in KINDS_OF_HOOKS.items()
        for hook in (getattr(torch_module, f"_global{name}") if sub is None else getattr(sub, name)).values()
    ]
    places += [(f"forward of {path}", _replaced_forward(sub)) for sub, path in paths.items()]
    found = []
    for place, function in places:
        if function is not None and not _is_own(function):
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
    return inspect.unwrap(hook, stop=lambda one: not _is_wrapper(one))


def _replaced_forward(module: torch.nn.Module) -> Any:
    """The function that replaces a module's forward; None if there is none."""
    forward = vars(module).get("forward")
    # nnsight puts an object in its place, whose body is that of the class, or a function that calls the other one.
    forward = getattr(getattr(forward, "state", None), "body", forward)

    def is_from_class(one: Any) -> bool:
        return getattr(one, "__func__", one) is type(module).forward

    if forward is None or is_from_class(forward):
        return None
    held = inspect.getclosurevars(forward).nonlocals if defined_in(forward).startswith("nnsight.") else {}
    forward = inspect.unwrap(held.get("forward", forward), stop=lambda one: is_from_class(one) or not _is_wrapper(one))
    return None if is_from_class(forward) else forward


def _is_own(function: Any) -> bool:
    return f"{defined_in(function)}.".startswith(OWN_PACKAGES)


def _is_wrapper(function: Any) -> bool:
    """Whether a function is a wrapper that a library defines."""
    # `functools.wraps` changes `__module__`, but not the globals.
    return f"{getattr(function, '__globals__', {}).get('__name__', '')}.".startswith(OWN_PACKAGES)


def _marked(change: str, names: ValueNames) -> str:
    return f"{change} with {', '.join(dict.fromkeys(names.unknown))}, {UNKNOWN}" if names.unknown else change


# Words of 8 bytes whose products with multipliers are added to one number. Intermediate products of `ROWS_ON_CPU` rows for each
# thread stay in the cache of a processor; a GPU takes more rows at a time.
WORDS, ROWS_ON_CPU, ROWS_ON_GPU = 1024, 32, 8192
# Attributes of modules that loading, placing, hooking or running a model changes, and that no number depends on.
PASSING = {"gradient_checkpointing", "name_or_path", "hf_device_map", "max_seq_len_cached"}
PASSING |= {"fwd_hooks", "bwd_hooks", "ctx", "context_level"}  # of hook points of TransformerLens
PASSING |= {*vars(torch.nn.Module()), "_is_hf_initialized", "_output_capturing_hooks_installed", "_compiled_call_impl"}
# Private attributes by which layers of PEFT compute; others of libraries are of how a model was made.
PRIVATE = {"_active_adapter", "_disable_adapters"}


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

    Each row of `WORDS` words is multiplied with constants and added modulo 2^64, the lower and the upper half of each word
    with constants of their own: the multilinear hashing of Carter and Wegman (1979), "Universal classes of hash functions".
    Two tensors that differ have the same sum with a probability of at most 2^-32. SHA-256 joins the sums of all rows.

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
    texts = dict[int, tuple[Any, str | None]]()
    whole.update(repr([_settings_of(sub, texts) for sub in every_module(module)]).encode())
    return whole.hexdigest()[:12] if count else ""


def digest_of_tensor(tensor: Tensor) -> bytes:
    """SHA-256 of a tensor's dtype, shape and bytes.

    The bytes enter as weighted sums, see `hash_weights`.

    Args:
        tensor: a tensor of any dtype, on any device.
    """
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    # A tensor of one element counts as contiguous with any stride.
    flat = (flat if flat.stride() == (1,) else flat.clone(memory_format=torch.contiguous_format)).view(torch.uint8)
    per_row = 8 * WORDS
    rows = ROWS_ON_GPU if flat.is_cuda else ROWS_ON_CPU * torch.get_num_threads()
    whole = len(flat) - len(flat) % per_row
    sums = [_sums_of_rows(flat[start : min(start + rows * per_row, whole)]) for start in range(0, whole, rows * per_row)]
    if whole < len(flat):
        last = flat.new_zeros(per_row)
        last[: len(flat) - whole] = flat[whole:]
        sums.append(_sums_of_rows(last))
    if sums:
        digest.update(torch.cat(sums).cpu().numpy().astype("<i8").tobytes())
    return digest.digest()


def _sums_of_rows(flat: Tensor) -> Tensor:
    """A weighted sum (int64) of each row of `WORDS` 64-bit words in a tensor of bytes."""
    if flat.storage_offset() % 8:
        # Words begin at multiples of their size.
        flat = flat.clone()
    words = flat.view(torch.int64).view(-1, WORDS)
    lower, upper = (constants.to(words.device) for constants in _multipliers())
    sums: Tensor = (words * lower).add_((words >> 32).mul_(upper)).sum(-1)
    return sums


@cache
def _multipliers() -> tuple[Tensor, Tensor]:
    """Two tensors of `WORDS` pseudo-random odd 64-bit numbers (SplitMix64)."""
    numbers, state = [], 0
    for _ in range(2 * WORDS):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        z = (z ^ (z >> 31)) | 1
        numbers.append(z - 2**64 if z >= 2**63 else z)
    lower, upper = torch.tensor(numbers).view(2, WORDS)
    return lower, upper


def _settings_of(value: Any, known: dict[int, tuple[Any, str | None]]) -> list[Any]:
    """Texts that describe an object: its class, the user's code in the class, and its attributes.

    Args:
        value: the object.
        known: objects and classes with their texts, by `id`. The text of an object inside itself is None.
    """
    kind = type(value)
    if id(kind) not in known:
        inside = [getattr(item, "fget", getattr(item, "__func__", item)) for one in kind.__mro__ for item in vars(one).values()]
        own = [item for item in inside if isinstance(item, FunctionType) and not _is_of_library(item)]
        known[id(kind)] = kind, f"{kind.__module__}.{kind.__qualname__} {' '.join(map(ValueNames().function, own))}"
    private = PRIVATE if _is_of_library(kind) else vars(value)
    kept = {name for name in vars(value) if name in private or not name.startswith("_")} - PASSING
    # Libraries that place a model wrap its methods, such as `to`. `hooks_on` names a `forward` that is replaced.
    kept -= {name for name in kept if callable(getattr(kind, name, None))}
    texts = [(name, _text_of(vars(value)[name], known)) for name in sorted(kept)]
    return [known[id(kind)][1], *(one for one in texts if one[1] is not None)]


def _is_of_library(function: Any) -> bool:
    root = defined_in(function).partition(".")[0]
    return _is_own(function) or root == "torch" or root in sys.stdlib_module_names


def _text_of(value: Any, known: dict[int, tuple[Any, str | None]]) -> str | None:
    """Describe a value as text, so that equal values have equal texts.

    Modules, whose settings count on their own, and objects of libraries have none.
    """
    if isinstance(value, Tensor):
        return None if value.is_meta or hasattr(value, "placements") else digest_of_tensor(value).hex()
    if value is None or isinstance(
        value, str | bool | int | float | complex | np.generic | np.ndarray | FunctionType | BuiltinFunctionType | partial
    ):
        return repr(ValueNames().named(value))
    if id(value) in known:
        return known[id(value)][1]
    known[id(value)] = value, None
    text = None
    if isinstance(value, dict | list | tuple | set | frozenset):
        items = [list(item) for item in value.items()] if isinstance(value, dict) else value
        # Of a collection with other objects too, those with a text.
        texts = [one for item in items if (one := _text_of(item, known)) is not None]
        if texts or not items:
            text = str(texts if isinstance(value, list | tuple) else sorted(texts))
    elif not isinstance(value, torch.nn.Module | type) and not _is_of_library(type(value)) and hasattr(value, "__dict__"):
        text = str(_settings_of(value, known))
    known[id(value)] = value, text
    return text


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
