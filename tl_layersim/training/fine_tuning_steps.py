"""`FineTuning`: optimiser steps and evaluations of a whole model, on one process or several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..core.distributed import refuse_parts
from ..core.errors import LayersimError
from ..core.resumable_file import ResumableFile, Snapshot
from ..core.training_loop import Descent, Shuffle, run_steps, save_state
from ..data.labels import NO_LABEL
from ..sources.hooks import eval_mode
from .objectives.objective import Objective
from .residual_stream import training_mode
from .settings import AlignedTraining, curve_of
from .training_data import TrainingData

# Steps whose mean loss the progress bar shows.
RECENT = 25


class FineTuning(Descent):
    """Fine-tuning with AdamW: optimiser steps, evaluations and state.

    Args:
        objective: the training objective.
        rows: training rows and held-out rows.
        settings: settings of the training.
        batch_size: number of rows in a forward pass.

    Attributes:
        evaluations: sums of `Objective.evaluate` over the held-out data, `3 layer`, by step.
    """

    moments = ("step", "exp_avg", "exp_avg_sq")
    settings: AlignedTraining

    def __init__(
        self, objective: Objective, rows: tuple[TrainingData, TrainingData], settings: AlignedTraining, batch_size: int
    ) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs

        parameters = objective.trained_parameters()
        matrices = [p for p in parameters.values() if p.dim() > 1]
        rest = [p for p in parameters.values() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": float(settings.weight_decay)}, {"params": rest, "weight_decay": 0.0}]
        optimiser = torch.optim.AdamW([g for g in groups if g["params"]], lr=settings.lr)
        super().__init__(settings.objective, parameters, optimiser, settings)
        self.objective, self.batch_size = objective, batch_size
        self.training_data, self.eval_data = rows
        self.device = objective.stream.device
        refuse_parts(objective.module)
        self.accelerator = Accelerator(
            cpu=self.device.type == "cpu",
            device_placement=False,
            # At a standard step the heads of other layers get no gradient, nor do blocks above the highest drawn layer.
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        )
        self.leads = self.accelerator.is_main_process
        self.ranks, self.rank = self.accelerator.num_processes, self.accelerator.process_index
        self.wrapped = self.accelerator.prepare_model(objective) if self.ranks > 1 else objective
        self.evaluations: dict[int, Tensor] = {}
        self._shuffle = Shuffle(len(self.training_data), settings.seed)
        self._bar: Any = None

    def run(self, file: ResumableFile) -> None:
        """Train to the last step, from the saved state if the file has one.

        Raises:
            LayersimError: a loss is not finite, or the file belongs to another run.
        """
        file.resume(self._restore)
        run_steps(self, file)
        save_state(self, file)

    @contextmanager
    def running(self, bar: Any) -> Iterator[None]:
        self._bar = bar
        with super().running(bar), training_mode(self.objective.module):
            yield

    def loss_and_gradients(self) -> float:
        """Compute a step's mean loss over the targets on all processes, and its gradients."""
        every, accelerator = self.settings.eval_every, self.accelerator
        if self.step == 0 or (every is not None and self.step % every == 0):
            self._evaluate()
        batches = [self.training_data.take(rows).to(self.device) for rows in self._rows()]
        count = accelerator.reduce(torch.stack([batch.targets.ne(NO_LABEL).sum() for batch in batches]).sum().float(), "sum")
        total = torch.zeros((), dtype=torch.float64)
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            with (
                nullcontext() if last or self.wrapped is self.objective else accelerator.no_sync(self.wrapped),
                self._seeded(self.step * self.settings.accumulation + number),
                torch.enable_grad(),
            ):
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.mixed_precision == "bf16"):
                    loss = self.wrapped(batch, self.step)
                # DistributedDataParallel averages gradients over processes.
                (loss * (self.ranks / count)).backward()
            total += loss.detach().double().cpu()
        mean = accelerator.reduce(total.to(self.device, torch.float32 if self.device.type == "mps" else torch.float64), "sum")
        return float(mean / count)

    def finish(self) -> None:
        self._evaluate()

    def on_divergence(self, losses: Sequence[float]) -> None:
        self._refuse_not_finite(f"The loss is {losses[0]} at step {self.step + 1}.")

    def status(self) -> str:
        recent = self.curve[-RECENT:]
        sums = list(self.evaluations.values())[-1]
        by_layer = " ".join(f"{loss:.2f}" for loss in (sums[0] / sums[2]).tolist())
        return f"loss {sum(recent) / len(recent):.3f}, held out by layer {by_layer}"

    def snapshot(self) -> Snapshot | None:
        """Weights, AdamW's moments, curve and evaluations for the file; None in the middle of an optimiser step."""
        if not self.consistent:
            return None
        curve = {"curve": torch.tensor(self.curve, dtype=torch.float64)}
        looks = {f"look/{step}": sums for step, sums in self.evaluations.items()}
        return {"step": self.step}, self.tensors() | curve | looks

    def _restore(self, notes: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
        """Load the state that `snapshot` returned."""
        curve = curve_of(notes, tensors)
        self.load(tensors)
        looks = {int(key.split("/")[1]): value for key, value in tensors.items() if key.startswith("look/")}
        self.curve, self.evaluations = curve, dict(sorted(looks.items()))

    def _refuse_not_finite(self, what: str) -> None:
        self.consistent = False
        raise LayersimError(
            f"{what} The lr was {self.settings.rate(min(self.step, self.steps - 1)):.3g} and the weights "
            f"{self.objective.stream.source.model.dtype}: use a lower lr, a longer warmup, or float32 weights."
        )

    def _rows(self) -> Iterator[list[int]]:
        """Indices of this process's rows in each forward pass of the next step."""
        for part in range(self.settings.accumulation):
            start = ((self.step * self.settings.accumulation + part) * self.ranks + self.rank) * self.batch_size
            yield [self._shuffle.row(place) for place in range(start, start + self.batch_size)]

    @contextmanager
    def _seeded(self, number: int) -> Iterator[None]:
        """A context that seeds dropout by the seed and the forward pass's index, so that no random state is saved."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(self.settings.seed * 1_000_003 + number * self.ranks + self.rank)
            yield

    def _evaluate(self) -> None:
        """Evaluate every layer on the held-out rows, unless this step has been evaluated already."""
        if self.step in self.evaluations:
            return
        total = torch.zeros(3, self.objective.stream.n_layers, dtype=torch.float64)
        starts = range(self.rank * self.batch_size, len(self.eval_data), self.batch_size * self.ranks)
        with eval_mode(self.objective.module):
            for start in tqdm(starts, desc="held out", unit="batch", leave=False, disable=self._bar.disable or None):
                rows = range(start, min(start + self.batch_size, len(self.eval_data)))
                total += self.objective.evaluate(self.eval_data.take(rows).to(self.device))
        total = self.accelerator.reduce(total.to(self.device), "sum").cpu() if self.ranks > 1 else total
        mean = float(total[0].sum() / total[2].sum())
        if self.diverges([mean]):
            self._refuse_not_finite(f"The held-out loss is {mean} after {self.step} steps.")
        self.evaluations[self.step] = total
