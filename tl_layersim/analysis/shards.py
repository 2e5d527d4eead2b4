"""Shards: contiguous parts of the data, which separate processes measure and `merge` adds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tqdm.auto import tqdm

from ..core.distributed import rank_and_size
from ..core.errors import LayersimError
from ..core.storage import refuse_unwritable
from ..core.wording import brief
from ..data.batches import Batches
from ..data.digest import fingerprint, new_digest
from .shard_files import DataCounts

# A folder, a pattern or a path; or several paths.
FilesArgument: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class Shard:
    """One of several shards of a run, and the file of its sums.

    Attributes:
        number: of the shard, from 0.
        of: number of shards.
        save_to: path of its file.
        first: files of the first stage; None where they were not given.
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
        shard: its number and the number of shards.
        save_to: path of its file.
        first: files of the first stage.
        checkpoint: which a shard does not have.
        blocking: which a shard is.

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
            f"`shard` is ({number}, {of}); it must be the number of a shard, from 0, and the number of shards, above it."
        )
    if save_to is None:
        raise LayersimError(
            f"`shard` is ({number}, {of}), and `save_to` is missing: the path of the file with the sums of this shard."
        )
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
    return Shard(number, of, Path(save_to), None if first is None else listed(first, "first"))


def listed(files: FilesArgument, argument: str) -> tuple[Path, ...]:
    """The paths of files: those in a folder, those that a pattern matches, or those that were given.

    Args:
        files: a folder, a pattern or a path; or several paths.
        argument: that holds them, for messages.

    Raises:
        LayersimError: there is none.
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
        raise LayersimError(f"`{argument}` is {brief(files)}, where there is no file.")
    return tuple(found)


def refuse_one_shot(batches: Batches) -> None:
    """Refuse data that can be read only once: a shard reads it all to count its batches, and then runs on its own.

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
