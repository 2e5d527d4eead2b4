"""The training loop: steps in a shuffled order, the progress bar, saves, interrupts, and a training that diverges.

Fine-tunes, stitches and adapters of frozen models are trained by this loop. Each of them provides its steps and its state.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tqdm.auto import tqdm

from .resumable_file import ResumableFile, Snapshot


class Shuffle:
    """All rows in a random order, in another one each epoch.

    The order is a function of the seed and the epoch, so that a resumed training needs nothing but the number of its step.

    Args:
        count: number of rows.
        seed: of the orders.

    Examples:
        >>> shuffle = Shuffle(3, seed=0)
        >>> [shuffle.row(place) for place in range(6)]
        [2, 0, 1, 1, 2, 0]
    """

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed
        self._epoch, self._order = -1, list[int]()

    def row(self, place: int) -> int:
        """Index of the row at a place in the sequence of all epochs; both are counted from 0."""
        epoch = place // self.count
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(self.count, generator=generator).tolist()
        return self._order[place % self.count]


class TrainingSteps(ABC):
    """The steps of a training and its state, as the training loop drives them.

    Attributes:
        title: of the progress bar.
        steps: number of steps of the whole training.
        leads: whether this process shows the bar and writes the file; one of several does.
        nested: whether the bar disappears at the end, since it stands below another one.
    """

    title: str
    steps: int
    leads: bool = True
    nested: bool = False

    @property
    @abstractmethod
    def step(self) -> int:
        """Number of steps made, those before an interrupt included."""

    @abstractmethod
    def compute(self) -> Sequence[float]:
        """Compute the losses of the next steps (usually one) and what `apply` needs; the state to be saved does not change."""

    @abstractmethod
    def apply(self) -> None:
        """Make the steps whose losses were computed."""

    @abstractmethod
    def snapshot(self) -> Snapshot | None:
        """The state to save, or None if the training could not be resumed from it."""

    @abstractmethod
    def on_divergence(self, losses: Sequence[float]) -> None:
        """Handle divergence: raise, or record that the training ends here; the steps are not applied.

        Args:
            losses: of which `diverges` was true.
        """

    def diverges(self, losses: Sequence[float]) -> bool:
        """Whether the training has diverged: a loss is not finite."""
        return not all(math.isfinite(loss) for loss in losses)

    def running(self, bar: Any) -> AbstractContextManager[object]:
        """A context around all steps.

        Args:
            bar: the progress bar, which may show more than `status`.
        """
        return nullcontext()

    def status(self) -> str:
        """Text beside the progress bar."""
        return ""

    def finish(self) -> None:  # noqa: B027 (most trainings end with their last step)
        """Called after the last step; an interrupt during this call still saves the state."""


def run_steps(training: TrainingSteps, file: ResumableFile) -> None:
    """Make all steps of a training that remain.

    The state is saved now and then, and where an exception ends the loop, Ctrl-C included: the exception then carries a note of
    where to resume. The state after the last step is left to the caller to save, with what it makes of it.

    Args:
        training: the steps, and the state that they begin with.
        file: keeps the state.
    """
    if training.step and training.leads and file.path is not None:
        tqdm.write(
            f"The training continues after step {training.step:,} of {training.steps:,}, from {file.path}.", file=sys.stderr
        )
    kept = file.saved_on_interrupt(
        lambda: training.snapshot() if training.leads else None,
        lambda: f"The training up to step {training.step:,} of {training.steps:,} is",
    )
    bar = tqdm(
        total=training.steps,
        initial=training.step,
        desc=training.title,
        unit="step",
        disable=None if training.leads else True,
        leave=not training.nested,
    )
    with kept, bar, training.running(bar):
        while training.step < training.steps:
            before = training.step
            losses = training.compute()
            if training.diverges(losses):
                training.on_divergence(losses)
                break
            training.apply()
            if text := training.status():
                bar.set_postfix_str(text, refresh=False)
            bar.update(training.step - before)
            if training.leads and file.due and (state := training.snapshot()) is not None:
                file.save(*state)
        training.finish()
