"""Partial sums on disk: a run that was interrupted goes on where it was, and ends with the same numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from .distributed import ALONE, Deal, rank_and_size
from .errors import LayersimError, warn
from .field_types import refuse_other_types
from .storage import read, reading, refuse_unwritable, write
from .sums import Sums

SECONDS_BETWEEN_SAVES = 30.0
# Of a tally, what is kept beside its sums.
PLAIN = ("measured", "batches", "sequences", "tokens", "digest", "seconds", "done")
ANEW = "delete it, or pass another checkpoint path, and the run begins anew"


@dataclass(frozen=True)
class Tally:
    """How far one pass over the data is, and what it has summed.

    Attributes:
        sums: by analyzer name.
        batches: how many batches were read, those of other ranks included.
        sequences: rows in them.
        tokens: counted positions in them.
        digest: SHA-256 of their rows.
        seconds: wall time.
        done: whether the data ended.
        pending: sums of the last batches that are not in `sums` yet, with how many batches each holds (`pairwise_summation`).
        measured: on how many batches the model ran.
    """

    sums: Mapping[str, Sums] = field(default_factory=dict)
    batches: int = 0
    sequences: int = 0
    tokens: int = 0
    digest: str = ""
    seconds: float = 0.0
    done: bool = False
    pending: tuple[tuple[int, Mapping[str, Sums]], ...] = ()
    measured: int = 0


class Checkpoint:
    """The file of one run (and one rank); `path=None` keeps nothing.

    Args:
        path: where; a rank above 0 appends its number.
        identity: what the run is: model, analyzers, data settings. A file of another run is refused.
        deal: how batches are dealt.
    """

    def __init__(self, path: str | os.PathLike[str] | None, identity: Mapping[str, Any], deal: Deal = ALONE) -> None:
        rank, size = rank_and_size()
        self.path = None if path is None else Path(f"{path}.rank{rank}" if rank else path)
        # As it reads back from a file: tuples are lists there.
        self._identity = json.loads(json.dumps({**identity, "processes": size, "copies": deal.copies}, default=str))

    def load(self) -> dict[str, Tally]:
        """The tallies by pass; empty where there is no file yet.

        Raises:
            LayersimError: no file can be written there, or the one that is there is not whole or of another run.
        """
        if self.path is None:
            return {}
        refuse_unwritable(self.path, "checkpoint")
        if not self.path.exists():
            return {}
        header, tensors = read(self.path, ("checkpoint",))
        with reading(self.path, "a whole checkpoint of an analysis", ANEW):
            refuse_other_run(self.path, self._identity, header["identity"])
            return {label: _tally(label, kept, tensors) for label, kept in header["passes"].items()}

    def save(self, tallies: Mapping[str, Tally]) -> bool:
        """Write the tallies, all or nothing; False if there is no file to write."""
        if self.path is None:
            return False
        passes: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for label, tally in tallies.items():
            passes[label] = {name: getattr(tally, name) for name in PLAIN}
            passes[label] |= {"names": list(tally.sums), "pending": [count for count, _ in tally.pending]}
            for number, held in enumerate((tally.sums, *(sums for _, sums in tally.pending))):
                for name, sums in held.items():
                    tensors |= {f"{label}{number or ''}/{name}/{key}": tensor for key, tensor in sums.fields.items()}
        header = {"identity": self._identity, "passes": passes}
        write(self.path, "checkpoint", header, tensors)
        return True


def saved_or_warned(save: Callable[[], bool]) -> bool:
    """Whether a checkpoint was written. One that cannot be must not end a run whose results are still in memory."""
    try:
        return save()
    except OSError as error:
        warn(f"The run goes on without a new checkpoint. {error}")
        return False


def _tally(label: str, kept: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tally:
    """The tally that `save` wrote under one label."""
    plain = {name: kept[name] for name in PLAIN}
    refuse_other_types(Tally, plain)
    names, counts = kept["names"], kept["pending"]
    held = [_unpack(f"{label}{number or ''}", names, tensors) for number in range(len(counts) + 1)]
    return replace(Tally(**plain), sums=held[0], pending=tuple(zip(counts, held[1:], strict=True)))


def _unpack(where: str, names: list[str], tensors: Mapping[str, Tensor]) -> dict[str, Sums]:
    """The sums by analyzer name that `save` wrote under one heading."""
    fields: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for key, tensor in tensors.items():
        heading, name, field_name = key.split("/", 2)
        if heading == where:
            fields[name][field_name] = tensor
    return {name: Sums(found) for name, found in fields.items()}


def refuse_other_run(path: Path, identity: Any, found: Any) -> None:
    """Refuse a file that another call has written."""
    if identity != found:
        now, then = _differences(identity, found)
        raise LayersimError(
            f"{path} belongs to another run.",
            given=now,
            expected=then,
            do="make the same call as before, or pass another checkpoint path",
        )


def _differences(now: Any, then: Any) -> tuple[str, str]:
    """What differs between two identities, and nothing else."""
    if isinstance(now, dict) and isinstance(then, dict):
        keys = [key for key in now | then if now.get(key) != then.get(key)]
        parts = [_differences(now.get(key), then.get(key)) for key in keys]
        sides = ([f"{key}: {part[side]}" for key, part in zip(keys, parts, strict=True)] for side in (0, 1))
        given, expected = (", ".join(side) for side in sides)
        return given, expected
    return str(now), str(then)
