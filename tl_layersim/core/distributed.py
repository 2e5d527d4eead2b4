"""Data-parallel runs: each process runs a part of the batches, and sums are added."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .errors import LayersimError
from .sums import DataBlock, Sums, SumTree


@dataclass(frozen=True)
class Deal:
    """Share of the batches that this process runs. With n copies of the model, copy i runs batches i, i + n, i + 2n and so on.

    Attributes:
        copy: index of the model copy that this process holds, whole or in part.
        copies: number of model copies.
        leads: whether the sums of this process are counted. It is True in one process per copy.
    """

    copy: int
    copies: int
    leads: bool


ALONE = Deal(0, 1, True)
# Whether this thread is inside `failing_together`.
_local = threading.local()


def rank_and_size() -> tuple[int, int]:
    """Rank of this process, and number of processes; (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def weight_peers(module: torch.nn.Module) -> frozenset[int]:
    """Ranks that together hold the shards of a model, this rank included. They must run the same batches.

    Weights are sharded by tensor parallelism (a `DeviceMesh`, transformers' `tp_plan`) and by FSDP.

    Returns:
        The ranks; empty if this process holds all weights.
    """
    if rank_and_size()[1] == 1:
        return frozenset()
    peers: set[int] = set()
    for parameter in module.parameters():
        placements = getattr(parameter, "placements", None)
        mesh: Any = getattr(parameter, "device_mesh", None)
        if placements is None or mesh is None or mesh.get_coordinate() is None:
            continue
        # Along an axis of the mesh over which the parameter is copied, this rank's own copy.
        index = []
        for coordinate, placement in zip(mesh.get_coordinate(), placements, strict=True):
            index.append(coordinate if placement.is_replicate() else slice(None))
        ranks = mesh.mesh[tuple(index)].reshape(-1).tolist()
        if len(ranks) > 1:
            peers |= set(ranks)
    for submodule in module.modules():
        group = getattr(submodule, "process_group", None)
        if group is not None and type(submodule).__name__ == "FullyShardedDataParallel":
            peers |= set(dist.get_process_group_ranks(group))
    return frozenset(peers)


def refuse_sharded(module: torch.nn.Module) -> None:
    """Raise an error if the weights of a model are sharded over processes. Each process would train on other rows.

    Raises:
        LayersimError: the weights are sharded.
    """
    peers = weight_peers(module)
    if peers:
        raise LayersimError(
            f"`model` is sharded over the ranks {sorted(peers)}, but training needs a full copy in each process. Start with "
            "accelerate launch, without tp_plan=, a DeviceMesh or FSDP."
        )


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, in the order of the ranks. Every rank of the group must call this function.

    Args:
        value: the value of this rank; it is pickled.

    Raises:
        LayersimError: another rank failed before its call, see `failing_together`.
    """
    size = rank_and_size()[1]
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    try:
        dist.all_gather_object(values, value)
    except RuntimeError as error:
        raise OtherRankFailed(f"Another rank of the torch.distributed group ended or did not answer: {error}") from error
    for rank, value_of_rank in enumerate(values):
        if isinstance(value_of_rank, FailedRank):
            raise OtherRankFailed(f"Rank {rank} of the torch.distributed group failed: {value_of_rank.message}")
    return values


@dataclass(frozen=True)
class FailedRank:
    """What a rank that failed tells the other ranks.

    Attributes:
        message: its error.
    """

    message: str


class OtherRankFailed(LayersimError):
    """Another rank of the group failed, so this one stops too."""


@contextmanager
def failing_together() -> Iterator[None]:
    """Context manager for a call that all ranks make: if one rank raises an error, all ranks raise an error.

    A rank that fails takes part in the next exchange of the other ranks (`gathered`), and tells them its error. All ranks meet
    once more at the end, in case that a rank fails after its last exchange. Inside another such context it does nothing.
    """
    if rank_and_size()[1] == 1 or getattr(_local, "together", False):
        yield
        return
    _local.together = True
    try:
        yield
        gathered(None)
    except OtherRankFailed:
        raise
    except Exception as error:
        # The other ranks may have ended.
        with suppress(Exception):
            gathered(FailedRank(f"{type(error).__name__}: {error}"))
        raise
    finally:
        _local.together = False


def agree(peers: Iterable[frozenset[int]]) -> Deal:
    """Assign batches to processes, and return this process's `Deal`. Processes that share a model copy get the same batches.

    Every process of the group must call this function.

    Args:
        peers: `weight_peers` of each model of the run.

    Raises:
        LayersimError: the processes do not form whole copies.
    """
    rank, size = rank_and_size()
    if size == 1:
        return ALONE
    group_of_rank = sorted(frozenset({rank}).union(*peers))
    groups = sorted({tuple(group) for group in gathered(group_of_rank)})
    members = [member for group in groups for member in group]
    if sorted(members) != list(range(size)) or len({len(group) for group in groups}) > 1:
        raise LayersimError(
            f"`model` is sharded over ranks {', '.join(str(list(group)) for group in groups)} of {size}; groups of ranks must "
            "be equally large, and each must hold one copy of the model. Use one DeviceMesh for the whole model, and for both "
            "models of `compare`."
        )
    return Deal(groups.index(tuple(group_of_rank)), len(groups), rank == group_of_rank[0])


def add_over_ranks(sums: Mapping[str, Sums], deal: Deal) -> dict[str, Sums]:
    """Add sums over all ranks; every rank returns the same total.

    A rank without a batch adds zero, and so does a rank whose copy is counted by another rank.

    Args:
        sums: sums of this rank, by analyzer.
        deal: `Deal` of this rank.
    """
    if rank_and_size()[1] == 1:
        return dict(sums)
    # NCCL communicates CUDA tensors only.
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    shapes: dict[str, dict[str, Any]] = {}
    for name, sums_of_analyzer in sums.items():
        shapes[name] = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in sums_of_analyzer.fields.items()}
    shapes_of_ranks = gathered(shapes)
    total: dict[str, Sums] = {}
    for name in sums:
        # All ranks that have run a batch have the same fields.
        shapes_of_fields: dict[str, Any] = next((rank[name] for rank in shapes_of_ranks if rank[name]), {})
        fields = {}
        for key in sorted(shapes_of_fields):
            shape, dtype = shapes_of_fields[key]
            zero = torch.zeros(shape, dtype=dtype)
            term = sums[name].fields.get(key, zero) if deal.leads else zero
            value = term.clone().to(device)
            dist.all_reduce(value)
            fields[key] = value.cpu()
        total[name] = Sums(fields)
    return total


def add_blocks_over_ranks(tree: SumTree, names: Iterable[str], deal: Deal) -> tuple[DataBlock, ...]:
    """Add sums over all ranks, separately for each data block.

    The k-th block of the total is the sum of the k-th blocks of all ranks, which take batches in turn.

    Args:
        tree: sums of this rank.
        names: names of the analyzers.
        deal: `Deal` of this rank.
    """
    if rank_and_size()[1] == 1:
        return tree.blocks()
    blocks = tree.coarser(max(gathered(tree.size))).blocks()
    counts_of_ranks = gathered([(block.texts, block.tokens) if deal.leads else (0, 0) for block in blocks])
    total = []
    for number in range(max(map(len, counts_of_ranks))):
        # A rank with fewer blocks takes part in each exchange, too.
        sums = blocks[number].sums if number < len(blocks) else {name: Sums() for name in names}
        counts = [counts_of_rank[number] for counts_of_rank in counts_of_ranks if number < len(counts_of_rank)]
        texts = sum(texts for texts, _ in counts)
        tokens = sum(tokens for _, tokens in counts)
        total.append(DataBlock(texts, tokens, add_over_ranks(sums, deal)))
    return tuple(total)
