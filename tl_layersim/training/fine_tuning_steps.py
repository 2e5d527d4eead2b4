"""Fine-tuning of a whole model: optimiser steps of several forward passes, on one process or many, and evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..core.distributed import refuse_parts
from ..core.errors import LayersimError
from ..core.resumable_file import ResumableFile, Snapshot
from ..core.training_loop import Shuffle, TrainingSteps, run_steps
from ..sources.hooks import eval_mode
from .objectives.objective import Objective
from .residual_stream import TrainingBatch, training_mode
from .settings import AlignedTraining, State, state_of, state_snapshot
from .training_data import TrainingData

BETAS = (0.9, 0.999)
# Steps whose mean loss the progress bar shows.
RECENT = 25


class FineTuning(TrainingSteps):
    """The steps of a fine-tune with AdamW, and its state.

    Args:
        objective: the loss that is minimised.
        training_data: rows to train on.
        eval_data: rows to evaluate on.
        settings: of the training.
        batch_size: rows of a forward pass.
    """

    def __init__(
        self,
        objective: Objective,
        training_data: TrainingData,
        eval_data: TrainingData,
        settings: AlignedTraining,
        batch_size: int,
    ) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs

        self.objective, self.training_data, self.eval_data = objective, training_data, eval_data
        self.settings, self.batch_size = settings, batch_size
        self.device = objective.stream.device
        refuse_parts(objective.module)
        self.accelerator = Accelerator(
            cpu=self.device.type == "cpu",
            device_placement=False,
            # At a standard step the heads of other layers get no gradient, nor do blocks above the highest drawn layer.
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        )
        self.title, self.steps, self.leads = settings.objective, settings.steps, self.accelerator.is_main_process
        self.parameters = objective.trained_parameters()
        matrices = [p for p in self.parameters.values() if p.dim() > 1]
        rest = [p for p in self.parameters.values() if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": float(settings.weight_decay)},
            {"params": rest, "weight_decay": 0.0},
        ]
        self.optimiser = torch.optim.AdamW([g for g in groups if g["params"]], lr=settings.lr, betas=BETAS)
        self.wrapped = self.accelerator.prepare_model(objective) if self.accelerator.num_processes > 1 else objective
        self.state = State()
        self._shuffle = Shuffle(len(training_data), settings.seed)
        # Whether weights and state belong to one step, and no loss was NaN or infinite.
        self._consistent = True
        self._loss = float("nan")
        self._bar: Any = None

    def run(self, file: ResumableFile) -> State:
        """Train to the last step, from the state in the file if it holds one.

        Raises:
            LayersimError: a loss is not finite, or the file belongs to another run.
        """
        self.state = file.resume(lambda notes, tensors: self._restored(*state_of(notes, tensors))) or self.state
        run_steps(self, file)
        if self.leads and (state := self.snapshot()) is not None:
            file.save(*state)
        return self.state

    @property
    def step(self) -> int:
        return self.state.step

    def running(self, bar: Any) -> AbstractContextManager[object]:
        self._bar = bar
        return self._training()

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Training mode, without gradients from before."""
        self.optimiser.zero_grad(set_to_none=True)
        try:
            with training_mode(self.objective.module):
                yield
        finally:
            self.optimiser.zero_grad(set_to_none=True)

    def compute(self) -> Sequence[float]:
        every = self.settings.eval_every
        if self.step == 0 or (every is not None and self.step % every == 0):
            self._evaluate()
        self._loss = self._loss_and_gradients(self.step)
        return [self._loss]

    def apply(self) -> None:
        self.accelerator.clip_grad_norm_(list(self.parameters.values()), self.settings.clip)
        self._consistent = False
        for group in self.optimiser.param_groups:
            group["lr"] = self.settings.rate(self.step)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.state.step += 1
        self.state.curve.append(self._loss)
        self._consistent = True

    def finish(self) -> None:
        self._evaluate()

    def on_divergence(self, losses: Sequence[float]) -> None:
        self._refuse_not_finite(f"The loss is {losses[0]} at step {self.step + 1}.")

    def status(self) -> str:
        recent = self.state.curve[-RECENT:]
        sums = list(self.state.evaluations.values())[-1]
        by_layer = " ".join(f"{loss:.2f}" for loss in (sums[0] / sums[2]).tolist())
        return f"loss {sum(recent) / len(recent):.3f}, held out by layer {by_layer}"

    def snapshot(self) -> Snapshot | None:
        """Trained weights, the optimiser's moments and the state; None in the middle of an optimiser step."""
        if not self._consistent:
            return None
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            tensors[f"weight/{name}"] = parameter.detach()
            for key, value in self.optimiser.state.get(parameter, {}).items():
                tensors[f"{key}/{name}"] = value
        return state_snapshot(self.state, tensors)

    def _restored(self, state: State, tensors: dict[str, Tensor]) -> State:
        """Load the weights and the optimiser's moments of a file, and return its state."""
        known = ("step", "exp_avg", "exp_avg_sq")
        for name, parameter in self.parameters.items():
            shapes = {
                "weight": parameter.shape,
                "step": torch.Size(),
                "exp_avg": parameter.shape,
                "exp_avg_sq": parameter.shape,
            }
            own = {key: tensors[f"{key}/{name}"] for key in shapes if key == "weight" or f"step/{name}" in tensors}
            if any(value.shape != shapes[key] for key, value in own.items()):
                raise ValueError(f"{name} has another shape")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[f"weight/{name}"])
                if f"step/{name}" in tensors:
                    self.optimiser.state[parameter] = {
                        key: tensors[f"{key}/{name}"].clone().to("cpu" if key == "step" else parameter.device) for key in known
                    }
        return state

    def _loss_and_gradients(self, step: int) -> float:
        """Mean loss of a step over the targets on all processes; the gradients are stored in the parameters."""
        accelerator = self.accelerator
        batches = [self.training_data.take(rows).to(self.device) for rows in self._rows(step)]
        count = torch.tensor(float(sum(_target_count(batch) for batch in batches)), device=self.device)
        count = accelerator.reduce(count, "sum")
        total = torch.zeros((), dtype=torch.float64)
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            with (
                nullcontext() if last or self.wrapped is self.objective else accelerator.no_sync(self.wrapped),
                self._seeded(step * self.settings.accumulation + number),
                torch.enable_grad(),
            ):
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.mixed_precision == "bf16"):
                    loss = self.wrapped(batch, step)
                # DistributedDataParallel averages gradients over processes.
                (loss * (accelerator.num_processes / count)).backward()
            total += loss.detach().double().cpu()
        mean = accelerator.reduce(total.to(self.device, torch.float32 if self.device.type == "mps" else torch.float64), "sum")
        return float(mean / count)

    def _refuse_not_finite(self, what: str) -> None:
        self._consistent = False
        raise LayersimError(
            f"{what} The lr was {self.settings.rate(min(self.step, self.steps - 1)):.3g} and the weights "
            f"{self.objective.stream.source.model.dtype}: take a lower lr, a longer warmup, or float32 weights."
        )

    def _rows(self, step: int) -> Iterator[list[int]]:
        """The numbers of the rows that this process takes in each forward pass of one optimiser step."""
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        for part in range(self.settings.accumulation):
            start = ((step * self.settings.accumulation + part) * ranks + rank) * self.batch_size
            yield [self._shuffle.row(place) for place in range(start, start + self.batch_size)]

    @contextmanager
    def _seeded(self, number: int) -> Iterator[None]:
        """A context that seeds dropout by the seed and the number of the forward pass, so that no random state is saved."""
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(self.settings.seed * 1_000_003 + number * ranks + rank)
            yield

    def _evaluate(self) -> None:
        """Evaluate every layer on the held-out rows, unless this step has been evaluated already."""
        if self.step in self.state.evaluations:
            return
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        total = torch.zeros(3, self.objective.stream.n_layers, dtype=torch.float64)
        starts = range(rank * self.batch_size, len(self.eval_data), self.batch_size * ranks)
        with eval_mode(self.objective.module):
            for start in tqdm(starts, desc="held out", unit="batch", leave=False, disable=self._bar.disable or None):
                rows = range(start, min(start + self.batch_size, len(self.eval_data)))
                total += self.objective.evaluate(self.eval_data.take(rows).to(self.device))
        total = self.accelerator.reduce(total.to(self.device), "sum").cpu() if ranks > 1 else total
        mean = float(total[0].sum() / total[2].sum())
        if self.diverges([mean]):
            self._refuse_not_finite(f"The held-out loss is {mean} after {self.step} steps.")
        self.state.evaluations[self.step] = total


def _target_count(batch: TrainingBatch) -> int:
    return int((batch.targets >= 0).sum())
