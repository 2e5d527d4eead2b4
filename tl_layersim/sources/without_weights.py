"""Models on the meta device: a source for them, and replacements of operations that need tensor values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..data.batches import Batch
from .hooked_module import HookedSource

# Attention on a CPU, which holds no `pos pos` weights.
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def has_no_weights(module: torch.nn.Module) -> bool:
    """Whether all parameters of a model are on the meta device."""
    parameters = list(module.parameters())
    # accelerate loads offloaded weights when they are needed.
    offloaded = any(hasattr(sub, "_hf_hook") for sub in module.modules())
    return bool(parameters) and all(parameter.is_meta for parameter in parameters) and not offloaded


class WeightlessSource(HookedSource):
    """A source of a model on the meta device, whose tensors have no values.

    Forward passes and kernels run as in `analyze`, inside `without_values`.
    """

    def count_positions(self, batch: Batch) -> int:
        with without_values():
            return super().count_positions(batch)


@contextmanager
def without_values() -> Iterator[None]:
    """A context manager in which code with value-dependent branches runs on meta tensors.

    Values are assumed to be typical: activations are finite and differ from one another, no sample is degenerate. `all()` of a
    comparison is then true, `any()` false, and a comparison selects every element.
    """
    with _PythonValues(), _TensorValues():  # type: ignore[no-untyped-call]  # torch has no types there
        yield


class _PythonValues(TorchFunctionMode):
    """Torch function mode that replaces `tolist` and attention if tensors are on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.tolist and args[0].is_meta:
            return []
        if func is torch.nn.functional.scaled_dot_product_attention and len(args) == 3 and args[0].is_meta:
            query, key, value = args
            if query.shape[-1] == value.shape[-1]:
                return CPU_ATTENTION(query, key, value)[0]
        return func(*args, **kwargs)


class _TensorValues(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as above
    """Torch dispatch mode that replaces operations on meta tensors if their results depend on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name == "_to_copy" and tensors[0].dtype == torch.bool and not tensors[0].is_meta:
            mask = tensors[0]
            out = func(*args, **kwargs)
            if not out.is_meta:
                return out
            return _with_fraction(out, float(mask.double().mean()) if mask.numel() else 1.0)
        if not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        if name == "_local_scalar_dense":
            [number] = tensors
            if number.dtype == torch.bool:
                return _fraction_true(number) > 0
            return 1.0 if number.dtype.is_floating_point else 1
        if name == "_to_copy" and "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        if name == "index":
            return self._index(func, *args)
        if name == "nonzero":
            return args[0].new_empty(_count_true(args[0]), args[0].dim(), dtype=torch.int64)
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        if name == "bincount":
            bins = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
            return args[0].new_empty(bins, dtype=torch.int64)
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and out.dtype == torch.bool:
            fraction = min((_fraction_true(tensor) for tensor in tensors if tensor.dtype == torch.bool), default=1.0)
            if name in ("bitwise_not", "logical_not"):
                fraction = 1.0 - fraction
            elif name == "any":
                fraction = 0.0
            elif name == "all":
                fraction = 1.0
            _with_fraction(out, fraction)
        return out

    def _index(self, func: Any, x: Tensor, indices: list[Tensor | None]) -> Tensor:
        """Index a tensor; a mask selects its recorded fraction of elements."""
        meta_indices: list[Tensor | None] = []
        for index in indices:
            if index is None:
                meta_indices.append(None)
            elif index.dtype != torch.bool:
                meta_indices.append(index.to("meta"))
            else:
                # A mask is as many integer indices as it has axes.
                count = _count_true(index) if index.is_meta else int(index.sum())
                meta_indices += [torch.empty(count, dtype=torch.int64, device="meta")] * index.dim()
        out: Tensor = func(x.to("meta"), meta_indices)
        return _with_fraction(out, _fraction_true(x)) if x.dtype == torch.bool else out


def _with_fraction(mask: Tensor, fraction: float) -> Tensor:
    """Set `mask.fraction_true`, the fraction of True elements, and return the mask."""
    mask.fraction_true = fraction  # type: ignore[attr-defined]  # meta tensors have no values that say so
    return mask


def _fraction_true(mask: Tensor) -> float:
    return float(getattr(mask, "fraction_true", 1.0))


def _count_true(mask: Tensor) -> int:
    return round(_fraction_true(mask) * mask.numel())
