"""A watched forward pass: how often, in which order and on which tensors the blocks of a model run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..activations.block_call import first_tensor
from ..architectures.hook_points import HookPoint, to_positions
from ..architectures.output_heads import has_name_of_norm
from ..core.errors import LayersimError
from .hooks import in_this_thread, on_enter, on_leave, on_tensor, temporary_hooks


@dataclass
class WatchedForward:
    """The residual layers of a model in one forward pass over one row.

    Attributes:
        points: hook points of the residual layers, in the order in which blocks must run.
        pos: number of positions of the row; None if tokens do not determine it.
        runs: number of times that the forward pass reached each point.
        order: indices of the points, in the order in which they were reached first.
        shapes: shape of the activations at each point; of a feature map, with its positions on one axis.
        last: the activations at the last point.
        ends_in_norm: for each block, whether its output is the output of a norm inside it.
        summed: classes of the blocks that add two tensors which the block before returned.
        output: output of the model; None if the forward pass failed after the last block.
    """

    points: Sequence[HookPoint]
    pos: int | None
    runs: Counter[int] = field(default_factory=Counter)
    order: list[int] = field(default_factory=list)
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    last: Tensor | None = None
    ends_in_norm: list[bool] = field(default_factory=list)
    summed: list[str] = field(default_factory=list)
    output: Any = None

    def see(self, number: int, hidden: Tensor) -> None:
        """Record that the forward pass reached a point.

        Args:
            number: index of the point.
            hidden: its activations.
        """
        self.runs[number] += 1
        if self.runs[number] > 1:
            return
        point = self.points[number]
        self.order.append(number)
        self.shapes[number] = tuple(to_positions(hidden, point.channels, point.name, self.pos).shape)
        if number == len(self.points) - 1:
            self.last = hidden.detach()

    @property
    def is_complete(self) -> bool:
        """Whether the forward pass reached every point."""
        return len(self.order) == len(self.points)

    @property
    def is_post_norm(self) -> bool:
        """Whether the output of every block is the output of a norm inside it."""
        return bool(self.ends_in_norm) and all(self.ends_in_norm)

    def check(self, model: str) -> None:
        """Raise an error if the points are not layers of one residual stream that is computed once.

        Args:
            model: name of the model.

        Raises:
            LayersimError: a block runs several times, never or out of order, or passes on other axes than `batch pos width`.
        """
        for number, point in enumerate(self.points):
            if self.runs[number] != 1:
                reached = f"{self.runs[number]} times" if self.runs[number] else "never"
                raise LayersimError(
                    f"The layers of {model} cannot be read: {point.name} (module {point.module}) is reached {reached} in a "
                    "forward pass over one row of this data, and each block must run exactly once."
                    + (f" {_of_runs(point.name, self.runs[number])}" if self.runs[number] > 1 else "")
                )
        for before, number in zip(self.order, self.order[1:], strict=False):
            if number < before:
                raise LayersimError(
                    f"The layers of {model} cannot be read: the forward pass reaches {self.points[number].name} (module "
                    f"{self.points[number].module}) after {self.points[before].name}. `layers` must name blocks in the order "
                    "in which they run."
                )
        if self.summed:
            raise LayersimError(
                f"The layers of {model} cannot be read: each {self.summed[0]} returns two tensors, and their sum, which the "
                "next block computes, is the residual stream. Have each block return the sum."
            )
        for number, point in enumerate(self.points):
            if not self._has_axes(self.shapes[number]):
                row = "one row" if self.pos is None else f"one row of {self.pos} positions"
                raise LayersimError(
                    f"The layers of {model} cannot be read: {point.name} (module {point.module}) is "
                    f"{' x '.join(map(str, self.shapes[number]))} for {row}, and a residual stream must be one tensor "
                    "batch x pos x width."
                )

    def _has_axes(self, shape: tuple[int, ...]) -> bool:
        """Whether a shape is that of activations of one row, `1 pos width`; or without an axis of rows, or of positions."""
        if self.pos is None:
            return len(shape) in (2, 3) and shape[0] == 1
        return shape[:-1] in ((1, self.pos), (self.pos,))


def _of_runs(name: str, runs: int) -> str:
    """How to read the runs of a block."""
    first, second = (f"'{name}[{run}]'" for run in range(2))
    return (
        f"To read its {runs} runs, name them in the order of the forward pass, at=[{first}, {second}, ...], for CKA, Cosine or "
        "another measure of any sites."
    )


def watch(
    points: Sequence[HookPoint],
    modules: Mapping[str, torch.nn.Module],
    blocks: Sequence[torch.nn.Module],
    call: Callable[[], Any],
    pos: int | None,
    aside: Callable[[], bool],
) -> WatchedForward:
    """Run a forward pass to its end, and record what it does at the residual layers.

    Args:
        points: hook points of the residual layers.
        modules: the modules of the points, by path.
        blocks: the blocks.
        call: runs the forward pass over one row; its errors after the last block are ignored.
        pos: number of positions of the row, if tokens determine it.
        aside: whether the current forward pass is not that of the model.
    """
    seen = WatchedForward(points, pos)
    with temporary_hooks() as handles:

        def see(number: int, hidden: Tensor) -> None:
            if not aside():
                seen.see(number, hidden)

        handles += [on_tensor(modules[point.module], point.incoming, partial(see, n)) for n, point in enumerate(points)]
        for block in blocks:
            handles += _norm_hooks(block, seen.ends_in_norm)
        handles += _sum_hooks(blocks, seen.summed)
        try:
            seen.output = call()
        except LayersimError:
            raise
        except Exception:
            if not seen.is_complete:
                raise
    return seen


def _sum_hooks(blocks: Sequence[torch.nn.Module], summed: list[str]) -> list[RemovableHandle]:
    """Hooks that find blocks which return a branch and the stream apart, and add them in the next block.

    They append the class of a block to a list if a norm inside it reads the sum of two tensors that the block before returned.
    """
    returned: list[Tensor] = []

    def leave(_module: torch.nn.Module, _args: Any, output: Any) -> None:
        parts = output if isinstance(output, tuple | list) else ()
        floats = [part for part in parts if isinstance(part, Tensor) and part.is_floating_point()]
        alike = [part.detach().clone() for part in floats if part.shape == floats[0].shape]
        returned[:] = alike if len(alike) > 1 else []

    def read(block: str, _module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        for other in returned[1:]:
            total = returned[0] + other
            reads_both = sum(any(_is_same(value, part) for part in (returned[0], other)) for value in given) > 1
            if reads_both or any(_is_same(value, total) for value in given):
                summed.append(block)

    handles = [on_leave(block, in_this_thread(leave)) for block in blocks]
    for block in blocks:
        seen = in_this_thread(partial(read, type(block).__name__))
        handles += [on_enter(part, seen) for part in block.modules() if part is not block and has_name_of_norm(type(part))]
    return handles


def _is_same(value: Tensor, other: Tensor) -> bool:
    return value.shape == other.shape and bool(other.any()) and torch.equal(value, other)


def _norm_hooks(block: torch.nn.Module, ends_in_norm: list[bool]) -> list[RemovableHandle]:
    """Hooks that append to a list, for each run of a block, whether its output is the output of a norm inside it."""
    last: list[Tensor] = []

    def keep(_module: torch.nn.Module, _args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            last[:] = [output]

    def compare(_module: torch.nn.Module, _args: Any, output: Any) -> None:
        hidden = first_tensor(output)
        ends_in_norm.append(any(hidden.shape == normed.shape and torch.equal(hidden, normed) for normed in last))
        last.clear()

    norms = [part for part in block.modules() if part is not block and has_name_of_norm(type(part))]
    return [on_leave(norm, in_this_thread(keep)) for norm in norms] + [on_leave(block, in_this_thread(compare))]
