"""Tally: the progress of one pass over the data, and the sums of its batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .sums import Sums


@dataclass(frozen=True)
class Tally:
    """The progress of one pass over the data, and the sums of its batches.

    Attributes:
        sums: by analyzer name.
        batches: number of batches read, those of other ranks included.
        sequences: rows in them.
        tokens: counted positions in them.
        digest: SHA-256 of their rows.
        seconds: wall time.
        done: whether the data ended.
        pending: sums of the last batches that are not in `sums` yet, with how many batches each holds (`pairwise_summation`).
        measured: number of batches on which the model ran.
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
