"""Models on the meta device: a source that runs a model without weights, and stand-ins for value-dependent operations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..activations.view import tokens_alone
from ..core.errors import warn
from ..data.batches import Batch
from .hooked import HookedSource
from .named_model import load_without_weights, model_of_config

# Attention on a CPU, which holds no `pos pos` weights.
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
# Fields of a config.json that transformers converts to others.
OLDER_FIELDS = ("rope_theta", "rope_scaling", "torch_dtype", "auto_map")


def has_no_weights(module: torch.nn.Module) -> bool:
    """Whether all parameters of a model are on the meta device."""
    parameters = list(module.parameters())
    # accelerate loads offloaded weights when they are needed.
    offloaded = any(hasattr(sub, "_hf_hook") for sub in module.modules())
    return bool(parameters) and all(parameter.is_meta for parameter in parameters) and not offloaded


def model_without_weights(config: Any) -> torch.nn.Module:
    """Build a model on the meta device, with shapes but without values.

    Args:
        config: a configuration of transformers, its fields as a mapping with "model_type", or the folder or hub name of a
            model.

    Raises:
        LayersimError: there is no such model, or the mapping has no known "model_type".
    """
    import transformers

    if isinstance(config, str):
        module: torch.nn.Module = load_without_weights(config, False, "model_or_config")
        return module.eval()
    if isinstance(config, Mapping):
        given = dict(config)
        kind = given.pop("model_type", None)
        config = transformers.AutoConfig.for_model(kind, **given)
        _warn_of_unknown_fields(config, given)
    module = model_of_config(config)
    return module.eval()


def _warn_of_unknown_fields(config: Any, given: Mapping[str, Any]) -> None:
    """Warn if fields are unknown to the configuration class, because a misspelt field silently leaves its default."""
    cls = type(config)
    known = {*cls().to_dict(), *cls.attribute_map, *OLDER_FIELDS}
    unknown = [name for name in given if name not in known and not name.startswith("_") and not name.endswith("_token_id")]
    if unknown:
        warn(f"`model_or_config` has fields that {cls.__name__} does not know and that change nothing: {', '.join(unknown)}.")


class WeightlessSource(HookedSource):
    """A source that runs a model on the meta device, where tensors have shapes but no values.

    Forward passes and kernels run as in `analyze`, inside `without_values`.
    """

    def _check_weights(self, model: torch.nn.Module) -> None:
        """Accept every model, because weights are not needed."""

    def count_positions(self, batch: Batch) -> int:
        with without_values():
            return super().count_positions(batch)

    def _token_fields(self, batch: Batch, device: torch.device) -> dict[str, Tensor]:
        # They keep their values, on which minibatches and targets depend.
        return tokens_alone(batch).token_fields()


@contextmanager
def without_values() -> Iterator[None]:
    """A context manager in which code with value-dependent branches runs on meta tensors.

    Values are assumed to be typical: activations are finite and differ from one another, no sample is degenerate. `all()` of a
    comparison is then true, `any()` false, and a comparison selects every element.
    """
    with _PythonValues(), _TensorValues():  # type: ignore[no-untyped-call]  # torch has no types there
        yield


class _PythonValues(TorchFunctionMode):
    """Replaces functions that read values in Python, and attention, which would allocate `pos pos` weights."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.tolist and args[0].is_meta:
            return []
        if func is torch.nn.functional.scaled_dot_product_attention and len(args) == 3 and args[0].is_meta:
            query, key, value = args
            return CPU_ATTENTION(query, key, value)[0] if query.shape[-1] == value.shape[-1] else func(*args, **kwargs)
        return func(*args, **kwargs)


class _TensorValues(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as above
    """Replaces tensor operations whose results depend on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name == "_to_copy" and given[0].dtype == torch.bool and not given[0].is_meta and _to_meta(kwargs):
            return _with_fraction(func(*args, **kwargs), float(given[0].double().mean()) if given[0].numel() else 1.0)
        if not any(tensor.is_meta for tensor in given):
            return func(*args, **kwargs)
        if name == "_local_scalar_dense":
            return _typical(given[0])
        if name == "_to_copy" and "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        if name == "index":
            return self._index(func, *args)
        if name == "nonzero":
            return args[0].new_empty(_true_in(args[0]), args[0].dim(), dtype=torch.int64)
        args, kwargs = tree_map_only(Tensor, _moved, (args, kwargs)) if not all(t.is_meta for t in given) else (args, kwargs)
        if name == "bincount":
            return args[0].new_empty(kwargs.get("minlength", args[2] if len(args) > 2 else 0), dtype=torch.int64)
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and out.dtype == torch.bool:
            fractions = [_fraction(tensor) for tensor in given if tensor.dtype == torch.bool]
            _with_fraction(out, {"any": 0.0, "all": 1.0}.get(name, _negated(name, min(fractions, default=1.0))))
        return out

    def _index(self, func: Any, x: Tensor, indices: list[Tensor | None]) -> Tensor:
        """Indexing in which masks select a typical number of elements."""
        whole: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype != torch.bool:
                whole.append(None if index is None else index.to("meta"))
            else:
                count = _true_in(index) if index.is_meta else int(index.sum())
                whole += [torch.empty(count, dtype=torch.int64, device="meta")] * index.dim()
        out: Tensor = func(x.to("meta"), whole)
        return _with_fraction(out, _fraction(x)) if x.dtype == torch.bool else out


def _to_meta(kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta"


def _moved(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.to("meta")


def _with_fraction(mask: Tensor, fraction: float) -> Tensor:
    """Record on a mask the fraction of its elements that is True."""
    mask.fraction_true = fraction  # type: ignore[attr-defined]  # meta tensors have no values that say so
    return mask


def _fraction(mask: Tensor) -> float:
    return float(getattr(mask, "fraction_true", 1.0))


def _true_in(mask: Tensor) -> int:
    return round(_fraction(mask) * mask.numel())


def _negated(name: str, fraction: float) -> float:
    return 1.0 - fraction if name in ("bitwise_not", "logical_not") else fraction


def _typical(number: Tensor) -> bool | int | float:
    """A typical value of a tensor of one element."""
    if number.dtype == torch.bool:
        return _fraction(number) > 0
    return 1.0 if number.dtype.is_floating_point else 1
