"""Progress of stitches in a resumable file: the stitches that are done, and the state of the one that is being trained."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch import Tensor

from ..core.resumable_file import ResumableFile, Snapshot

T = TypeVar("T")
# Notes and tensors, each by stitch.
States = tuple[dict[str, dict[str, Any]], dict[str, Mapping[str, Tensor]]]


class Progress:
    """The states of all stitches of one call, by name, and the file that keeps them.

    Args:
        path: of the file; None keeps nothing.
        identity: models, data and settings of the call. A file of another call is refused.
    """

    def __init__(self, path: str | os.PathLike[str] | None, identity: Mapping[str, Any]) -> None:
        self.file = ResumableFile(path, "stitches", identity)
        self._notes, self._tensors = self.file.resume(_states_of) or ({}, {})

    def get(self, key: str, parse: Callable[[dict[str, Any], Mapping[str, Tensor]], T]) -> T | None:
        """The state of a stitch, which `parse` reads from its notes and tensors; None if no state of the stitch is kept.

        Raises:
            LayersimError: the file lacks something.
        """
        if key not in self._notes:
            return None
        with self.file.parsing():
            return parse(self._notes[key], self._tensors[key])

    def done(self, key: str) -> bool:
        """Whether a stitch is complete in the file."""
        return key in self._notes and bool(self._notes[key]["done"])

    def put(self, key: str, note: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Record the state of a stitch, which the next save writes."""
        if self.file.path is not None:
            self._notes[key], self._tensors[key] = note, tensors

    def save(self) -> None:
        """Write all states."""
        if (state := self.snapshot()) is not None:
            self.file.save(*state)

    def saved_on_interrupt(self) -> AbstractContextManager[None]:
        """A context that writes all states where an exception, Ctrl-C included, ends the block."""
        return self.file.saved_on_interrupt(self.snapshot, lambda: "The state of the stitches is")

    def snapshot(self) -> Snapshot | None:
        """All states, for the file; None where nothing is known yet."""
        tensors = {f"{key}/{name}": value for key, own in self._tensors.items() for name, value in own.items()}
        return ({"stitches": self._notes}, tensors) if self._notes else None


def _states_of(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> States:
    notes: dict[str, dict[str, Any]] = {key: dict(note) for key, note in header["stitches"].items()}
    for note in notes.values():
        if type(note["done"]) is not bool:
            raise TypeError(f"done is {note['done']!r}")
    own: dict[str, Mapping[str, Tensor]] = {
        key: {name.split("/", 1)[1]: value for name, value in tensors.items() if name.split("/", 1)[0] == key} for key in notes
    }
    return notes, own
