"""`AdapterSteps`: training steps and evaluations of adapters in the residual stream of a frozen model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..core.errors import LayersimError
from ..core.resumable_file import ResumableFile, Snapshot
from ..core.training_loop import Shuffle, TrainingSteps, run_steps, save_state
from ..remote.low_rank_adapters import Item, Parts, RemoteDescent
from ..sources.model import Model
from .losses import positions_with_targets
from .settings import curve_of
from .training_data import TrainingData


@dataclass(frozen=True)
class AdapterSettings:
    """Settings of adapter training.

    Attributes:
        rank: rank of each adapter.
        steps: number of optimiser steps, each on one batch.
        lr: learning rate at the first step.
        batch_size: number of rows in a step.
        seed: seed of A and of the order of rows.
    """

    rank: int
    steps: int
    lr: float
    batch_size: int
    seed: int

    def rate(self, step: int) -> float:
        """The learning rate at a step, counted from 0. It decreases linearly."""
        return self.lr * (self.steps - step) / self.steps


class AdapterSteps(TrainingSteps):
    """AdamW training of adapters, in this process or on a server, with a state that can be saved and resumed.

    Args:
        descent: runs steps and evaluations, in this process or on a server.
        data: training rows and held-out rows.
        model: description of the model.
        settings: settings of the training.

    Attributes:
        start: initial adapters, which do not change the model, and AdamW's initial moments.
        state: adapters, moments, and the losses `layer` of each step.
    """

    title = "adapters"

    def __init__(
        self,
        descent: RemoteDescent,
        data: tuple[TrainingData, TrainingData],
        model: Model,
        settings: AdapterSettings,
    ) -> None:
        assert model.head is not None
        self.descent, self.head_reads, self.settings, self.steps = descent, model.head.reads, settings, settings.steps
        self.training_data, self.eval_data = data
        self.start = _start(model, len(descent.at), settings.rank, settings.seed)
        self.state: tuple[Parts, list[Tensor]] = (self.start, [])
        self._shuffle = Shuffle(len(self.training_data), settings.seed)
        self._weights = torch.tensor(descent.weights, dtype=torch.float64)

    def restore(self, file: ResumableFile) -> None:
        """Load the state from a file.

        Raises:
            LayersimError: the file is damaged, or belongs to another run.
        """
        self.state = file.resume(self._state_of) or self.state

    def run(self, file: ResumableFile) -> tuple[Parts, Tensor]:
        """Train to the last step. Returns the adapters and the losses of all steps, `step layer`.

        Raises:
            LayersimError: a loss or an adapter is not finite.
        """
        run_steps(self, file)
        save_state(self, file)
        parts, curve = self.state
        return parts, torch.stack(curve)

    @property
    def step(self) -> int:
        return len(self.state[1])

    @contextmanager
    def running(self, bar: Any) -> Iterator[None]:
        run = self.descent.run(self.steps, self._item_of_step, self.state[0], self.step, bar.set_postfix_str)
        with closing(run) as self._requests:
            yield

    def compute(self) -> Sequence[float]:
        sums, self._parts = next(self._requests)
        self._losses = [loss / count for loss, count in sums]
        return [float(loss @ self._weights) for loss in self._losses]

    def diverges(self, losses: Sequence[float]) -> bool:
        return super().diverges(losses) or not all(bool(self._parts[name].isfinite().all()) for name in ("up", "down"))

    def on_divergence(self, losses: Sequence[float]) -> None:
        raise LayersimError(
            f"The training diverged: a loss or an adapter is not finite by step {self.step + len(losses)} of {self.steps}. "
            f"Use a lower lr, such as {self.settings.lr / 10:g}, with another checkpoint=."
        )

    def apply(self) -> None:
        # One assignment: an interrupt leaves all of a step or nothing.
        self.state = (self._parts, self.state[1] + self._losses)

    def snapshot(self) -> Snapshot | None:
        parts, curve = self.state
        return ({"step": self.step}, parts | {"curve": torch.stack(curve)}) if curve else None

    def evaluate(self, parts: Parts) -> Tensor:
        """Held-out loss of each layer with the adapters, `layer`, in nats."""
        count, size = len(self.eval_data), self.settings.batch_size
        batches = [range(start, min(start + size, count)) for start in range(0, count, size)]
        losses, targets = torch.zeros((), dtype=torch.float64), 0
        with tqdm(total=len(batches), desc="held out", unit="batch", disable=None, leave=False) as bar:
            run = self.descent.run(
                len(batches), lambda number: self._item(self.eval_data, batches[number]), parts, say=bar.set_postfix_str
            )
            for sums, _ in run:
                for loss, number in sums:
                    losses, targets = losses + loss, targets + number
                bar.update(len(sums))
        return losses / targets

    def _item(self, data: TrainingData, rows: Sequence[int], step: int = 0, rate: float | None = None) -> Item:
        """The inputs of a step or an evaluation on these rows."""
        batch = data.take(rows)
        index, targets = positions_with_targets(self.head_reads, batch.targets, batch.attended, batch.main.shape[1])
        item = self.descent.item(batch.main, batch.options, index, targets, step, rate)
        if self.head_reads != "rows":
            return item
        attended = torch.ones_like(batch.main) if batch.attended is None else batch.attended
        return item | {"attended": attended.to(torch.int32)}

    def _item_of_step(self, step: int) -> Item:
        """The inputs of a step, counted from 0."""
        size = self.settings.batch_size
        rows = [self._shuffle.row(place) for place in range(step * size, (step + 1) * size)]
        return self._item(self.training_data, rows, step + 1, self.settings.rate(step))

    def _state_of(self, notes: Mapping[str, Any], tensors: Parts) -> tuple[Parts, list[Tensor]]:
        """The state in a file. Raises an error if its tensors do not have the shapes of the initial state."""
        steps, start = len(curve_of(notes, tensors)), self.start
        parts = {name: tensors[name] for name in start}
        wrong = [name for name, part in parts.items() if part.shape != start[name].shape or part.dtype != start[name].dtype]
        if wrong or tensors["curve"].shape != (steps, len(self._weights)):
            raise ValueError(f"other shapes of {', '.join(wrong) or 'curve'}")
        return parts, list(tensors["curve"])


def _start(model: Model, count: int, rank: int, seed: int) -> Parts:
    """The initial state of the adapters: A is normal with variance 1 / d_model; B and AdamW's moments are zero."""
    assert model.d_model is not None
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if model.dtype == "torch.float64" else torch.float32
    down = torch.randn(count, rank, model.d_model, generator=generator, dtype=torch.float64) / math.sqrt(model.d_model)
    parts = {"down": down.to(dtype), "up": torch.zeros(count, model.d_model, rank, dtype=dtype)}
    moments = ("mean", "square")
    return parts | {f"{name} {moment}": torch.zeros_like(part) for name, part in parts.items() for moment in moments}
