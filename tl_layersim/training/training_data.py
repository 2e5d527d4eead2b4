"""Training data and held-out data: rows with targets, taken by number."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..core.fields import Provenance
from ..core.sums import Tally
from ..data.batches import Batch, Batches, fingerprint, found_in, new_digest
from ..data.data import Data
from ..data.inputs import EMBEDDINGS
from ..data.labels import NO_LABEL, warn_of_unused
from ..data.rows import Row
from ..engine.reports import record
from ..lens.targets import answers, check_batch_labels
from ..sources.inputs import forward_arguments
from ..sources.model import Model
from .losses import refuse_other_labels
from .residual_stream import TrainingBatch

HELD_OUT = 10


class TrainingData:
    """Rows with at least one target each.

    Args:
        batches: the data.
        labels: see `models.targets`.
        model: description of the model.
        module: the model.

    Attributes:
        rows: the rows.
        label_range: the lowest and the highest target of the data.
    """

    def __init__(self, batches: Batches, labels: str | Tensor, model: Model, module: torch.nn.Module) -> None:
        self.batches, self.labels, self.model, self.module = batches, labels, model, module
        self.rows, self.label_range = self._read()

    def _read(self) -> tuple[list[Row], tuple[int, int]]:
        found, lowest, highest = [], [], []
        for row in self.batches.rows():
            batch = self.batches.batch([row], 0)
            check_batch_labels(self.labels, batch, self.model)
            targets = answers(batch, self.labels, self.model)
            targets = targets[targets != NO_LABEL]
            if len(targets):
                found.append(row)
                lowest.append(int(targets.min()))
                highest.append(int(targets.max()))
        if not found:
            raise LayersimError(
                f"`data` has no position with a target: no {'next token' if self.labels == 'next_token' else 'label'} in any "
                "row."
            )
        return found, (min(lowest), max(highest))

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Some rows as a batch without targets."""
        return self.batches.batch([self.rows[number] for number in numbers], 0)

    def take(self, numbers: Sequence[int]) -> TrainingBatch:
        """Some rows as one batch."""
        batch = self.batch(numbers)
        args, options = forward_arguments(self.module, batch, self.model)
        name = "" if args else next(name for name in (self.model.main_input, EMBEDDINGS) if name in options)
        main = args[0] if args else options.pop(name)
        targets = answers(batch, self.labels, self.model)
        return TrainingBatch(main, options, targets, batch.attention if batch.padded else None, name)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the rows and their targets."""
        digest = new_digest()
        for number in range(len(self.rows)):
            batch = self.batch([number])
            fingerprint(digest, batch)
            digest.update(answers(batch, self.labels, self.model).numpy().tobytes())
        found: str = digest.hexdigest()
        return found

    def split(self) -> tuple[TrainingData, TrainingData]:
        """All rows but the last tenth for training, and the last tenth, which is held out.

        Raises:
            LayersimError: the data has a single row.
        """
        if len(self) < 2:
            raise LayersimError(
                f"`data` has {len(self)} row with a target; one must be held out for evaluation, so it needs two, or "
                "eval_data=."
            )
        first, last, kept = copy.copy(self), copy.copy(self), max(1, len(self) // HELD_OUT)
        first.rows, last.rows = self.rows[:-kept], self.rows[-kept:]
        return first, last


def refuse_labels(training_rows: TrainingData, eval_rows: TrainingData, classes: int) -> None:
    """Refuse data with targets that are no class of the head.

    Args:
        training_rows: to train on.
        eval_rows: to evaluate on.
        classes: number of logits of the head.

    Raises:
        LayersimError: the data has such targets.
    """
    refuse_other_labels(torch.tensor(training_rows.label_range), classes)
    # Rows held out of `data` have its range.
    refuse_other_labels(torch.tensor(eval_rows.label_range), classes, " of `eval_data`")


def open_training_data(
    data: Data,
    eval_data: Any,
    labels: Any,
    model: Model,
    module: torch.nn.Module,
    usual: str | Tensor,
    count_positions: Callable[[Batch], int] | None,
) -> tuple[TrainingData, TrainingData]:
    """The rows to train on, and the rows to evaluate on.

    Args:
        data: to train on.
        eval_data: to evaluate on, None for the last tenth of the rows.
        labels: as the user passed them.
        model: description of the model, with its tokenizer.
        module: the model.
        usual: the same labels, as `usual_labels` gives them.
        count_positions: see `CanCountPositions`; None to refuse rows without token ids.
    """
    if data.selection.pooled:
        raise LayersimError("`positions` is 'mean', but each target belongs to one position.")
    if eval_data is not None and not (labels is None or isinstance(labels, str)):
        raise LayersimError(
            "`labels` cannot be a table if `eval_data` is given. Use labels='data', and a column `labels` in both."
        )
    batches = Batches(data, model, isinstance(usual, str) and usual == "data", count_positions)
    rows = TrainingData(batches, usual, model, module)
    if eval_data is None:
        return rows.split()
    return rows, TrainingData(replace(batches, data=data.like(eval_data)), usual, model, module)


def record_of_training(
    model: Model, rows: tuple[TrainingData, TrainingData], options: dict[str, Any], seconds: float, seed: int
) -> Provenance:
    """The record of a training; `tokens`, `sequences` and `batches` are those of the evaluation.

    Args:
        model: description of the model before the training.
        rows: to train on, and to evaluate on.
        options: settings of the training.
        seconds: of the whole call.
        seed: of the training.
    """
    trained_on, held_out = rows
    data = trained_on.batches.data
    targets = sum(int((held_out.take([row]).targets != NO_LABEL).sum()) for row in range(len(held_out)))
    tally = Tally(-(-len(held_out) // data.batch_size), len(held_out), targets, held_out.digest, seconds)
    # Two parts of one data set count once.
    found = found_in(*{id(part.batches): part.batches for part in rows}.values())
    own = {"trained_on": trained_on.digest, "train_rows": len(trained_on)}
    run = record([model], tally, data.record() | found | options | own, seed)
    warn_of_unused(trained_on.labels, replace(run, sequences=len(trained_on) + len(held_out)))
    return run
