"""The modules of a model by their paths, in a tenth of the time of `torch.nn.Module.named_modules`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

# By `id` of a model, the model and its modules by path, in a thread that is inside `modules_remembered`.
_local = threading.local()


@contextmanager
def modules_remembered() -> Iterator[None]:
    """A context manager in which the modules of each model are listed once. The code inside adds and replaces no modules."""
    earlier = getattr(_local, "models", None)
    _local.models = {} if earlier is None else earlier
    try:
        yield
    finally:
        _local.models = earlier


def modules_by_path(module: torch.nn.Module) -> Mapping[str, torch.nn.Module]:
    """All submodules by path, as `dict(module.named_modules())` has them: in the same order, each under its first path.

    Opening a model asks for them many times, and the generators of `named_modules`, one inside the other, pass each module
    through every level above it.

    Args:
        module: the model, whose own path is "".

    Examples:
        >>> list(modules_by_path(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())))
        ['', '0', '1']
    """
    remembered: dict[int, tuple[torch.nn.Module, Mapping[str, torch.nn.Module]]] | None = getattr(_local, "models", None)
    if remembered is None:
        return _modules_by_path(module)
    if id(module) not in remembered:
        # With the model itself, so that no other one gets its `id`.
        remembered[id(module)] = (module, _modules_by_path(module))
    return remembered[id(module)][1]


def _modules_by_path(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules; see `modules_by_path`."""
    modules: dict[str, torch.nn.Module] = {}
    seen: set[int] = set()
    # The next module to visit is the last one.
    waiting: list[tuple[str, torch.nn.Module]] = [("", module)]
    while waiting:
        path, submodule = waiting.pop()
        if id(submodule) in seen:
            continue
        if type(submodule).named_modules is not torch.nn.Module.named_modules:
            # A module may list other modules than its children.
            return dict(module.named_modules())
        seen.add(id(submodule))
        modules[path] = submodule
        prefix = f"{path}." if path else ""
        for name, child in reversed(submodule._modules.items()):
            if child is not None:
                waiting.append((prefix + name, child))
    return modules
