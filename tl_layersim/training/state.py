"""State of a training, as notes and tensors of a resumable file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..core.resumable_file import ResumableFile, Snapshot, refuse_other_run


@dataclass
class State:
    """The progress of a training.

    Attributes:
        step: number of optimiser steps made.
        curve: loss of each step.
        evaluations: by step, sums `3 layer` over the held-out data as `Objective.evaluate` gives them.
    """

    step: int = 0
    curve: list[float] = field(default_factory=list)
    evaluations: dict[int, Tensor] = field(default_factory=dict)


def open_training_file(path: str | os.PathLike[str] | None, identity: Mapping[str, Any]) -> ResumableFile:
    """Open the resumable file of a training; nothing is saved if `path` is None.

    Args:
        path: of the file.
        identity: model, data and settings. A file of another run is refused.
    """
    return ResumableFile(path, "training", identity, _refuse)


def state_snapshot(state: State, tensors: Mapping[str, Tensor]) -> Snapshot:
    """Notes and tensors of the state and of further tensors, for a resumable file."""
    curve = {"curve": torch.tensor(state.curve, dtype=torch.float64)}
    evaluations = {f"look/{step}": sums for step, sums in state.evaluations.items()}
    return {"step": state.step}, dict(tensors) | curve | evaluations


def state_of(notes: Mapping[str, Any], tensors: dict[str, Tensor]) -> tuple[State, dict[str, Tensor]]:
    """Inverse of `state_snapshot`: the state and the further tensors."""
    evaluations = {int(key.split("/")[1]): value for key, value in tensors.items() if key.startswith("look/")}
    further = {key: value for key, value in tensors.items() if key != "curve" and not key.startswith("look/")}
    state = State(notes["step"], tensors["curve"].tolist(), dict(sorted(evaluations.items())))
    if type(state.step) is not int or len(state.curve) != state.step:
        raise ValueError(f"step is {state.step!r}, and the curve has {len(state.curve)} steps")
    return state, further


def _refuse(path: Path, identity: Any, found: Any) -> None:
    """Refuse a file of another run, and a model whose weights are not those with which the run in the file began."""
    ours, theirs = ({key: value for key, value in each.items() if key != "model"} for each in (identity, found))
    if ours == theirs and identity["model"] != found["model"]:
        raise LayersimError(
            f"`model` is {identity['model'][0]} with other weights than those with which the run in {path} began. Load it "
            "again, or pass another checkpoint path."
        )
    refuse_other_run(path, identity, found)
