"""Several processes: whole copies of the model take turns with the batches, and the sums are added over copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .errors import LayersimError
from .sums import Sums


@dataclass(frozen=True)
class Deal:
    """Which batches this process measures: every `copies`-th, from number `copy` on.

    Attributes:
        copy: which copy of the model this process holds, or holds a part of.
        copies: how many copies there are.
        leads: whether this process is the one of its copy whose sums count.
    """

    copy: int
    copies: int
    leads: bool


ALONE = Deal(0, 1, True)


def rank_and_size() -> tuple[int, int]:
    """This process's rank and how many there are; (0, 1) outside an initialised process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def weight_peers(module: torch.nn.Module) -> frozenset[int]:
    """Ranks among which the weights of a model are spread, this one included: they must run the same batches.

    So it is under tensor parallelism (a `DeviceMesh`, transformers' `tp_plan`), and where FSDP shards weights. Empty where this
    process holds them all.
    """
    if rank_and_size()[1] == 1:
        return frozenset()
    peers: set[int] = set()
    for parameter in module.parameters():
        placements = getattr(parameter, "placements", None)
        mesh: Any = getattr(parameter, "device_mesh", None)
        if placements is None or mesh is None or mesh.get_coordinate() is None:
            continue
        here = [
            own if placement.is_replicate() else slice(None)
            for own, placement in zip(mesh.get_coordinate(), placements, strict=True)
        ]
        found = mesh.mesh[tuple(here)].reshape(-1).tolist()
        peers |= set(found) if len(found) > 1 else set()
    for part in module.modules():
        group = getattr(part, "process_group", None)
        if group is not None and type(part).__name__ == "FullyShardedDataParallel":
            peers |= set(dist.get_process_group_ranks(group))
    return frozenset(peers)


def refuse_parts(module: torch.nn.Module) -> None:
    """Refuse to train a model whose weights are spread over processes: each would take other rows.

    Raises:
        LayersimError: they are.
    """
    peers = weight_peers(module)
    if peers:
        raise LayersimError(
            "`model` is spread over several processes, and training deals every process rows of its own.",
            given=f"weights that ranks {sorted(peers)} hold together (tensor parallelism or FSDP)",
            expected="a whole copy of the model in each process",
            do="load the model without tp_plan=, a DeviceMesh or FSDP, and start with accelerate launch",
        )


def agree(peers: Iterable[frozenset[int]]) -> Deal:
    """How batches are dealt: over copies of the model, not over the processes that hold one copy together.

    Every process of the group has to call it.

    Args:
        peers: `weight_peers` of each model that is measured.

    Raises:
        LayersimError: the processes do not form whole copies.
    """
    rank, size = rank_and_size()
    if size == 1:
        return ALONE
    mine = sorted(frozenset({rank}).union(*peers))
    said: list[Any] = [None] * size
    dist.all_gather_object(said, mine)
    groups = sorted({tuple(group) for group in said})
    members = [member for group in groups for member in group]
    if sorted(members) != list(range(size)) or len({len(group) for group in groups}) > 1:
        raise LayersimError(
            "The processes do not form whole copies of the model, so batches cannot be dealt to them.",
            given=f"weights spread over ranks {', '.join(str(list(group)) for group in groups)} of {size}",
            expected="groups of ranks of one size, each with one copy of the model, and each rank in one group",
            do="one DeviceMesh for the whole model, and for both models of compare()",
        )
    return Deal(groups.index(tuple(mine)), len(groups), rank == mine[0])


def add_over_ranks(sums: Mapping[str, Sums], deal: Deal) -> dict[str, Sums]:
    """The same total on every rank. A rank that had no batch adds nothing, nor does one whose copy is counted by another."""
    if rank_and_size()[1] == 1:
        return dict(sums)
    # NCCL moves tensors of GPUs only.
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    mine = {name: {key: (tuple(t.shape), t.dtype) for key, t in s.fields.items()} for name, s in sums.items()}
    shapes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shapes, mine)
    total: dict[str, Sums] = {}
    for name in sums:
        known: dict[str, Any] = next((rank[name] for rank in shapes if rank[name]), {})
        fields = {}
        for key in sorted(known):
            shape, dtype = known[key]
            none = torch.zeros(shape, dtype=dtype)
            value = (sums[name].fields.get(key, none) if deal.leads else none).clone().to(device)
            dist.all_reduce(value)
            fields[key] = value.cpu()
        total[name] = Sums(fields)
    return total
