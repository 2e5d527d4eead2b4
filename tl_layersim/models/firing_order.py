"""Order in which a forward pass reaches hook points, found by running it once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..architectures.feature_maps import to_positions
from ..architectures.points import HookPoint, at_point
from ..core.errors import LayersimError
from .hooks import kernels_alone, on_tensor, temporary_hooks


def firing_order(
    points: Sequence[HookPoint], modules: Mapping[str, torch.nn.Module], run: Callable[[], Any], pos: int | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The order in which a forward pass reaches hook points, as indices of the points, and the width of each point.

    Args:
        points: the hook points.
        modules: the module of each point, by its path.
        run: runs the forward pass; its errors after the last hook point are ignored.
        pos: number of positions of a row, where tokens give it.

    Raises:
        LayersimError: a module runs more than once in a forward pass, or never.
    """
    order: list[int] = []
    widths: dict[int, int] = {}
    together: dict[tuple[str, bool], list[int]] = {}
    for number, point in enumerate(points):
        together.setdefault((point.module, point.incoming), []).append(number)

    def see(numbers: list[int], given: Tensor) -> None:
        if numbers[0] in widths:
            raise not_once(points[numbers[0]].name, points[numbers[0]].module, "it runs more than once in a forward pass")
        order.extend(numbers)
        for number in numbers:
            point = points[number]
            hidden = to_positions(given, point.channels, point.name, pos)
            widths[number] = at_point(hidden, point.part, name=point.name).shape[-1]

    # To the end of the pass: a module that runs again is not what its name says. Probes that are attached do not record it.
    with temporary_hooks() as handles, torch.no_grad(), kernels_alone():
        handles += [on_tensor(modules[path], incoming, partial(see, numbers)) for (path, incoming), numbers in together.items()]
        try:
            run()
        except LayersimError:
            raise
        except Exception:
            if len(order) < len(points):
                raise
    for number, point in enumerate(points):
        if number not in widths:
            raise not_once(point.name, point.module, "no forward pass of the model on this data runs it")
    return tuple(order), tuple(widths[number] for number in range(len(points)))


def not_once(name: str, module: str, why: str) -> LayersimError:
    """The error for a hook point whose module does not run exactly once in a forward pass.

    Args:
        name: of the hook point.
        module: its path.
        why: how often it runs.
    """
    return LayersimError(f"`at` names {name}, and its module {module} does not run once in a forward pass: {why}.")
