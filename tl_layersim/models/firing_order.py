"""Order in which a forward pass reaches hook points, found by running it once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..core.errors import LayersimError
from .block_call import first_tensor
from .hook_point import HookPoint, at_point
from .hooks import ForwardRun, in_this_thread, on_enter, on_leave, temporary_hooks

_See = Callable[[list[int], Any], None]


def firing_order(
    points: Sequence[HookPoint], modules: Mapping[str, torch.nn.Module], run: Callable[[], Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The order in which a forward pass reaches hook points, as indices of the points, and the width of each point.

    Args:
        points: the hook points.
        modules: the module of each point, by its path.
        run: runs the forward pass, which ends when all points were reached.

    Raises:
        LayersimError: a module runs more than once in a forward pass, or never.
    """
    order: list[int] = []
    widths: dict[int, int] = {}
    together: dict[tuple[str, bool], list[int]] = {}
    for number, point in enumerate(points):
        together.setdefault((point.module, point.incoming), []).append(number)

    def see(numbers: list[int], given: Any) -> None:
        if numbers[0] in widths:
            raise _not_once(points[numbers[0]], "it runs more than once in a forward pass")
        order.extend(numbers)
        for number in numbers:
            widths[number] = at_point(first_tensor(given), points[number].part, name=points[number].name).shape[-1]
        if len(order) == len(points):
            stop.stop()

    with temporary_hooks() as handles, torch.no_grad(), ForwardRun() as stop:
        for (path, incoming), numbers in together.items():
            if incoming:
                handles.append(on_enter(modules[path], in_this_thread(partial(_entered, see, numbers))))
            else:
                handles.append(on_leave(modules[path], in_this_thread(partial(_left, see, numbers))))
        run()
    for number, point in enumerate(points):
        if number not in widths:
            raise _not_once(point, "no forward pass of the model on this data runs it")
    return tuple(order), tuple(widths[number] for number in range(len(points)))


def _entered(see: _See, numbers: list[int], _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    see(numbers, (*args, *(kwargs or {}).values()))


def _left(see: _See, numbers: list[int], _module: Any, _args: Any, output: Any) -> None:
    see(numbers, output)


def _not_once(point: HookPoint, why: str) -> LayersimError:
    return LayersimError(
        f"`at` names a module that does not run once in a forward pass: {point.module}.",
        given=f"{point.name}: {why}",
        expected="modules that a forward pass runs once",
        do="another module of the same block; lsim.sites(model) lists the sites with names",
    )
