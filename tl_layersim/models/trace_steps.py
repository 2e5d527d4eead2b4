"""Steps of an nnsight trace: the inputs and outputs of modules that it reads, in the order of the forward pass.

`read_step` is shipped to NDIF servers by value: it uses torch and the standard library alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..architectures.feature_maps import to_positions
from ..architectures.points import HookPoint
from .block_call import first_tensor, record_call
from .site_buffer import SiteBuffer


@dataclass
class TraceStep:
    """The input or output of one module, which a trace reads.

    Attributes:
        path: of the module.
        envoy: of the module.
        incoming: whether the input is read; else the output.
        is_block: whether the module is a block, whose calls views may carry.
        sites: number and hook point of each site that is a part of it.
    """

    path: str
    envoy: Any
    incoming: bool
    is_block: bool
    sites: list[tuple[int, HookPoint]] = field(default_factory=list)


def is_edited(model: Any) -> bool:
    """Whether an nnsight model has edits (`model.edit()`), which run in each of its traces.

    A trace of such a model runs to the end of the forward pass: nnsight raises `OutOfOrderError` for an edit of a module that
    a stopped trace has not reached.
    """
    return bool(model._edits)


def block_events(paths: list[str]) -> tuple[HookPoint, ...]:
    """The input and the output of each block."""
    return tuple(HookPoint(path, path, incoming) for path in paths for incoming in (True, False))


def residual_order(blocks: int) -> tuple[int, ...]:
    """Order of the residual layers, and of the inputs and outputs of blocks that are numbered after them."""
    order = [0]
    for block in range(blocks):
        start = blocks + 1 + 2 * block
        order += [start, block + 1, start + 1]
    return tuple(order)


def read_step(step: TraceStep, buffer: SiteBuffer, given: dict[str, Any], calls: list[Any] | None) -> None:
    """Read the sites of one step inside a trace, and record the call of a block.

    Args:
        step: the step.
        buffer: for the activations.
        given: arguments of the blocks that were entered, by path; changed in place.
        calls: for the block calls, changed in place; None where no analyzer needs them.
    """
    if step.incoming:
        args, kwargs = step.envoy.inputs
        if step.is_block:
            given[step.path] = (args, kwargs)
        value: Any = (*args, *kwargs.values())
    else:
        value = step.envoy.output
        if calls is not None and step.is_block:
            args, kwargs = given[step.path]
            calls.append(record_call(step.envoy, args, kwargs, value))
    for site, point in step.sites:
        buffer.put(site, to_positions(first_tensor(value), point.channels, point.name, buffer.token_positions), point.part)
