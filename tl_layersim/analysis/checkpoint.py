"""Checkpoints of analyses: the tallies of both passes in a resumable file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..core.blocks import DataBlock
from ..core.data_pass_progress import Tally
from ..core.distributed import ALONE, Deal, rank_and_size
from ..core.field_types import refuse_other_types
from ..core.resumable_file import ResumableFile, Snapshot
from ..core.storage import refuse_unwritable
from ..core.sum_tree import SumTree
from ..core.sums import Sums

# Fields of a tally that JSON holds; the others are sums.
PLAIN = ("batches", "sequences", "tokens", "digest", "seconds", "done")


def open_checkpoint(
    path: str | os.PathLike[str] | None, identity: Mapping[str, Any], deal: Deal = ALONE
) -> tuple[ResumableFile, dict[str, Tally]]:
    """Open the checkpoint file of an analysis on this rank, and read its tallies by pass; none where no file exists yet.

    Args:
        path: of the file, None for none; a rank above 0 appends its number.
        identity: model, analyzers and data settings. A file of another run is refused.
        deal: which batches this process takes.

    Raises:
        LayersimError: no file can be written at `path`, or the file there is damaged or of another run.
    """
    rank, size = rank_and_size()
    own = None if path is None else Path(f"{path}.rank{rank}" if rank else path)
    refuse_unwritable(own, "checkpoint")
    file = ResumableFile(own, "checkpoint", {**identity, "processes": size, "copies": deal.copies})
    return file, file.resume(tallies_of) or {}


def tallies_snapshot(tallies: Mapping[str, Tally]) -> Snapshot:
    """Convert tallies by pass to the notes and tensors of a checkpoint file."""
    passes: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for label, tally in tallies.items():
        tree = tally.tree
        passes[label] = {name: getattr(tally, name) for name in PLAIN}
        passes[label]["tree"] = {
            "size": tree.size,
            "start": tree.start,
            "nodes": [[node.rows, node.tokens] for node in tree.nodes],
            "names": list(tree.nodes[0].sums) if tree.nodes else [],
        }
        for number, node in enumerate(tree.nodes):
            for name, own in node.sums.items():
                tensors |= {f"{label} {number}/{name}/{key}": tensor for key, tensor in own.fields.items()}
    return {"passes": passes}, tensors


def tallies_of(notes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tally]:
    """Restore tallies by pass from the notes and tensors that `tallies_snapshot` made."""
    return {label: _tally(label, kept, tensors) for label, kept in notes["passes"].items()}


def _tally(label: str, kept: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tally:
    plain = {name: kept[name] for name in PLAIN}
    refuse_other_types(Tally, plain)
    return Tally(**plain, tree=_tree(label, kept["tree"], tensors))


def _tree(label: str, kept: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> SumTree:
    shape = {"size": kept["size"], "start": kept["start"]}
    refuse_other_types(SumTree, shape)
    nodes = list[DataBlock]()
    for number, (rows, tokens) in enumerate(kept["nodes"]):
        counts = {"rows": rows, "tokens": tokens}
        refuse_other_types(DataBlock, counts)
        nodes.append(DataBlock(**counts, sums=_sums_of(f"{label} {number}", kept["names"], tensors)))
    return SumTree(**shape, nodes=tuple(nodes))


def _sums_of(heading: str, names: list[str], tensors: Mapping[str, Tensor]) -> dict[str, Sums]:
    """The sums by analyzer, from the tensors whose keys begin with `heading`."""
    fields: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for key, tensor in tensors.items():
        own_heading, name, field_name = key.split("/", 2)
        if own_heading == heading:
            fields[name][field_name] = tensor
    return {name: Sums(own) for name, own in fields.items()}
