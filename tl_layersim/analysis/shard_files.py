"""Files of shards: the sums of a part of the data, and what a report needs beside them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from ..core.data_pass_progress import Tally
from ..core.field_types import refuse_other_types
from ..core.resumable_file import ResumableFile, Snapshot
from ..core.storage import checksum
from ..core.sums import Sums
from .checkpoint import tallies_of, tallies_snapshot

SHARD_FILE = "shard"
# Labels of the passes whose sums a file holds, as in a checkpoint.
FIRST, MAIN = "first", "main"


@dataclass(frozen=True)
class DataCounts:
    """Counts of all data, equal in all shards of a run.

    Attributes:
        batches: number of batches.
        measured: number of those with a counted position, which the shards divide among them.
        sequences: number of rows.
        tokens: number of counted positions.
        digest: SHA-256 of the rows.
        rows: number of rows in the measured batches.
        capacity: rows of each batch but the last.
    """

    batches: int
    measured: int
    sequences: int
    tokens: int
    digest: str
    rows: int
    capacity: int

    def within(self, number: int, of: int) -> range:
        """Numbers of the batches of a shard, among those with a counted position.

        Args:
            number: of the shard.
            of: number of shards.

        Examples:
            >>> counts = DataCounts(8, 7, 14, 70, "", 14, 2)
            >>> [list(counts.within(number, 3)) for number in range(3)]
            [[0, 1], [2, 3], [4, 5, 6]]
        """
        return range(self.measured * number // of, self.measured * (number + 1) // of)


@dataclass(frozen=True)
class ShardPart:
    """What the file of a shard holds, beside the tensors of its sums.

    Attributes:
        path: of the file, or another name of the part for messages.
        number: of the shard, from 0.
        of: number of shards.
        stage: "first" for the sums of a first pass, from which the main pass continues; "main" for those of a report.
        identity: model, analyzers, options and version, as plain data; equal in all shards of a run.
        counts: of all data; None where the data was not read to its end yet.
        tallies: by pass; the main pass, or the first pass where `stage` is "first".
        first: sums of the first pass over all data, by analyzer; empty where no analyzer needs one or `stage` is "first".
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
        """Of the pass whose sums it holds."""
        return self.tallies[self.stage]

    def save(self, path: Path) -> None:
        """Write the part to a file, as that of a shard.

        Args:
            path: of the file.
        """
        (names, held), (notes, tensors) = first_notes(self.first), tallies_snapshot(self.tallies)
        ResumableFile(path, SHARD_FILE).save({**self.notes, **names, **notes}, {**held, **tensors})


class ShardFile(ResumableFile):
    """The file of a shard, which is its checkpoint too.

    Args:
        path: of the file; None for a shard whose sums stay in memory.
        identity: of the run and the shard.
        describe: gives what the file holds beside the tallies, at the moment of writing.
    """

    def __init__(self, path: Path | None, identity: Mapping[str, Any], describe: Callable[[], Snapshot]) -> None:
        super().__init__(path, SHARD_FILE, identity)
        self._describe = describe

    def write(self, notes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
        """Write the tallies with the description of the run."""
        more, held = self._describe()
        return super().write({**more, **notes}, {**held, **tensors})

    def resume_part(self) -> ShardPart | None:
        """Read the state of the shard; None where no file exists yet."""
        path = str(self.path)
        return self.resume(lambda notes, tensors: part_of(path, notes, tensors))

    def part(self, tallies: Mapping[str, Tally]) -> ShardPart:
        """The state of the shard as its file would hold it.

        Args:
            tallies: by pass.
        """
        (more, held), (notes, tensors) = self._describe(), tallies_snapshot(tallies)
        return part_of(str(self.path or "memory"), {**more, **notes, "identity": self.identity}, {**held, **tensors})


def read_part(path: str | os.PathLike[str]) -> ShardPart:
    """Read the file of a shard.

    Args:
        path: of the file.

    Raises:
        FileNotFoundError: no such file exists.
        LayersimError: the file is damaged, or holds something else.
    """
    return ResumableFile(path, SHARD_FILE).read(lambda notes, tensors: part_of(str(path), notes, tensors))


def part_of(path: str, notes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ShardPart:
    """What a file holds, from its notes and tensors; malformed ones may raise any exception."""
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
    first: dict[str, dict[str, Tensor]] = {name: {} for name in notes["first"]}
    for key, tensor in tensors.items():
        heading, name, field_name = key.split("/", 2)
        if heading == "all first":
            first[name][field_name] = tensor
    sums = {name: Sums(own) for name, own in first.items()}
    return ShardPart(
        path, **held, identity=identity, counts=counts, tallies=tallies_of(notes, tensors), first=sums, notes=notes
    )


def first_notes(first: Mapping[str, Sums]) -> Snapshot:
    """The sums of the first pass over all data, as a file holds them."""
    tensors = {f"all first/{name}/{key}": tensor for name, own in first.items() for key, tensor in own.fields.items()}
    return {"first": list(first)}, tensors


def digest_of(first: Mapping[str, Sums]) -> str:
    """SHA-256 of the sums of a first pass; "" without one."""
    if not first:
        return ""
    whole = hashlib.sha256()
    for name in sorted(first):
        whole.update(checksum(name, dict(first[name].fields)).encode())
    return whole.hexdigest()
