"""How the forward passes of a model compute: precision, kinds of attention, versions of libraries."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch

from ..core.code_digests import ValueNames, is_of_library, version_of
from .hooks import every_module

# Names under which configurations of Hugging Face say how attention and mixtures of experts are computed.
IMPLEMENTATIONS = ("_attn_implementation", "_experts_implementation")
# Registries of transformers, which users extend by functions of their own.
REGISTRIES = {
    "transformers.modeling_utils": "ALL_ATTENTION_FUNCTIONS",
    "transformers.masking_utils": "ALL_MASK_ATTENTION_FUNCTIONS",
}
# Settings of torch by device type, each with the values that it has at torch's start.
FLOAT32 = ("none", "ieee")
SETTINGS: dict[str, dict[str, tuple[Any, ...]]] = {
    "cpu": {"mkldnn.matmul.fp32_precision": FLOAT32, "mkldnn.conv.fp32_precision": FLOAT32},
    "cuda": {
        "cuda.matmul.fp32_precision": FLOAT32,
        "cuda.matmul.allow_tf32": (False,),
        "cudnn.conv.fp32_precision": ("tf32",),
        "cuda.matmul.allow_fp16_reduced_precision_reduction": (True,),
        "cuda.matmul.allow_bf16_reduced_precision_reduction": (True,),
        "cuda.matmul.allow_fp16_accumulation": (False,),
    },
}
# Kinds of scaled dot-product attention by device type.
KERNELS = {"cpu": ("flash", "math"), "cuda": ("flash", "math", "mem_efficient", "cudnn")}


def computation_of(modules: Iterable[torch.nn.Module]) -> dict[str, Any]:
    """What changes the numbers of a forward pass beside weights, code and rows, as plain data.

    Settings that have the value of torch's start are left out, and so are settings of devices that hold no weights: a model on
    another device has the same description. Settings that change no more than the order of additions, such as the number of
    threads and deterministic algorithms, are left out too.

    Args:
        modules: the models.

    Returns:
        By name: "autocast", the dtypes of automatic mixed precision that is on; "default_dtype"; "settings" of torch that
        differ from its start; "attention", the kinds of attention and of experts; "libraries", the versions of torch and of the
        packages that define the modules.

    Examples:
        >>> import torch
        >>> module = torch.nn.Linear(2, 2)
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     computation_of([module])["autocast"]
        ['torch.bfloat16']
        >>> computation_of([module])["autocast"]
        []
    """
    submodules: list[torch.nn.Module] = []
    for module in modules:
        submodules += every_module(module)
    devices = _device_types(submodules)
    autocast_dtypes = {str(torch.get_autocast_dtype(device)) for device in devices if torch.is_autocast_enabled(device)}
    packages = {"torch"} | {type(submodule).__module__.partition(".")[0] for submodule in submodules}
    versions = {package: version_of(package) for package in sorted(packages - {"tl_layersim"})}
    return {
        "autocast": sorted(autocast_dtypes),
        "default_dtype": str(torch.get_default_dtype()),
        "settings": dict(sorted(_changed_settings(devices))),
        "attention": _kinds_of_attention(submodules),
        "libraries": {package: version for package, version in versions.items() if version},
    }


def _device_types(submodules: Iterable[torch.nn.Module]) -> list[str]:
    """Types of the devices that hold weights. Weights on the meta device are computed on a device that is not known."""
    types: set[str] = set()
    for submodule in submodules:
        for tensor in (*submodule._parameters.values(), *submodule._buffers.values()):
            if tensor is not None:
                types.add(tensor.device.type)
    if not types - {"meta"} or "meta" in types:
        types.add("cpu")
        if torch.cuda.is_available():
            types.add("cuda")
    return sorted(types - {"meta"})


def _changed_settings(devices: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Settings of torch that differ from its start, with their values."""
    for device in devices:
        for path, usual in SETTINGS.get(device, {}).items():
            # Older versions lack some settings, and torch cannot read some of those that were set in its older way.
            with suppress(AttributeError, RuntimeError):
                value: Any = torch.backends
                for name in path.split("."):
                    value = getattr(value, name)
                if value not in usual:
                    yield path, str(value)
        for kind in KERNELS.get(device, ()):
            is_on = getattr(torch.backends.cuda, f"{kind}_sdp_enabled", None)
            if is_on is not None and not is_on():
                yield f"{kind} attention", "off"
    with suppress(RuntimeError):
        precision = torch.get_float32_matmul_precision()
        if precision != "highest":
            yield "float32_matmul_precision", precision
    if not torch.backends.mha.get_fastpath_enabled():
        yield "fast path of attention", "off"


def _kinds_of_attention(submodules: Iterable[torch.nn.Module]) -> list[str]:
    """Kinds of attention, then of experts, in the configurations of modules, with names of functions of the user."""
    texts: list[str] = []
    for name in IMPLEMENTATIONS:
        kind_of_module: list[str] = []
        for submodule in submodules:
            kind = getattr(vars(submodule).get("config"), name, None)
            if kind is not None:
                kind_of_module.append(str(kind))
        kinds = list(dict.fromkeys(kind_of_module))
        for kind in kinds:
            texts.append(" ".join([kind, *_user_functions(kind)]))
        if len(kinds) > 1:
            # Of several kinds, the modules that compute by each count.
            texts.append(hashlib.sha256(repr(kind_of_module).encode()).hexdigest()[:12])
    return texts


def _user_functions(kind: str) -> Iterator[str]:
    """Names of functions of the user that transformers calls for a kind of attention."""
    for module, name in REGISTRIES.items():
        registry: Any = getattr(sys.modules.get(module), name, {})
        function = registry.get(kind)
        if function is not None and not is_of_library(function):
            yield ValueNames().function(function)
