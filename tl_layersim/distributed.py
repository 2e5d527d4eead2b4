"""Several processes: each takes every world-size-th batch, and the sums are added over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from .sums import Sums


def rank_and_size() -> tuple[int, int]:
    """This process's rank and how many there are; (0, 1) outside an initialised process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def add_over_ranks(sums: Mapping[str, Sums]) -> dict[str, Sums]:
    """The same total on every rank. A rank that had no batch adds nothing."""
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
            value = sums[name].fields.get(key, torch.zeros(shape, dtype=dtype)).clone().to(device)
            dist.all_reduce(value)
            fields[key] = value.cpu()
        total[name] = Sums(fields)
    return total
