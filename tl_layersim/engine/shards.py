"""Shards, contiguous parts of the data that separate processes measure: their arguments, counts and files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor
from tqdm.auto import tqdm

from ..core.distributed import ALONE, Deal, rank_and_size
from ..core.errors import LayersimError
from ..core.resumable_file import ResumableFile, Snapshot
from ..core.storage import checksum, refuse_other_types, refuse_unwritable
from ..core.sums import DataBlock, Sums, SumTree, Tally
from ..core.wording import brief
from ..data.batches import Batches, fingerprint, new_digest

# Fields of a tally that JSON holds; the others are sums.
PLAIN = ("batches", "sequences", "tokens", "digest", "seconds", "done")


def open_checkpoint(
    path: str | os.PathLike[str] | None, identity: Mapping[str, Any], deal: Deal = ALONE
) -> tuple[ResumableFile, dict[str, Tally]]:
    """Open the checkpoint file of an analysis on this rank, and read its tallies by pass; empty if there is no file yet.

    Args:
        path: path of the file, None for none; a rank above 0 appends its index.
        identity: model, analyzers and data settings. A file of another run raises an error.
        deal: the batches that this process takes.

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


SHARD_FILE = "shard"
# Labels of the passes whose sums a file holds, as in a checkpoint.
FIRST, MAIN = "first", "main"


@dataclass(frozen=True)
class DataCounts:
    """Counts of all data, the same in all shards of a run.

    Attributes:
        batches: number of batches.
        measured: number of batches with a counted position, which are divided among the shards.
        sequences: number of rows.
        tokens: number of counted positions.
        digest: SHA-256 of all rows.
        rows: number of rows in the measured batches.
        capacity: number of rows in each batch but the last.
    """

    batches: int
    measured: int
    sequences: int
    tokens: int
    digest: str
    rows: int
    capacity: int

    def within(self, number: int, of: int) -> range:
        """Range of a shard among the batches with a counted position.

        Args:
            number: index of the shard.
            of: number of shards of the run.

        Examples:
            >>> counts = DataCounts(8, 7, 14, 70, "", 14, 2)
            >>> [list(counts.within(number, 3)) for number in range(3)]
            [[0, 1], [2, 3], [4, 5, 6]]
        """
        return range(self.measured * number // of, self.measured * (number + 1) // of)


@dataclass(frozen=True)
class ShardPart:
    """Contents of a shard's file, except for the tensors of its sums.

    Attributes:
        path: path of the file; for messages, any name of the part.
        number: index of the shard, from 0.
        of: number of shards of the run.
        stage: "first" for the sums of a first pass, which the main pass continues from; "main" for the sums of a report.
        identity: model, analyzers, options and version as plain data; the same in all shards of a run.
        counts: counts of all data; None until the data was read to its end.
        tallies: tallies by pass: the main pass, or the first pass if `stage` is "first".
        first: sums of the first pass over all data, by analyzer; empty if no analyzer needs one or `stage` is "first".
        notes: description of the model, the analyzers and the settings, from which the report is made.
    """

    path: str
    number: int
    of: int
    stage: str
    identity: Mapping[str, Any]
    counts: DataCounts | None
    tallies: Mapping[str, Tally]
    first: Mapping[str, Sums]
    notes: Mapping[str, Any]

    @property
    def is_done(self) -> bool:
        """Whether the shard was measured to its end."""
        return self.counts is not None and self.stage in self.tallies and self.tallies[self.stage].done

    @property
    def tally(self) -> Tally:
        """Tally of the pass whose sums the file holds."""
        return self.tallies[self.stage]

    def save(self, path: Path) -> None:
        """Write the part to the file of a shard.

        Args:
            path: path of the file.
        """
        (names, held), (notes, tensors) = first_notes(self.first), tallies_snapshot(self.tallies)
        ResumableFile(path, SHARD_FILE).save({**self.notes, **names, **notes}, {**held, **tensors})


class ShardFile(ResumableFile):
    """The file of a shard, which is also its checkpoint.

    Args:
        path: path of the file; None to keep the sums of the shard in memory.
        identity: identity of the run and the shard.
        describe: function that returns the description that the file holds beside the tallies, at the moment of writing.
    """

    def __init__(self, path: Path | None, identity: Mapping[str, Any], describe: Callable[[], Snapshot]) -> None:
        super().__init__(path, SHARD_FILE, identity)
        self._describe = describe

    def write(self, notes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
        """Write the tallies with the description of the run."""
        more, held = self._describe()
        return super().write({**more, **notes}, {**held, **tensors})

    def resume_part(self) -> ShardPart | None:
        """Read the state of the shard; None if there is no file yet."""
        path = str(self.path)
        return self.resume(lambda notes, tensors: part_of(path, notes, tensors))

    def part(self, tallies: Mapping[str, Tally]) -> ShardPart:
        """The state of the shard as its file would hold it.

        Args:
            tallies: tallies by pass, "first" or "main".
        """
        (more, held), (notes, tensors) = self._describe(), tallies_snapshot(tallies)
        return part_of(str(self.path or "memory"), {**more, **notes, "identity": self.identity}, {**held, **tensors})


def read_part(path: str | os.PathLike[str]) -> ShardPart:
    """Read the file of a shard.

    Args:
        path: path of the file.

    Raises:
        FileNotFoundError: there is no such file.
        LayersimError: the file is damaged, or is not the file of a shard.
    """
    return ResumableFile(path, SHARD_FILE).read(lambda notes, tensors: part_of(str(path), notes, tensors))


def part_of(path: str, notes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ShardPart:
    """The part in a file, from its notes and tensors; malformed ones may raise any exception."""
    identity = dict(notes["identity"])
    number, of = identity.pop("shard")
    stage = identity.pop("stage")
    counts = None
    if notes["counts"] is not None:
        refuse_other_types(DataCounts, notes["counts"])
        counts = DataCounts(**{field.name: notes["counts"][field.name] for field in fields(DataCounts)})
    held = {"number": number, "of": of, "stage": stage}
    refuse_other_types(ShardPart, held)
    if not 0 <= number < of:
        raise ValueError(f"shard {number} of {of}")
    first = _sums_of("all first", notes["first"], tensors)
    return ShardPart(
        path, **held, identity=identity, counts=counts, tallies=tallies_of(notes, tensors), first=first, notes=notes
    )


def first_notes(first: Mapping[str, Sums]) -> Snapshot:
    """The sums of the first pass over all data, in the form that a file holds."""
    tensors = {f"all first/{name}/{key}": tensor for name, own in first.items() for key, tensor in own.fields.items()}
    return {"first": list(first)}, tensors


def digest_of(first: Mapping[str, Sums]) -> str:
    """SHA-256 of the sums of a first pass; "" without a first pass."""
    if not first:
        return ""
    whole = hashlib.sha256()
    for name in sorted(first):
        whole.update(checksum(name, dict(first[name].fields)).encode())
    return whole.hexdigest()


# A folder, a pattern or a path; or several paths.
FilesArgument: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class Shard:
    """One of several shards of a run, and the file for its sums.

    Attributes:
        number: index of the shard, from 0.
        of: number of shards of the run.
        save_to: path of the shard's file.
        first: files of the first stage; None if not given.
    """

    number: int
    of: int
    save_to: Path
    first: tuple[Path, ...] | None = None


def chosen_shard(
    shard: tuple[int, int] | None,
    save_to: str | os.PathLike[str] | None,
    first: FilesArgument | None,
    checkpoint: str | os.PathLike[str] | None,
    blocking: bool,
) -> Shard | None:
    """The shard that the arguments of `analyze` name; None for a run over all data.

    Args:
        shard: index of the shard and number of shards.
        save_to: path of the shard's file.
        first: files of the first stage.
        checkpoint: the option `checkpoint`, which a shard does not take.
        blocking: the option `blocking`, which is True for a shard.

    Raises:
        LayersimError: the arguments contradict each other, or no file can be written at `save_to`.
    """
    if shard is None:
        for name, value in (("save_to", save_to), ("first", first)):
            if value is not None:
                raise LayersimError(f"`{name}` is {brief(value)}; it needs `shard`, such as shard=(0, 64).")
        return None
    number, of = shard
    if not 0 <= number < of:
        raise LayersimError(
            f"`shard` is ({number}, {of}); it must be the index of a shard, from 0, and the number of shards, which is larger."
        )
    if save_to is None:
        raise LayersimError(f"`shard` is ({number}, {of}); it needs `save_to`, the path of a file for the sums of this shard.")
    if checkpoint is not None:
        raise LayersimError("`checkpoint` cannot be combined with `shard`: the file of a shard, `save_to`, is its checkpoint.")
    if not blocking:
        raise LayersimError("`blocking=False` cannot be combined with `shard`.")
    if rank_and_size()[1] > 1:
        raise LayersimError(
            f"`shard` is ({number}, {of}); it cannot be used in a torch.distributed group, whose {rank_and_size()[1]} "
            "ranks divide the data already."
        )
    refuse_unwritable(save_to, "save_to")
    return Shard(number, of, Path(save_to), None if first is None else paths_of(first, "first"))


def paths_of(files: FilesArgument, argument: str) -> tuple[Path, ...]:
    """Paths of files: the files in a folder, the files that match a pattern, or the given paths.

    Args:
        files: a folder, a pattern or a path; or several paths.
        argument: name of the argument that holds them, for messages.

    Raises:
        LayersimError: there is no file.
    """
    if isinstance(files, (str, os.PathLike)):
        path = Path(files)
        if path.is_dir():
            found = sorted(path.glob("*.safetensors"))
        elif not path.exists() and any(mark in path.name for mark in "*?["):
            found = sorted(path.parent.glob(path.name))
        else:
            found = [path]
    else:
        found = [Path(file) for file in files]
    if not found:
        raise LayersimError(f"`{argument}` is {brief(files)}; no such file exists.")
    return tuple(found)


def refuse_one_shot(batches: Batches) -> None:
    """Raise an error for data that can be read only once. A shard reads it twice: to count its batches, and to run.

    Args:
        batches: the data.
    """
    if batches.one_shot:
        raise LayersimError(
            "`data` can be read only once, and a shard reads it twice. Pass list(data), or "
            "datasets.Dataset.from_generator(...)."
        )


def count_data(batches: Batches) -> DataCounts:
    """Read and tokenise all data once, and count its batches, rows and tokens.

    Args:
        batches: the data.
    """
    digest, marked = new_digest(), batches.data.selection.marked
    number = measured = sequences = tokens = rows = capacity = 0
    bar: Any = tqdm(desc="counting", unit="token", unit_scale=True, disable=None)
    with bar:
        for batch in batches:
            fingerprint(digest, batch, marked)
            counted, size = int(batch.counted.sum()), len(batch.tokens)
            number, sequences, tokens, capacity = number + 1, sequences + size, tokens + counted, batch.capacity
            measured, rows = measured + (counted > 0), rows + size * (counted > 0)
            bar.update(counted)
    # As a pass over the data counts: no row, no digest.
    return DataCounts(number, measured, sequences, tokens, digest.hexdigest() if number else "", rows, capacity)
