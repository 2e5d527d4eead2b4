"""Files of shards: the sums of a part of the data, and what a report needs beside them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from ..core.data_pass_progress import Tally
from ..core.errors import LayersimError
from ..core.field_types import refuse_other_types
from ..core.resumable_file import ResumableFile, Snapshot
from ..core.storage import checksum
from ..core.sums import Sums
from .checkpoint import tallies_of

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


class ShardFile(ResumableFile):
    """The file of a shard, which is its checkpoint too.

    Args:
        path: of the file.
        identity: of the run and the shard.
        describe: gives what the file holds beside the tallies, at the moment of writing.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], describe: Callable[[], Snapshot]) -> None:
        super().__init__(path, SHARD_FILE, identity, _refuse_other_shard)
        self._describe = describe

    def write(self, notes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
        """Write the tallies with the description of the run."""
        more, held = self._describe()
        return super().write({**more, **notes}, {**held, **tensors})

    def resume_part(self) -> ShardPart | None:
        """Read the state of the shard; None where no file exists yet."""
        path = str(self.path)
        return self.resume(lambda notes, tensors: part_of(path, notes, tensors))


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


def counts_notes(counts: DataCounts | None) -> dict[str, Any] | None:
    """The counts of the data as plain data."""
    return None if counts is None else asdict(counts)


def digest_of(first: Mapping[str, Sums]) -> str:
    """SHA-256 of the sums of a first pass; "" without one."""
    if not first:
        return ""
    whole = hashlib.sha256()
    for name in sorted(first):
        whole.update(checksum(name, dict(first[name].fields)).encode())
    return whole.hexdigest()


def _refuse_other_shard(path: Path, identity: Any, found: Any) -> None:
    """Refuse a file that another call has written; the entries that differ are named."""
    differing = [key for key in identity | found if identity.get(key) != found.get(key)]
    if not differing:
        return
    given, expected = ({key: side.get(key) for key in differing} for side in (identity, found))
    raise LayersimError(
        f"`save_to` is {path}, a file of another shard or another run, with other "
        f"{', '.join(map(_entry_in_words, differing))}: {str(given)[:300]} in this call, {str(expected)[:300]} in the file."
    )


def _entry_in_words(key: str) -> str:
    """An entry of the identity, as messages name it."""
    words = {"models": "model", "code": "code of analyzers", "data": "options", "first": "sums of the first pass"}
    return {"version": "version of tl_layersim", "shard": "number of the shard"}.get(key, words.get(key, key))
