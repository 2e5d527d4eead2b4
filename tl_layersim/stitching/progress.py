"""Stitches on disk: those that are done, and where the one under way stands."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from ..core.resumable import ANEW, SECONDS_BETWEEN_SAVES, refuse_other_run, saved_or_warned
from ..core.storage import read, reading, write

T = TypeVar("T")
WHOLE = "a whole checkpoint of stitches"


class Progress:
    """The file of one call; `path=None` keeps nothing.

    Args:
        path: where.
        identity: what the call is: models, data, settings. A file of another call is refused.
    """

    def __init__(self, path: str | os.PathLike[str] | None, identity: Mapping[str, Any]) -> None:
        self.path = None if path is None else Path(path)
        self._identity = json.loads(json.dumps(identity, default=str))
        self._notes: dict[str, dict[str, Any]] = {}
        self._tensors: dict[str, Mapping[str, Tensor]] = {}
        self._written = time.monotonic()
        if self.path is None:
            return
        if self.path.exists():
            self._read(self.path)

    def _read(self, path: Path) -> None:
        header, tensors = read(path, ("stitches",))
        with reading(path, WHOLE, ANEW):
            refuse_other_run(path, self._identity, header["identity"])
            self._notes = {key: dict(note) for key, note in header["stitches"].items()}
            for key, note in self._notes.items():
                if type(note["done"]) is not bool:
                    raise TypeError(f"done is {note['done']!r}")
                self._tensors[key] = {
                    name.split("/", 1)[1]: value for name, value in tensors.items() if name.split("/", 1)[0] == key
                }

    def get(self, key: str, take: Callable[[dict[str, Any], Mapping[str, Tensor]], T]) -> T | None:
        """What `take` makes of what is known of a stitch; None where nothing is.

        Raises:
            LayersimError: the file lacks something.
        """
        if key not in self._notes:
            return None
        with reading(str(self.path), WHOLE, ANEW):
            return take(self._notes[key], self._tensors[key])

    def done(self, key: str) -> bool:
        """Whether a stitch stands in the file whole."""
        return key in self._notes and bool(self._notes[key]["done"])

    def put(self, key: str, note: dict[str, Any], tensors: Mapping[str, Tensor], now: bool) -> None:
        """Note how a stitch stands; written now, or once in a while."""
        if self.path is None:
            return
        self._notes[key], self._tensors[key] = note, tensors
        if now or time.monotonic() - self._written > SECONDS_BETWEEN_SAVES:
            saved_or_warned(self.save)
            # Tried again after a while, not at each step.
            self._written = time.monotonic()

    def save(self) -> bool:
        """Write it, all or nothing; False where there is no file, or nothing is known yet."""
        if self.path is None or not self._notes:
            return False
        tensors = {f"{key}/{name}": value for key, own in self._tensors.items() for name, value in own.items()}
        write(self.path, "stitches", {"identity": self._identity, "stitches": self._notes}, tensors)
        return True
