"""OperationMeter: floating-point operations, memory traffic and peak memory of torch code, operation by operation."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

aten = torch.ops.aten
# Not in torch's own table of formulas, which has the kernels of GPUs.
CPU_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu


class Operation(NamedTuple):
    """One kind of operation of a metered run.

    Attributes:
        part: what ran it, such as "forward", "head" or the name of an analyzer.
        dtype: of its first floating-point tensor; torch.int64 for operations on whole numbers.
        flops: floating-point operations of matrix products, convolutions and attention; 0 for others.
        moved: bytes of the tensors that it reads and writes; 0 for views.
    """

    part: str
    dtype: torch.dtype
    flops: int
    moved: int


class TooManyOperations(Exception):
    """More operations ran than the meter allows."""


class OperationMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types there
    """Counts FLOPs, memory traffic and live memory of all operations that run inside it, also on the meta device.

    FLOPs are those of torch's own formulas (`torch.utils.flop_counter`), a multiplication and an addition counted as two.
    Memory is that of the tensors that are alive, as allocators of GPUs count it; workspaces inside an operation are not seen.

    Args:
        weights: tensors that existed before and are not counted as memory.
        head: tensors whose products count as part "head".

    Attributes:
        part: name under which operations are counted.
        counts: how often each kind of operation ran.
        live: bytes of the tensors that were made inside and are alive.
        peak: the largest value of `live`.
        left: number of operations until `TooManyOperations` is raised; None for no limit.

    Examples:
        >>> import torch
        >>> with OperationMeter([]) as meter:
        ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
        >>> meter.flops(), meter.peak
        ({'': 48}, 104)
    """

    def __init__(self, weights: Iterable[Tensor], head: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.part, self.live, self.peak = "", 0, 0
        self.counts: Counter[Operation] = Counter()
        self.left: int | None = None
        self._weights = {_key(weight) for weight in weights}
        self._head = {_key(weight) for weight in head}
        self._alive: dict[int, weakref.ref[Any]] = {}

    def flops(self) -> dict[str, int]:
        """FLOPs by part."""
        total: dict[str, int] = {}
        for operation, count in self.counts.items():
            if operation.flops:
                total[operation.part] = total.get(operation.part, 0) + count * operation.flops
        return total

    @contextmanager
    def counting(self, part: str, most: int | None = None) -> Iterator[None]:
        """A context in which operations are counted under a name.

        Args:
            part: the name.
            most: number of operations after which `TooManyOperations` is raised; None for no limit.
        """
        before, self.part, self.left = self.part, part, most
        try:
            yield
        finally:
            self.part, self.left = before, None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket not in flop_registry and torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "CompositeImplicitAutograd"
        ):
            with self:
                return func.decompose(*args, **kwargs)
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise TooManyOperations
        out = func(*args, **kwargs)
        given, made = [*tensors_in(args), *tensors_in(kwargs.values())], list(tensors_in((out,)))
        keys = {_key(tensor) for tensor in given}
        is_new = False
        for tensor in made:
            if _key(tensor) not in keys:
                self._note(tensor)
                is_new = True
        # A view moves nothing, and an operation in place writes what it was given.
        if is_new or func._schema.is_mutable:
            flops = _flops(func.overloadpacket, args, kwargs, out)
            moved = sum(tensor.numel() * tensor.element_size() for tensor in (*given, *(made if is_new else ())))
            floats = [tensor.dtype for tensor in (*given, *made) if tensor.dtype.is_floating_point]
            part = "head" if flops and keys & self._head else self.part
            self.counts[Operation(part, floats[0] if floats else torch.int64, flops, moved)] += 1
        return out

    def _note(self, tensor: Tensor) -> None:
        """Count the memory of a tensor until it is freed."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or key in self._weights:
            return

        def freed(_: Any) -> None:
            self.live -= size
            self._alive.pop(key, None)

        self._alive[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments of an operation, also inside lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def _key(tensor: Tensor) -> int:
    """Identifies the memory of a tensor."""
    return int(tensor.untyped_storage()._cdata)


def _flops(packet: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> int:
    if packet is CPU_ATTENTION:
        query, key, value = (tuple(each.shape) for each in args[:3])
        # Grouped queries share keys and values.
        formula: Any = sdpa_flop_count
        return int(formula(query, (*query[:2], *key[2:]), (*query[:2], *value[2:])))
    return int(flop_registry[packet](*args, **kwargs, out_val=out)) if packet in flop_registry else 0
