"""Quantised weights: the modules of a model that hold them, their stored tensors, and refusals of what needs plain weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..core.errors import LayersimError

# Packed weights of GPTQ and AWQ, which are buffers.
PACKED = "qweight"
EIGHT_BIT_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)


def is_plain(parameter: Tensor) -> bool:
    """Whether a parameter is stored as the numbers that it stands for: not as integers, 8-bit floats or packed tensors.

    Examples:
        >>> import torch
        >>> is_plain(torch.zeros(2, 2)), is_plain(torch.zeros(2, 2, dtype=torch.int8))
        (True, False)
    """
    # Tensors that are sharded over processes are a subclass too.
    packed = hasattr(parameter, "__tensor_flatten__") and not hasattr(parameter, "placements")
    return parameter.is_floating_point() and parameter.dtype not in EIGHT_BIT_FLOATS and not packed


def quantised_among(modules: Sequence[torch.nn.Module]) -> set[torch.nn.Module]:
    """Those of some modules whose own weights are quantised.

    Args:
        modules: their submodules do not count.
    """
    found = {module for module in modules if PACKED in module._buffers}
    # Whether a parameter is plain depends on its class and dtype alone, of which a model has few.
    holders: dict[tuple[type, torch.dtype], tuple[Tensor, set[torch.nn.Module]]] = {}
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault((type(parameter), parameter.dtype), (parameter, set()))[1].add(module)
    return found.union(*(held for parameter, held in holders.values() if not is_plain(parameter)))


def quantised_modules(module: torch.nn.Module) -> list[str]:
    """Paths of the modules whose weights are quantised: by torchao, bitsandbytes, GPTQ, AWQ, HQQ, Quanto and similar packages.

    Args:
        module: the model.

    Examples:
        >>> import torch
        >>> quantised_modules(torch.nn.Sequential(torch.nn.Linear(2, 2)))
        []
    """
    found = quantised_among(list(module.modules()))
    return [path for path, sub in module.named_modules() if sub in found]


def plain_parts(value: Tensor) -> Iterator[Tensor]:
    """The plain tensors of which a tensor subclass consists; the tensor itself where it is plain.

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
    """Refuse a model with quantised weights for what needs plain ones.

    Args:
        module: the model.
        what: what is refused, as a sentence without its full stop.
        do: the call to make instead.

    Raises:
        LayersimError: the model has quantised weights.
    """
    paths = quantised_modules(module)
    if paths:
        kinds = sorted({type(module.get_submodule(path)).__name__ for path in paths})
        raise LayersimError(f"{what}: {len(paths)} modules ({', '.join(kinds)}), such as {paths[0]}. Use {do}.")
