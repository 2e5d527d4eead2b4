"""Checksums of a model: of all bytes of its weights, offloaded ones too, and of the classes and settings of its modules."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache, cached_property, partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.function_code import digest_of_code
from .hooks import every_module
from .quantised import plain_parts, quantised_among

# Words of 8 bytes whose products with multipliers are added to one number. Intermediate products of `ROWS_ON_CPU` rows for each
# thread stay in the cache of a processor; a GPU takes more rows at a time.
WORDS, ROWS_ON_CPU, ROWS_ON_GPU = 1024, 32, 8192
# Attributes of modules that loading, placing, hooking or running a model changes, and that no number depends on.
PASSING = {"training", "gradient_checkpointing", "name_or_path", "hf_device_map", "max_seq_len_cached"}
PASSING |= {"fwd_hooks", "bwd_hooks", "ctx", "context_level"}  # of hook points of TransformerLens
# Private attributes by which layers of PEFT compute; others are of how a model was made.
PRIVATE = {"_active_adapter", "_disable_adapters"}


class StoredWeights:
    """The weights of a model in this process. Their checksum is computed when it is first read, and then kept.

    A pickled or copied object is the text of its checksum.

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
        """The same weights, without the checksum that was computed of them."""
        return StoredWeights(self._module)

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self._checksum,)


@torch.no_grad()
def hash_weights(module: torch.nn.Module) -> str:
    """Checksum of a model's weights and of the modules that compute with them; "" if the weights are not all in this process.

    All bytes of parameters and buffers count, and of each module its class and its attributes that are numbers, texts or
    collections of them, such as the epsilon of a norm or the scaling of a LoRA adapter. It has 12 hex digits.

    Equal bits have equal checksums on every device and in every memory layout. Dtypes, shapes and the order of the tensors
    count, names do not. Of quantised weights the stored integers and scales are taken. Weights that accelerate has offloaded
    are read one by one from the memory or the disk that holds them. The checksum guards against mistakes, not attackers.

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
    whole.update(repr([_settings_of(sub) for sub in every_module(module)]).encode())
    return whole.hexdigest()[:12] if count else ""


def digest_of_tensor(tensor: Tensor) -> bytes:
    """SHA-256 of a tensor's dtype and shape, and of the sums of its rows of words, see `hash_weights`.

    Args:
        tensor: of any dtype, on any device.
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
    """For each row of `WORDS` words, here as bytes, the sum of the words' products with constants."""
    if flat.storage_offset() % 8:
        # Words begin at multiples of their size.
        flat = flat.clone()
    words = flat.view(torch.int64).view(-1, WORDS)
    lower, upper = (constants.to(words.device) for constants in _multipliers())
    sums: Tensor = (words * lower).add_((words >> 32).mul_(upper)).sum(-1)
    return sums


@cache
def _multipliers() -> tuple[Tensor, Tensor]:
    """Two rows of `WORDS` odd numbers of 64 bits without a pattern, the same in every version of torch: SplitMix64."""
    numbers, state = [], 0
    for _ in range(2 * WORDS):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        z = (z ^ (z >> 31)) | 1
        numbers.append(z - 2**64 if z >= 2**63 else z)
    lower, upper = torch.tensor(numbers).view(2, WORDS)
    return lower, upper


def _settings_of(module: torch.nn.Module) -> tuple[str, list[tuple[str, str]]]:
    """A module's class, and the names and texts of its plain attributes."""
    kept = {name for name in vars(module) if name in PRIVATE or not name.startswith("_")} - PASSING
    # Libraries that place a model wrap its methods, such as `to`. `model_changes` names a `forward` that is replaced.
    kept -= {name for name in kept if callable(getattr(type(module), name, None))}
    plain = [(name, text) for name in sorted(kept) if (text := _plain_text(vars(module)[name])) is not None]
    return f"{type(module).__module__}.{type(module).__qualname__}", plain


def _plain_text(value: Any) -> str | None:
    """Text of a number, a text, a function, or a collection of them, in an order of its own; None for other objects."""
    if value is None or isinstance(value, str | bool | int | float | complex | np.generic):
        return repr(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, partial):
        return _plain_text([value.func, value.args, value.keywords])
    if isinstance(value, FunctionType | BuiltinFunctionType):
        code = digest_of_code([value]) if isinstance(value, FunctionType) else ""
        return f"{value.__module__}.{value.__qualname__} {code}"
    items = [list(item) for item in value.items()] if isinstance(value, dict) else value
    if not isinstance(items, list | tuple | set | frozenset):
        return None
    # Of a collection with other objects too, the plain ones.
    known = [text for item in items if (text := _plain_text(item)) is not None]
    return None if items and not known else str(known if isinstance(value, list | tuple) else sorted(known))


def _stored_tensors(module: torch.nn.Module) -> Iterator[tuple[Tensor, bool]]:
    """The tensors that determine what a model computes, in the order of its modules, and whether a module holds the tensor.

    Weights that were not loaded are on the meta device.
    """
    holders, modules = _offloaded(module), every_module(module)
    quantised = quantised_among(modules)
    for sub in modules:
        if sub in quantised:
            # bitsandbytes and HQQ keep scales in objects of their own, which the state dict contains.
            stored = [value for value in sub.state_dict().values() if isinstance(value, Tensor)]
            yield from ((part, False) for value in stored for part in plain_parts(value))
            continue
        for name, value in [*sub._parameters.items(), *sub._buffers.items()]:
            if value is None or _is_recomputed(sub, name):
                continue
            held = [_held(weights, path + name) for weights, path in holders.get(sub, ())] if value.is_meta else []
            read = next((one for one in held if one is not None), None)
            yield (value, True) if read is None else (read, False)


def _offloaded(module: torch.nn.Module) -> dict[torch.nn.Module, list[tuple[Any, str]]]:
    """By module, the mappings in which accelerate keeps offloaded weights, with the path of the module in each."""
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


def _held(weights: Any, name: str) -> Tensor | None:
    """An offloaded tensor, read from where it is; None where the mapping does not hold it."""
    try:
        value = weights[name]
    except KeyError:
        return None
    return value if isinstance(value, Tensor) else None


def _is_recomputed(module: torch.nn.Module, name: str) -> bool:
    """Whether forward passes recompute a buffer: rotary frequencies that depend on the length of the row."""
    if name in module._parameters or not name.endswith("inv_freq") or name.endswith("original_inv_freq"):
        return False
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
    return any(kind is not None and ("dynamic" in kind or kind == "longrope") for kind in kinds)
