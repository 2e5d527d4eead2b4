"""Devices: stated speed, memory and bandwidth of GPUs, for estimates of runs on machines that are not at hand."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ..core.argument_checks import typed
from ..core.bounds import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt
from ..core.errors import LayersimError
from ..core.operation_meter import Operation


@typed
@dataclass(frozen=True)
class Devices:
    """Equal devices of one machine, by the figures that their vendor states, and the fraction of them that code reaches.

    An operation takes the longest of its FLOPs at the speed of its dtype, its bytes at the bandwidth, and its launch. Traffic
    between devices is not counted.

    Args:
        name: of the device.
        count: number of devices.
        bfloat16: FLOP/s of dense matrix products in bfloat16 or float16.
        float32: FLOP/s in float32 without TF32, which kernels of analyzers switch off.
        float64: FLOP/s in float64.
        memory: bytes of one device.
        bandwidth: bytes per second of its memory.
        source: of these figures.
        split: how a model that is larger than one device is divided: "layers" as `device_map="auto"` does, where one device
            computes at a time; "tensors" as `tp_plan="auto"` does, where all compute.
        flops_reached: fraction of the FLOP/s that is reached, an assumption.
        bandwidth_reached: fraction of the bandwidth that is reached, an assumption.
        launch: seconds in which Python launches one operation, an assumption.

    Examples:
        >>> devices = devices_of("8xH100")
        >>> devices.count, devices.memory, devices.copies(141e9)
        (8, 80000000000.0, 4)
    """

    name: str
    count: PositiveInt
    bfloat16: PositiveFloat
    float32: PositiveFloat
    float64: PositiveFloat
    memory: PositiveFloat
    bandwidth: PositiveFloat
    source: str
    split: Literal["layers", "tensors"] = "layers"
    flops_reached: Fraction = 0.4
    bandwidth_reached: Fraction = 0.7
    launch: NonNegativeFloat = 10e-6

    def __str__(self) -> str:
        return f"{self.count}x{self.name}"

    def per_copy(self, size: float) -> int:
        """Number of devices that hold one copy of a model.

        Args:
            size: bytes of weights and activations.
        """
        return max(1, math.ceil(size / self.memory))

    def copies(self, size: float) -> int:
        """Number of copies of a model that the devices hold; 0 if not even one.

        Args:
            size: bytes of weights and activations.
        """
        return self.count // self.per_copy(size)

    def seconds(self, counts: Mapping[Operation, float], size: float) -> float:
        """Time of operations that all copies share, infinite if the devices hold no copy.

        Args:
            counts: how often each operation runs.
            size: bytes of weights and activations of a copy.
        """
        if not self.copies(size):
            return math.inf
        alone = sum(count * self._seconds_of(operation) for operation, count in counts.items())
        return alone / self.copies(size) / (self.per_copy(size) if self.split == "tensors" else 1)

    def _seconds_of(self, operation: Operation) -> float:
        """Time of one operation on one device."""
        speed = {torch.float64: self.float64, torch.float32: self.float32}.get(operation.dtype, self.bfloat16)
        computing = operation.flops / (speed * self.flops_reached)
        return max(computing, operation.moved / (self.bandwidth * self.bandwidth_reached), self.launch)


# Dense matrix products, without sparsity: float64 by tensor cores, float32 without TF32.
_KNOWN = {
    "A100": Devices("A100", 1, 312e12, 19.5e12, 19.5e12, 80e9, 2.039e12, "NVIDIA A100 80GB SXM data sheet"),
    "H100": Devices("H100", 1, 989e12, 67e12, 67e12, 80e9, 3.35e12, "NVIDIA H100 SXM data sheet"),
    "H200": Devices("H200", 1, 989e12, 67e12, 67e12, 141e9, 4.8e12, "NVIDIA H200 SXM data sheet"),
}


def devices_of(given: str | Devices) -> Devices:
    """Devices from a text such as "8xH100"; `Devices` as they are.

    Args:
        given: number and name, or the devices themselves.

    Raises:
        LayersimError: the text names no known device.
    """
    if isinstance(given, Devices):
        return given
    match = re.fullmatch(r"(?:(\d+)\s*[x*]\s*)?(\w+)", given.strip())
    name = match[2].upper() if match else ""
    if match is None or name not in _KNOWN or match[1] == "0":
        raise LayersimError(
            f'`devices` is {given!r}; it must be a number and one of {", ".join(_KNOWN)}, such as "8xH100", or Devices(...).'
        )
    return replace(_KNOWN[name], count=int(match[1] or 1))
