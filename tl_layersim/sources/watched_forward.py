"""A watched forward pass: how often, in which order and on which tensors the blocks of a model run."""

from __future__ import annotations

import itertools
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
                    + (f" {_how_to_read_runs(point.name, self.runs[number])}" if self.runs[number] > 1 else "")
                )
        for previous, number in itertools.pairwise(self.order):
            if number < previous:
                raise LayersimError(
                    f"The layers of {model} cannot be read: the forward pass reaches {self.points[number].name} (module "
                    f"{self.points[number].module}) after {self.points[previous].name}. `layers` must name blocks in the order "
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


def _how_to_read_runs(name: str, runs: int) -> str:
    """How to read the runs of a block."""
    return (
        f"To read its {runs} runs, name them in the order of the forward pass, at=['{name}[0]', '{name}[1]', ...], for CKA, "
        "Cosine or another measure of any sites."
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
    forward = WatchedForward(points, pos)
    with temporary_hooks() as handles:

        def see(number: int, hidden: Tensor) -> None:
            if not aside():
                forward.see(number, hidden)

        for number, point in enumerate(points):
            handles.append(on_tensor(modules[point.module], point.incoming, partial(see, number)))
        for block in blocks:
            handles += _norm_hooks(block, forward.ends_in_norm)
        handles += _sum_hooks(blocks, forward.summed)
        try:
            forward.output = call()
        except LayersimError:
            raise
        except Exception:
            if not forward.is_complete:
                raise
    return forward


def _sum_hooks(blocks: Sequence[torch.nn.Module], summed: list[str]) -> list[RemovableHandle]:
    """Hooks that find blocks which return a branch and the stream apart, and add them in the next block.

    They append the class of a block to a list if a norm inside it reads the sum of two tensors that the block before returned.
    """
    returned: list[Tensor] = []

    def leave(_module: torch.nn.Module, _args: Any, output: Any) -> None:
        items = output if isinstance(output, tuple | list) else ()
        tensors = [item for item in items if isinstance(item, Tensor) and item.is_floating_point()]
        same_shape = [tensor.detach().clone() for tensor in tensors if tensor.shape == tensors[0].shape]
        returned[:] = same_shape if len(same_shape) > 1 else []

    def enter_norm(block: str, _module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        for second in returned[1:]:
            first = returned[0]
            total = first + second
            terms_read = 0
            for value in inputs:
                if _is_nonzero_and_equal(value, first) or _is_nonzero_and_equal(value, second):
                    terms_read += 1
            # A norm that adds the two itself has both among its inputs.
            if terms_read > 1 or any(_is_nonzero_and_equal(value, total) for value in inputs):
                summed.append(block)

    handles = [on_leave(block, in_this_thread(leave)) for block in blocks]
    for block in blocks:
        hook = in_this_thread(partial(enter_norm, type(block).__name__))
        handles += [on_enter(norm, hook) for norm in _norms_inside(block)]
    return handles


def _is_nonzero_and_equal(value: Tensor, reference: Tensor) -> bool:
    return value.shape == reference.shape and bool(reference.any()) and torch.equal(value, reference)


def _norms_inside(block: torch.nn.Module) -> list[torch.nn.Module]:
    """The norms inside a block, by the names of their classes."""
    return [module for module in block.modules() if module is not block and has_name_of_norm(type(module))]


def _norm_hooks(block: torch.nn.Module, ends_in_norm: list[bool]) -> list[RemovableHandle]:
    """Hooks that append to a list, for each run of a block, whether its output is the output of a norm inside it."""
    last_normed: Tensor | None = None

    def leave_norm(_module: torch.nn.Module, _args: Any, output: Any) -> None:
        nonlocal last_normed
        if isinstance(output, Tensor):
            last_normed = output

    def leave_block(_module: torch.nn.Module, _args: Any, output: Any) -> None:
        nonlocal last_normed
        hidden = first_tensor(output)
        is_normed = last_normed is not None and hidden.shape == last_normed.shape and torch.equal(hidden, last_normed)
        ends_in_norm.append(is_normed)
        last_normed = None

    handles = [on_leave(norm, in_this_thread(leave_norm)) for norm in _norms_inside(block)]
    handles.append(on_leave(block, in_this_thread(leave_block)))
    return handles
