"""Where a training stands, on disk: it goes on from there with the same numbers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..core.resumable import ANEW, SECONDS_BETWEEN_SAVES, refuse_other_run, saved_or_warned
from ..core.storage import read, reading, write

T = TypeVar("T")


@dataclass
class State:
    """How far a training is.

    Attributes:
        step: how many optimiser steps were made.
        curve: loss of each.
        looks: by step, `3 layer` of the held-out data as `Objective.evaluate` gives it.
    """

    step: int = 0
    curve: list[float] = field(default_factory=list)
    looks: dict[int, Tensor] = field(default_factory=dict)


class Saved:
    """The file of one run; `path=None` keeps nothing.

    Args:
        path: where.
        identity: what the run is. A file of another run is refused.
    """

    def __init__(self, path: str | os.PathLike[str] | None, identity: Mapping[str, Any]) -> None:
        self.path = None if path is None else Path(path)
        self._identity = json.loads(json.dumps(identity, default=str))
        self._next = time.monotonic() + SECONDS_BETWEEN_SAVES

    def load(self, take: Callable[[State, dict[str, Tensor]], T]) -> T | None:
        """What `take` makes of where the run stands, its weights and its moments; None where there is no file yet.

        Raises:
            LayersimError: the file is not whole, or of another run.
        """
        if self.path is None or not self.path.exists():
            return None
        header, tensors = read(self.path, ("training",))
        with reading(self.path, "a whole checkpoint of a training", ANEW):
            ours, theirs = ({k: v for k, v in found.items() if k != "model"} for found in (self._identity, header["identity"]))
            if ours == theirs and self._identity["model"] != header["identity"]["model"]:
                raise LayersimError(
                    f"The model is not as it was when the run in {self.path} began.",
                    given=f"{self._identity['model'][0]} with other weights, such as those that this run has trained already",
                    expected="the model as it was before the run",
                    do="load it again, and make the same call; or pass another checkpoint path",
                )
            refuse_other_run(self.path, self._identity, header["identity"])
            looks = {int(key.split("/")[1]): tensors.pop(key) for key in [k for k in tensors if k.startswith("look/")]}
            state = State(header["step"], tensors.pop("curve").tolist(), dict(sorted(looks.items())))
            if type(state.step) is not int or len(state.curve) != state.step:
                raise ValueError(f"step is {state.step!r}, and the curve has {len(state.curve)} steps")
            return take(state, tensors)

    @property
    def due(self) -> bool:
        """Whether the last save is a while ago."""
        return self.path is not None and time.monotonic() > self._next

    def save(self, state: State, tensors: Mapping[str, Tensor]) -> bool:
        """Write it, all or nothing; False, with a warning, where that is not possible, and where there is no file to write."""
        path = self.path
        if path is None:
            return False
        began = time.monotonic()
        known = {"curve": torch.tensor(state.curve, dtype=torch.float64)}
        known |= {f"look/{step}": look for step, look in state.looks.items()}
        header = {"identity": self._identity, "step": state.step}
        written = saved_or_warned(lambda: bool(write(path, "training", header, dict(tensors) | known)))
        # Large models take long to write: at most a twentieth of the time.
        self._next = time.monotonic() + max(SECONDS_BETWEEN_SAVES, 20 * (time.monotonic() - began))
        return written
