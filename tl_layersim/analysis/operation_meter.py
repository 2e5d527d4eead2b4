"""OperationMeter: FLOPs of torch code by torch's own formulas, and the most bytes that its tensors take at once."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from ..models.without_weights import CPU_ATTENTION


class OperationMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types there
    """Counts FLOPs and live memory of all operations that run inside it, also on the meta device.

    FLOPs are those of `torch.utils.flop_counter`, a multiplication and an addition counted as two. `FlopCounterMode` itself
    does not work with `torch.autograd.grad`, does not count attention on CPUs, and does not count by part. Memory is that of
    the tensors that are alive, as allocators of GPUs count it; workspaces inside an operation are not seen.

    Args:
        weights: tensors that existed before and are not counted as memory.
        head: tensors whose products count as part "head".

    Attributes:
        flops: by part.
        peak: most bytes of tensors that were made inside and were alive at once.

    Examples:
        >>> import torch
        >>> with OperationMeter([]) as meter, meter.counting("product"):
        ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
        >>> meter.flops["product"], meter.peak
        (48, 104)
    """

    def __init__(self, weights: Iterable[Tensor], head: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.flops: Counter[str] = Counter()
        self.live, self.peak = 0, 0
        self._part: tuple[str, Any] = "", 1
        self._weights, self._head = _storages(list(weights)), _storages(list(head))
        self._alive: dict[int, weakref.ref[Any]] = {}

    @contextmanager
    def counting(self, part: str, share: float = 1) -> Iterator[None]:
        """A context in which FLOPs are counted under a name.

        Args:
            part: the name.
            share: of the FLOPs that is counted.
        """
        before, self._part = self._part, (part, share)
        yield
        self._part = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given, formula = _storages((args, kwargs)), FORMULAS.get(func.overloadpacket)
        out = func(*args, **kwargs)
        if formula is not None:
            part, share = self._part
            self.flops["head" if given.keys() & self._head.keys() else part] += share * formula(*args, **kwargs, out_val=out)
        for key, storage in _storages(out).items():
            if not any(key in known for known in (given, self._alive, self._weights)):
                self._note(key, storage)
        return out

    def _note(self, key: int, storage: Any) -> None:
        """Count the memory of a tensor until it is freed."""
        size = storage.nbytes()

        def freed(_: Any) -> None:
            self.live -= size
            self._alive.pop(key, None)

        self._alive[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)


def _attention_on_cpu(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of attention; grouped queries share keys and values."""
    count: Any = sdpa_flop_count
    return int(count(query.shape, (*query.shape[:2], *key.shape[2:]), (*query.shape[:2], *value.shape[2:])))


FORMULAS: dict[Any, Any] = {**flop_registry, CPU_ATTENTION: _attention_on_cpu}


def _storages(values: Any) -> dict[int, Any]:
    """The memory of all tensors in nested values, by a number that identifies it."""
    storages = [value.untyped_storage() for value in tree_leaves(values) if isinstance(value, Tensor)]
    return {storage._cdata: storage for storage in storages}
