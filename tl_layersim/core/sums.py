"""Sums over batches: named tensors with `+`, the only state of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

# Before the name of an analyzer: its sums over pools of rows, beside those over views.
POOL = "pools of "
# Before the name of an analyzer: sums of the sizes of the activations that it reads.
SIZES = "sizes of "


def analyzer_of(name: str) -> str:
    """The analyzer of a kernel.

    Args:
        name: of the kernel, the name of the analyzer with `POOL` or `SIZES` before it or none.
    """
    return name.removeprefix(POOL).removeprefix(SIZES)


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums over rows: named tensors on the CPU that are added field by field, integers as int64, other numbers as float64.

    `Sums()` is the neutral element, and a field that only one of two sums has is unchanged. Batches, machines, ranks and
    resumed runs are all merged by `a + b`.

    Examples:
        >>> a = Sums.of({"count": torch.tensor(2), "total": torch.tensor([1.0, 2.0])})
        >>> (a + a + Sums())["total"]
        tensor([2., 4.], dtype=torch.float64)
    """

    fields: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", MappingProxyType(dict(self.fields)))

    @staticmethod
    def of(output: Mapping[str, Tensor]) -> Sums:
        """The sums of one batch.

        Args:
            output: tensors that a kernel returned; they are moved to the CPU and converted to int64 or float64.

        Raises:
            ValueError: a value is not a tensor.
        """
        for name, value in output.items():
            if not isinstance(value, Tensor):
                raise ValueError(f"{name!r} is a {type(value).__name__}, not a tensor")
        return Sums({name: _widen(value) for name, value in output.items()})

    def __add__(self, other: Sums) -> Sums:
        if not self.fields:
            return other
        if not other.fields:
            return self
        self.refuse_others(other)
        both = {name: value + other.fields[name] for name, value in self.fields.items() if name in other.fields}
        return Sums({**self.fields, **other.fields, **both})

    def refuse_others(self, other: Sums) -> None:
        """Refuse sums that cannot be added to these.

        Args:
            other: the sums.

        Raises:
            ValueError: they have other shapes.
        """
        for name in self.fields.keys() & other.fields.keys():
            value = self.fields[name]
            if value.shape != other.fields[name].shape:
                # Broadcasting would hide a kernel whose output shape depends on the batch.
                raise ValueError(f"sum {name!r} has shape {tuple(value.shape)} and {tuple(other.fields[name].shape)}")

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]

    def __bool__(self) -> bool:
        return bool(self.fields)


def with_pools(sums: Mapping[str, Sums], name: str) -> Sums:
    """All sums of an analyzer, those over pools of rows included.

    Args:
        sums: by analyzer.
        name: of the analyzer.
    """
    pools = sums.get(POOL + name, Sums())
    return Sums({**sums.get(name, Sums()).fields, **pools.fields})


def _widen(value: Tensor) -> Tensor:
    is_integer = not value.is_floating_point()
    return value.detach().cpu().to(torch.int64 if is_integer else torch.float64)
