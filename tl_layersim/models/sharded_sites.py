"""Sites in models under tensor parallelism: activations that no process holds whole are refused."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed import is_available

from ..core.distributed import weight_peers
from ..core.errors import LayersimError
from .hook_point import HookPoint


def refuse_sharded_sites(module: torch.nn.Module, points: Iterable[HookPoint]) -> None:
    """Refuse hook points whose activations are divided among processes: those between sharded matrices of one module.

    Queries, keys, values, the outputs of heads and the hidden activations of an MLP are computed in parts. The outputs of
    attention, MLPs and blocks are added over the processes, so that each holds them whole.

    Args:
        module: the model.
        points: the hook points that are to be read.

    Raises:
        LayersimError: names the hook points.
    """
    peers = weight_peers(module)
    if not peers:
        return
    places = _sharded_axes(module)
    parted = [point.name for point in points if _is_parted(module, point, places)]
    if parted:
        more = f" and {len(parted) - 3} more" if len(parted) > 3 else ""
        raise LayersimError(
            f"`at` names {', '.join(parted[:3])}{more}, whose activations tensor parallelism divides among ranks "
            f"{sorted(peers)}. The outputs of attention, MLPs and blocks are whole on each rank."
        )


def _sharded_axes(module: torch.nn.Module) -> dict[str, int]:
    """By the path of each module whose own weight is sharded by tensor parallelism, the axis that is divided."""
    gathered: set[int] = set()
    if is_available():
        from torch.distributed.fsdp import FSDPModule

        # FSDP gathers weights before a module runs, so that activations are whole.
        fully = [sub for sub in module.modules() if isinstance(sub, FSDPModule)]
        gathered = {
            id(p) for sub in fully for p in sub.parameters() if getattr(getattr(p, "device_mesh", None), "ndim", 1) == 1
        }
    axes: dict[str, int] = {}
    for path, sub in module.named_modules():
        for parameter in sub.parameters(recurse=False):
            if id(parameter) in gathered:
                continue
            dims = [placement.dim for placement in getattr(parameter, "placements", ()) if placement.is_shard()]
            if dims and parameter.dim() > 1:
                axes[path] = dims[-1]
    return axes


def _is_parted(module: torch.nn.Module, point: HookPoint, axes: dict[str, int]) -> bool:
    """Whether a hook point lies between a matrix with divided outputs and one with divided inputs."""
    names = point.module.split(".")
    if not any(name.isdecimal() for name in names[:-1]):
        # Embedding, final norm and head, whose outputs are gathered; or a block itself.
        return False
    if point.module in axes:
        return (axes[point.module] == 0) != point.incoming
    parent = ".".join(names[:-1])
    beside = any(path.rpartition(".")[0] == parent for path in axes)
    # A block that holds the matrices of its MLP itself, as that of OPT, has norms and attention beside them.
    of_block = names[-2].isdecimal()
    return beside and not (of_block and next(module.get_submodule(point.module).parameters(), None) is not None)
