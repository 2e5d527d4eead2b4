"""The training loop: optimiser steps of several forward passes, on one process or many, with looks at held-out data."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..core.distributed import refuse_parts
from ..core.errors import LayersimError
from ..core.resumable import ResumableFile, Snapshot
from ..models.hooks import eval_mode
from .objectives.base import Objective
from .residual_stream import TrainingBatch, learning
from .settings import AlignedTraining
from .state import State, state_of, state_snapshot
from .training_data import TrainingData

BETAS = (0.9, 0.999)
RECENT = 25


class Loop:
    """One training.

    Args:
        objective: what is minimised.
        feed: what is trained on.
        judged: what the looks are at.
        training: how.
        batch_size: rows of a forward pass.
        saved: the file of the run.
    """

    def __init__(
        self,
        objective: Objective,
        feed: TrainingData,
        judged: TrainingData,
        training: AlignedTraining,
        batch_size: int,
        saved: ResumableFile,
    ) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs

        self.objective, self.feed, self.judged = objective, feed, judged
        self.training, self.batch_size, self.saved = training, batch_size, saved
        self.device = objective.stream.device
        refuse_parts(objective.module)
        self.accelerator = Accelerator(
            cpu=self.device.type == "cpu",
            device_placement=False,
            # At a standard step the heads of other layers learn nothing, above the highest drawn layer no block does.
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        )
        self.names = objective.trained_parameters()
        if not self.names:
            raise LayersimError(
                "Nothing in this model learns.",
                given="every parameter has requires_grad=False",
                expected="parameters that learn",
                do="model.requires_grad_(True)",
            )
        matrices = [p for p in self.names.values() if p.dim() > 1]
        rest = [p for p in self.names.values() if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": float(training.weight_decay)},
            {"params": rest, "weight_decay": 0.0},
        ]
        self.optimiser = torch.optim.AdamW([g for g in groups if g["params"]], lr=training.lr, betas=BETAS)
        # Whether weights are still worth keeping.
        self.sound = True
        self.wrapped = self.accelerator.prepare_model(objective) if self.accelerator.num_processes > 1 else objective

    def run(self) -> State:
        """Train to the last step, from where the file says.

        Raises:
            LayersimError: the loss is not finite, or the file is another run's.
        """
        state = self.saved.resume(lambda notes, tensors: self._restored(*state_of(notes, tensors))) or State()
        if state.step:
            self._say(f"Goes on after step {state.step} of {self.training.steps}.")
        whole = True
        bar = tqdm(
            total=self.training.steps,
            initial=state.step,
            desc=self.training.objective,
            unit="step",
            disable=None if self.accelerator.is_main_process else True,
        )
        # What somebody else left there is no part of the first step.
        self.optimiser.zero_grad(set_to_none=True)
        kept = self.saved.saved_on_interrupt(
            # One in the middle of the optimiser's step leaves the older file.
            lambda: self._snapshot(state) if whole and self.sound and self.accelerator.is_main_process else None,
            lambda: f"What was learnt, {state.step} of {self.training.steps} steps,",
        )
        with bar, learning(self.objective.module):
            try:
                with kept:
                    while state.step < self.training.steps:
                        self._look(state, bar)
                        loss = self._accumulate(state.step)
                        whole = False
                        for group in self.optimiser.param_groups:
                            group["lr"] = self.training.rate(state.step)
                        self.optimiser.step()
                        self.optimiser.zero_grad()
                        state.step += 1
                        state.curve.append(loss)
                        whole = True
                        recent = state.curve[-RECENT:]
                        bar.set_postfix_str(f"loss {sum(recent) / len(recent):.3f}{self._held_out(state)}", refresh=False)
                        bar.update()
                        if self.saved.due and self.accelerator.is_main_process:
                            self.saved.save(*self._snapshot(state))
                    self._look(state, bar, last=True)
            finally:
                self.optimiser.zero_grad(set_to_none=True)
        if self.accelerator.is_main_process:
            self.saved.save(*self._snapshot(state))
        return state

    def _say(self, text: str) -> None:
        if self.accelerator.is_main_process and self.saved.path is not None:
            tqdm.write(text, file=sys.stderr)

    def _accumulate(self, step: int) -> float:
        """Gradients of one step; its loss, the mean over its answers on all processes."""
        training, accelerator = self.training, self.accelerator
        pieces = [self.feed.take(numbers).to(self.device) for numbers in self._numbers(step)]
        count = torch.tensor(float(sum(self._answers(piece) for piece in pieces)), device=self.device)
        count = accelerator.reduce(count, "sum")
        total = torch.zeros((), dtype=torch.float64)
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            with (
                nullcontext() if last or self.wrapped is self.objective else accelerator.no_sync(self.wrapped),
                self._seeded(step * training.accumulation + number),
                torch.enable_grad(),
            ):
                with torch.autocast(self.device.type, torch.bfloat16, enabled=training.mixed_precision == "bf16"):
                    loss = self.wrapped(piece, step)
                # Processes are averaged over.
                (loss * (accelerator.num_processes / count)).backward()
            total += loss.detach().double().cpu()
        mean = accelerator.reduce(total.to(self.device, torch.float32 if self.device.type == "mps" else torch.float64), "sum")
        value = float(mean / count)
        self._refuse_not_finite(value, f"The loss is {value} at step {step + 1}.", step)
        accelerator.clip_grad_norm_(list(self.names.values()), training.clip)
        return value

    def _refuse_not_finite(self, value: float, what: str, step: int) -> None:
        if math.isfinite(value):
            return
        self.sound = False
        raise LayersimError(
            what,
            given=f"lr={self.training.rate(min(step, self.training.steps - 1)):.3g}, "
            f"{self.objective.stream.source.model.dtype} weights",
            expected="a finite loss",
            do="a lower lr or a longer warmup, or weights in float32 with mixed_precision='bf16'",
        )

    def _numbers(self, step: int) -> Iterator[list[int]]:
        """The rows of each forward pass of a step on this process: all of them in a new order each time round."""
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        for part in range(self.training.accumulation):
            start = ((step * self.training.accumulation + part) * ranks + rank) * self.batch_size
            yield [self._row(place) for place in range(start, start + self.batch_size)]

    def _row(self, place: int) -> int:
        turn = place // len(self.feed)
        if getattr(self, "_turn", None) != turn:
            generator = torch.Generator().manual_seed(self.training.seed * 1_000_003 + turn)
            self._turn, self._order = turn, torch.randperm(len(self.feed), generator=generator).tolist()
        return int(self._order[place % len(self.feed)])

    def _answers(self, piece: TrainingBatch) -> int:
        return int((piece.targets >= 0).sum())

    def _seeded(self, number: int) -> Any:
        """Dropout that depends on the seed and the number of the forward pass alone, so that nothing of it has to be saved."""
        return _Seeded(
            self.device,
            self.training.seed * 1_000_003 + number * self.accelerator.num_processes + self.accelerator.process_index,
        )

    def _look(self, state: State, bar: Any, last: bool = False) -> None:
        """Judge the held-out rows, where it is time to."""
        every = self.training.eval_every
        wanted = last or state.step == 0 or (every is not None and state.step % every == 0)
        if not wanted or state.step in state.evaluations:
            return
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        total = torch.zeros(3, self.objective.stream.n_layers, dtype=torch.float64)
        starts = range(rank * self.batch_size, len(self.judged), self.batch_size * ranks)
        with eval_mode(self.objective.module):
            for start in tqdm(starts, desc="held out", unit="batch", leave=False, disable=bar.disable or None):
                numbers = range(start, min(start + self.batch_size, len(self.judged)))
                total += self.objective.evaluate(self.judged.take(numbers).to(self.device))
        total = self.accelerator.reduce(total.to(self.device), "sum").cpu() if ranks > 1 else total
        whole = float(total[0].sum() / total[2].sum())
        self._refuse_not_finite(whole, f"The held-out loss is {whole} after {state.step} steps.", state.step)
        state.evaluations[state.step] = total

    def _held_out(self, state: State) -> str:
        look = list(state.evaluations.values())[-1]
        return ", held out by layer " + " ".join(f"{loss:.2f}" for loss in (look[0] / look[2]).tolist())

    def _snapshot(self, state: State) -> Snapshot:
        """The state, the trained weights and the optimiser's moments."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.names.items():
            found[f"weight/{name}"] = parameter.detach()
            for key, value in self.optimiser.state.get(parameter, {}).items():
                found[f"{key}/{name}"] = value
        return state_snapshot(state, found)

    def _restored(self, state: State, tensors: dict[str, Tensor]) -> State:
        """Where a file stands, once its weights are in the model."""
        known = ("step", "exp_avg", "exp_avg_sq")
        for name, parameter in self.names.items():
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
            for name, parameter in self.names.items():
                parameter.copy_(tensors[f"weight/{name}"])
                if f"step/{name}" in tensors:
                    self.optimiser.state[parameter] = {
                        key: tensors[f"{key}/{name}"].clone().to("cpu" if key == "step" else parameter.device) for key in known
                    }
        return state


class _Seeded:
    """torch's generators seeded for a while; they are then as they were."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.fork = torch.random.fork_rng([device] if device.type == "cuda" else [])
        self.seed = seed

    def __enter__(self) -> None:
        self.fork.__enter__()
        torch.manual_seed(self.seed)

    def __exit__(self, *error: Any) -> None:
        self.fork.__exit__(*error)
