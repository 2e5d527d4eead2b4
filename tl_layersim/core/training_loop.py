"""The training loop: steps, progress bar, saves, interrupts and divergence.

Fine-tunes, stitches and adapters of frozen models are trained by this loop. `TrainingSteps` are steps of any kind, and
`Descent` the steps of a torch optimiser.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from .errors import LayersimError
from .resumable_file import ResumableFile, Snapshot


def refuse_long_warmup(warmup: int | None, steps: int) -> None:
    """Raise an error if a training has fewer steps than its warmup.

    It would end at a lower learning rate than the one asked for.

    Raises:
        LayersimError: `warmup` exceeds `steps`.
    """
    if warmup is not None and warmup > steps:
        raise LayersimError(f"`warmup` is {warmup}; it must be at most `steps`, {steps}.")


class Shuffle:
    """Indices of rows in random order, shuffled anew in each epoch.

    The order depends only on the seed and the epoch, so a resumed training needs only its step.

    Args:
        count: number of rows.
        seed: seed of the random order.

    Examples:
        >>> shuffle = Shuffle(3, seed=0)
        >>> [shuffle.row(place) for place in range(6)]
        [2, 0, 1, 1, 2, 0]
    """

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self.seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def row(self, place: int) -> int:
        """Index of the row that is drawn at position `place`, counted over all epochs. Both start at 0."""
        epoch = place // self.count
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch = epoch
            self._order = torch.randperm(self.count, generator=generator).tolist()
        return self._order[place % self.count]


class TrainingSteps(ABC):
    """Base class of trainings that the training loop can run. It declares their steps and their state.

    Attributes:
        title: title of the progress bar.
        steps: number of steps of the whole training.
        leads: whether this process shows the bar and writes the file. It is True in one process.
        nested: whether the bar is below another one and disappears at the end.
    """

    title: str
    steps: int
    leads: bool = True
    nested: bool = False

    @property
    @abstractmethod
    def step(self) -> int:
        """Number of completed steps, including steps before an interrupt."""

    @abstractmethod
    def compute(self) -> Sequence[float]:
        """Compute losses and gradients of the next step, or of several steps. The state that is saved does not change."""

    @abstractmethod
    def apply(self) -> None:
        """Apply the steps that `compute` prepared."""

    @abstractmethod
    def snapshot(self) -> Snapshot | None:
        """The state to save; None if the training cannot be resumed from it."""

    @abstractmethod
    def on_divergence(self, losses: Sequence[float]) -> None:
        """Handle a divergence: raise an error, or return to end the training. The diverged steps are not applied."""

    def diverges(self, losses: Sequence[float]) -> bool:
        """Whether the training has diverged: a loss is not finite."""
        return not all(math.isfinite(loss) for loss in losses)

    def running(self, bar: Any) -> AbstractContextManager[object]:
        """Context manager that surrounds all steps of the training, for setup and cleanup.

        Args:
            bar: the progress bar, which may show more than `status`.
        """
        return nullcontext()

    def status(self) -> str:
        """Text beside the progress bar."""
        return ""

    def finish(self) -> None:  # noqa: B027 (most trainings end with their last step)
        """Finish the training after the last step. An interrupt during this call still saves the state."""


class Descent(TrainingSteps):
    """Training steps of a torch optimiser. Gradients are clipped, the learning rate has a schedule, and the state can be saved.

    Args:
        title: title of the progress bar.
        parameters: the trained parameters, by name.
        optimiser: optimiser of these parameters.
        settings: number of steps `steps`, largest norm of a gradient `clip`, and learning rate at a step, `rate(step)`.

    Attributes:
        moments: names of the optimiser's state tensors of a parameter.
        curve: loss at each step.
        consistent: whether parameters, moments and curve belong to the same step.
    """

    moments: ClassVar[tuple[str, ...]]

    def __init__(
        self, title: str, parameters: Mapping[str, nn.Parameter], optimiser: torch.optim.Optimizer, settings: Any
    ) -> None:
        self.title = title
        self.steps = settings.steps
        self.settings = settings
        self.parameters = parameters
        self.optimiser = optimiser
        self.curve: list[float] = []
        self.consistent = True
        self._loss = math.nan

    @abstractmethod
    def loss_and_gradients(self) -> float:
        """Compute the loss of the next step and accumulate its gradients."""

    @property
    def step(self) -> int:
        return len(self.curve)

    @contextmanager
    def running(self, bar: Any) -> Iterator[None]:
        """Context manager that clears gradients at its start and end."""
        self.optimiser.zero_grad()
        try:
            yield
        finally:
            self.optimiser.zero_grad()

    def compute(self) -> Sequence[float]:
        self._loss = self.loss_and_gradients()
        return [self._loss]

    def apply(self) -> None:
        nn.utils.clip_grad_norm_(list(self.parameters.values()), self.settings.clip)
        self.consistent = False
        for group in self.optimiser.param_groups:
            group["lr"] = self.settings.rate(self.step)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.curve.append(self._loss)
        self.consistent = True

    def tensors(self) -> dict[str, Tensor]:
        """The parameters with keys "weight/name", and the optimiser's state with keys such as "exp_avg/name"."""
        tensors = {f"weight/{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            for key, value in self.optimiser.state.get(parameter, {}).items():
                tensors[f"{key}/{name}"] = value
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the state that `tensors` returned."""
        for name, parameter in self.parameters.items():
            with torch.no_grad():
                parameter.copy_(tensors[f"weight/{name}"])
            if f"{self.moments[0]}/{name}" not in tensors:
                continue
            state = {}
            for kind in self.moments:
                # Optimisers of torch count steps on the CPU.
                device = "cpu" if kind == "step" else parameter.device
                state[kind] = tensors[f"{kind}/{name}"].clone().to(device)
            self.optimiser.state[parameter] = state


def run_steps(training: TrainingSteps, file: ResumableFile) -> None:
    """Run the remaining steps of a training.

    The state is saved at intervals, and also if an exception (Ctrl-C included) ends the loop; the exception then has a note on
    how to resume. After the last step, the caller saves the state.

    Args:
        training: the steps and their initial state.
        file: the file of the state.
    """
    if training.step and training.leads and file.path is not None:
        tqdm.write(
            f"The training continues after step {training.step:,} of {training.steps:,}, from {file.path}.", file=sys.stderr
        )
    save_on_interrupt = file.saved_on_interrupt(
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
    with save_on_interrupt, bar, training.running(bar):
        while training.step < training.steps:
            first = training.step
            losses = training.compute()
            if training.diverges(losses):
                training.on_divergence(losses)
                break
            training.apply()
            status = training.status()
            if status:
                bar.set_postfix_str(status, refresh=False)
            bar.update(training.step - first)
            if file.due:
                save_state(training, file)
        training.finish()


def save_state(training: TrainingSteps, file: ResumableFile) -> None:
    """Save the state of the training, if this process writes the file and the training can be resumed.

    Args:
        training: the steps, and their state.
        file: the file of the state.
    """
    if not training.leads:
        return
    state = training.snapshot()
    if state is not None:
        file.save(*state)
