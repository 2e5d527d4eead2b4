"""Where a training stands, on disk: it goes on from there with the same numbers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import SECONDS_BETWEEN_SAVES, refuse_no_place, refuse_other_run
from ..errors import LayersimError
from ..storage import read, write


@dataclass
class State:
    """How far a training is.

    Attributes:
        step: how many optimiser steps were made.
        curve: loss of each.
        looks: by step, `3 layer` of the held-out data as `Objective.judge` gives it.
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
        if self.path is not None:
            refuse_no_place(self.path)

    def load(self) -> tuple[State, dict[str, Tensor]] | None:
        """Where the run stands, and its weights and moments; None where there is no file yet."""
        if self.path is None or not self.path.exists():
            return None
        header, tensors = read(self.path, ("training",))
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
        return state, tensors

    @property
    def due(self) -> bool:
        """Whether the last save is a while ago."""
        return self.path is not None and time.monotonic() > self._next

    def save(self, state: State, tensors: Mapping[str, Tensor]) -> None:
        """Write it, all or nothing."""
        if self.path is None:
            return
        began = time.monotonic()
        known = {"curve": torch.tensor(state.curve, dtype=torch.float64)}
        known |= {f"look/{step}": look for step, look in state.looks.items()}
        write(self.path, "training", {"identity": self._identity, "step": state.step}, dict(tensors) | known)
        # Large models take long to write: at most a twentieth of the time.
        self._next = time.monotonic() + max(SECONDS_BETWEEN_SAVES, 20 * (time.monotonic() - began))
