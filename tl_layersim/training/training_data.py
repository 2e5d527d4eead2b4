"""Training data and held-out data: rows with targets, taken by number."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..data.batches import Batch, Batches, fingerprint, found_in, new_digest
from ..data.data import Data
from ..data.inputs import EMBEDDINGS
from ..data.labels import NO_LABEL
from ..data.rows import Row
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

    def part(self, start: int, stop: int) -> TrainingData:
        """The rows from `start` up to `stop`."""
        part = copy.copy(self)
        part.rows = self.rows[start:stop]
        return part

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
        kept = max(1, len(self) // HELD_OUT)
        return self.part(0, len(self) - kept), self.part(len(self) - kept, len(self))


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


def found_in_data(*parts: TrainingData) -> dict[str, int]:
    """Counts of automatic corrections in reading, see `Batches.row_counts`; two parts of one data set count once."""
    return found_in(*{id(part.batches): part.batches for part in parts}.values())


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
