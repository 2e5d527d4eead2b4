"""Resumable files: the state of an interrupted run, from which the same call continues.

Analyses, stitches, trainings and runs on servers keep their state in such files. This module writes and reads them, compares
identities, spaces out saves, and says where to resume; only the caller knows the content of the state.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from .errors import LayersimError, warn
from .file_format import read, reading, write

T = TypeVar("T")
# Named notes, which JSON can hold, and named tensors.
Snapshot = tuple[Mapping[str, Any], Mapping[str, Tensor]]
SECONDS_BETWEEN_SAVES = 30.0
# Pause between saves, as a multiple of the last save's duration: large models take long to write.
SAVE_SPACING = 20
RESTART = "Delete the file or pass another path, and the run starts again"
# By kind of file: the expected content, and the remedy if the content is incomplete.
CONTENTS = {
    "checkpoint": ("a complete checkpoint of an analysis", RESTART),
    "stitches": ("a complete checkpoint of stitches", RESTART),
    "training": ("a complete checkpoint of a training", RESTART),
    "sweep_folder": ("a complete record of a sweep", "Pass another folder, and the sweep starts again"),
    "shard": ("a complete shard of an analysis", "Delete the file, and repeat the call that wrote it"),
    "remote_run": ("a complete run", "Pass the path that was given to save()"),
}


def plain(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the identity of a run (model, data, settings) to the form that JSON stores: tuples become lists."""
    plain_identity: dict[str, Any] = json.loads(json.dumps(identity, default=str))
    return plain_identity


def refuse_other_run(path: Path, identity: Any, identity_in_file: Any) -> None:
    """Raise an error if a file belongs to another run.

    Args:
        path: path of the file.
        identity: identity of this run.
        identity_in_file: the identity in the file.

    Raises:
        LayersimError: the identities differ; the message shows the differing entries.
    """
    if identity != identity_in_file:
        now, then = differences(identity, identity_in_file)
        raise LayersimError(f"{path} belongs to another run, with {then}; this call has {now}. Pass another path.")


class ResumableFile:
    """The file that keeps the state of one run.

    Its header holds the identity of the run and named notes; beside it are named tensors.

    Args:
        path: path of the file; None keeps nothing.
        kind: kind of file, a key of `CONTENTS`.
        identity: model, data and settings of the run; None for a file without identity, which any call may read.
        refuse: takes the identity of this run and the identity in the file, and raises an error if they differ.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        kind: str,
        identity: Mapping[str, Any] | None = None,
        refuse: Callable[[Path, Any, Any], None] = refuse_other_run,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.identity = None if identity is None else plain(identity)
        self._kind = kind
        self._refuse = refuse
        self._time_of_next_save = time.monotonic() + SECONDS_BETWEEN_SAVES

    def resume(self, parse: Callable[[Mapping[str, Any], dict[str, Tensor]], T]) -> T | None:
        """Read the state of the run; None if no file exists yet."""
        if self.path is None or not self.path.exists():
            return None
        return self.read(parse)

    def read(self, parse: Callable[[Mapping[str, Any], dict[str, Tensor]], T]) -> T:
        """Read the state of the run from its file.

        Args:
            parse: makes the state from the notes and tensors in the file. An exception that it raises becomes a `LayersimError`
                that names the file.

        Raises:
            FileNotFoundError: no such file exists.
            LayersimError: the file is damaged, or of another run.
        """
        assert self.path is not None
        header, tensors = read(self.path, (self._kind,))
        with self.parsing():
            if self.identity is not None:
                self._refuse(self.path, self.identity, header["identity"])
            return parse(header, tensors)

    def parsing(self) -> AbstractContextManager[None]:
        """Context manager that turns errors of a malformed state into a `LayersimError` that names the file."""
        return reading(str(self.path), *CONTENTS[self._kind])

    def write(self, notes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write the state atomically; without a path, do nothing.

        Raises:
            OSError: the file cannot be written; an older one is untouched.
        """
        if self.path is None:
            return
        header: dict[str, Any] = {}
        if self.identity is not None:
            header["identity"] = self.identity
        header |= notes
        start = time.monotonic()
        try:
            write(self.path, self._kind, header, tensors)
        finally:
            # After a failure too: the next attempt comes after a while, not at each step.
            now = time.monotonic()
            self._time_of_next_save = now + max(SECONDS_BETWEEN_SAVES, SAVE_SPACING * (now - start))

    def save(self, notes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write the state, or warn if the write fails."""
        try:
            self.write(notes, tensors)
        except OSError as error:
            warn(f"The checkpoint could not be written, and the run continues without it. {error}")

    @property
    def due(self) -> bool:
        """Whether enough time has passed since the last save."""
        return self.path is not None and time.monotonic() > self._time_of_next_save

    @contextmanager
    def saved_on_interrupt(self, snapshot: Callable[[], Snapshot | None], subject: Callable[[], str]) -> Iterator[None]:
        """Context manager that saves the state after an exception, Ctrl-C included.

        The exception gets a note of where the run can be resumed, or of why it cannot.

        Args:
            snapshot: the state at that moment; None if it cannot be kept.
            subject: subject and verb of the note, such as "The sums of 1024 tokens are".
        """
        try:
            yield
        except BaseException as error:
            try:
                state = None if self.path is None else snapshot()
                if state is not None:
                    self.write(*state)
                    error.add_note(f"{subject()} in {self.path}; the same call continues from there.")
            except OSError as write_error:
                error.add_note(str(write_error))
            raise


def differences(now: Any, then: Any) -> tuple[str, str]:
    """Entries in which the identities of two runs differ, as one text for each run.

    Args:
        now: identity of this run (model, data, settings).
        then: identity of the other run.

    Returns:
        The entries of `now`, and the entries of `then`.

    Examples:
        >>> differences({"model": "a", "data": {"seq_len": 8}}, {"model": "a", "data": {"seq_len": 9}})
        ('data: seq_len: 8', 'data: seq_len: 9')
        >>> differences({"models": [["1f", "gpt2"]]}, {"models": [["2e", "gpt2"]]})
        ('models: 1f', 'models: 2e')
    """
    if isinstance(now, dict) and isinstance(then, dict):
        keys = [key for key in now | then if now.get(key) != then.get(key)]
        parts_of_now = []
        parts_of_then = []
        for key in keys:
            part_of_now, part_of_then = differences(now.get(key), then.get(key))
            parts_of_now.append(f"{key}: {part_of_now}")
            parts_of_then.append(f"{key}: {part_of_then}")
        return ", ".join(parts_of_now), ", ".join(parts_of_then)
    if isinstance(now, list) and isinstance(then, list) and len(now) == len(then) and now != then:
        pairs = [differences(*items) for items in zip(now, then, strict=True) if items[0] != items[1]]
        return ", ".join(part_of_now for part_of_now, _ in pairs), ", ".join(part_of_then for _, part_of_then in pairs)
    return str(now) or "''", str(then) or "''"
