"""`TrainingData`: rows with targets, for training or evaluation."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.distributed import rank_and_size
from ..core.errors import LayersimError, warn
from ..core.result_declarations import Provenance
from ..core.resumable_file import ResumableFile, refuse_other_run
from ..core.sums import Tally
from ..core.wording import amount, with_article
from ..data.batches import Batch, Batches, fingerprint, found_in, new_digest
from ..data.data import Data
from ..data.input_names import EMBEDDINGS
from ..data.labels import NO_LABEL, warn_of_unused
from ..data.row import Row
from ..data.texts import split_rows
from ..engine.report_assembly import record
from ..engine.run_identity import identity_of, refuse_other_ranks
from ..lens.targets import answers, check_batch_labels, usual_labels
from ..sources.forward_arguments import forward_arguments
from ..sources.model_description import ModelDescription
from .residual_stream import TrainingBatch

# One in so many rows is held out if there is no `eval_data`.
HELD_OUT = 10


class TrainingData:
    """Rows with a target, read from a data set.

    Args:
        batches: the data.
        labels: see `lens.targets`.
        model: description of the model.
        module: the model.

    Attributes:
        rows: the rows.
        label_range: lowest and highest target in the data.
    """

    def __init__(self, batches: Batches, labels: str | Tensor, model: ModelDescription, module: torch.nn.Module) -> None:
        self.batches = batches
        self.labels = labels
        self.model = model
        self.module = module
        self.rows, self.label_range = self._rows_and_label_range()

    def _rows_and_label_range(self) -> tuple[list[Row], tuple[int, int]]:
        rows = []
        lowest = []
        highest = []
        for row in self.batches.rows():
            batch = self.batches.batch([row], 0)
            check_batch_labels(self.labels, batch, self.model)
            targets = answers(batch, self.labels, self.model)
            targets = targets[targets != NO_LABEL]
            if len(targets):
                rows.append(row)
                lowest.append(int(targets.min()))
                highest.append(int(targets.max()))
        if not rows:
            target = "next token" if self.labels == "next_token" else "label"
            raise LayersimError(f"`{self.batches.argument}` has no position with a {target}.")
        return rows, (min(lowest), max(highest))

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, numbers: Sequence[int]) -> Batch:
        return self.batches.batch([self.rows[number] for number in numbers], 0)

    def take(self, numbers: Sequence[int]) -> TrainingBatch:
        batch = self.batch(numbers)
        if batch.images:
            raise LayersimError(
                f"`{self.batches.argument}` has `{next(iter(batch.images))}` with one entry for each image, and training "
                "takes inputs with one entry for each row."
            )
        args, options = forward_arguments(self.module, batch, self.model)
        if args:
            name = ""
            main = args[0]
        else:
            name = next(name for name in (self.model.main_input, EMBEDDINGS) if name in options)
            main = options.pop(name)
        targets = answers(batch, self.labels, self.model)
        attended = batch.attention if batch.padded else None
        return TrainingBatch(main, options, targets, attended, name)

    @cached_property
    def digest(self) -> str:
        digest = new_digest()
        for number in range(len(self.rows)):
            batch = self.batch([number])
            fingerprint(digest, batch)
            digest.update(answers(batch, self.labels, self.model).numpy().tobytes())
        hexdigest: str = digest.hexdigest()
        return hexdigest


def open_training_data(
    data: Data,
    eval_data: Any,
    labels: Any,
    model: ModelDescription,
    module: torch.nn.Module,
    count_positions: Callable[[Batch], int] | None,
) -> tuple[TrainingData, TrainingData]:
    """Read the training rows and the held-out rows.

    Args:
        data: the training data.
        eval_data: the held-out data; None for about the last tenth of the rows. No text is in both parts.
        labels: the argument `labels` of the caller.
        model: description of the model, with its tokenizer.
        module: the model.
        count_positions: see `CanCountPositions`. If None, rows without token ids raise an error.

    Raises:
        LayersimError: the data has no targets, or only one row with a target to train on and to hold out.
    """
    if data.selection.pooled:
        raise LayersimError("`positions` is 'mean'; training needs a rule that keeps single positions, such as 'all'.")
    if eval_data is not None and not (labels is None or isinstance(labels, str)):
        raise LayersimError(
            f"`labels` is {with_article(type(labels).__name__)}; with `eval_data`, it must be 'next_token' or 'data'. 'data' "
            "reads the column `labels` of each data set."
        )
    labels = usual_labels(labels, [(model, module)], data.source)
    batches = Batches(data, model, isinstance(labels, str) and labels == "data", count_positions)
    rows = TrainingData(batches, labels, model, module)
    if eval_data is not None:
        eval_batches = replace(batches, data=data.like(eval_data), argument="eval_data")
        return rows, TrainingData(eval_batches, labels, model, module)
    if len(rows) < 2:
        raise LayersimError(f"`data` has {len(rows)} row with a target; it must have two or more. Or pass eval_data=.")
    held_out_count = max(1, len(rows) // HELD_OUT)
    texts = [row.text for row in rows.rows if row.text is not None]
    stop_of_training, start_of_held_out = split_rows(texts, held_out_count)
    if not stop_of_training:
        warn(
            "The held-out rows are of the same text as the training rows, so held-out losses say nothing about new text. Pass "
            "several texts, or eval_data= with other texts."
        )
        stop_of_training = start_of_held_out = len(rows) - held_out_count
    training_rows = copy.copy(rows)
    training_rows.rows = rows.rows[:stop_of_training]
    held_out_rows = copy.copy(rows)
    held_out_rows.rows = rows.rows[start_of_held_out:]
    return training_rows, held_out_rows


def open_training_file(
    path: str | os.PathLike[str] | None,
    model: ModelDescription,
    rows: tuple[TrainingData, TrainingData],
    settings: Mapping[str, Any],
) -> ResumableFile:
    """Open the file that stores the state of a training.

    Args:
        path: path of the file; None to store nothing.
        model: description of the model before the training.
        rows: training rows and held-out rows.
        settings: settings of the training, which a resumed run must have too.
    """
    argument = None if path is None else "checkpoint"
    shared = {} if argument is None and rank_and_size()[1] == 1 else identity_of([model], [rows[0].module], argument)
    identity = shared | {
        "settings": settings,
        "batch_size": rows[0].batches.data.batch_size,
        "pad": None if model.tokenizer is None else model.tokenizer.pad_token_id,
        "processes": rank_and_size()[1],
        "trained_on": rows[0].digest,
        "evaluated_on": rows[1].digest,
    }
    refuse_other_ranks("training", identity)
    return ResumableFile(path, "training", identity, _refuse_other_run)


def _refuse_other_run(path: Path, identity: Any, file_identity: Any) -> None:
    settings = {key: value for key, value in identity.items() if key != "models"}
    file_settings = {key: value for key, value in file_identity.items() if key != "models"}
    if settings == file_settings and identity["models"] != file_identity["models"]:
        raise LayersimError(
            f"`model` has other weights or settings than at the start of the run in {path}. Load the model again, or pass "
            "another `checkpoint`."
        )
    refuse_other_run(path, identity, file_identity)


def record_of_training(
    model: ModelDescription, rows: tuple[TrainingData, TrainingData], options: dict[str, Any], seconds: float, seed: int
) -> Provenance:
    """The provenance of a training. Its counts are those of the held-out data.

    Args:
        model: description of the model before the training.
        rows: training rows and held-out rows.
        options: settings of the training.
        seconds: duration of the whole call.
        seed: seed of the training.
    """
    trained_on, held_out = rows
    data = trained_on.batches.data
    targets = sum(int((held_out.take([row]).targets != NO_LABEL).sum()) for row in range(len(held_out)))
    texts = len({row.text.unit for row in held_out.rows if row.text is not None})
    batch_count = -(-len(held_out) // data.batch_size)
    tally = Tally(batch_count, len(held_out), targets, held_out.digest, seconds, texts=texts)
    # Two parts of one data set count once.
    data_sets = {id(part.batches): part.batches for part in rows}
    row_counts = found_in(*data_sets.values())
    training_record = {"trained_on": trained_on.digest, "train_rows": len(trained_on)}
    run = record([model], tally, data.record() | row_counts | options | training_record, seed)
    warn_of_unused(trained_on.labels, replace(run, sequences=len(trained_on) + len(held_out)))
    return run


def rows_in_words(run: Provenance, training: bool) -> str:
    """Text with the number of training rows or held-out targets, such as "40 training rows".

    Args:
        run: record of the training.
        training: whether the figure shows the training loss, not the evaluations.
    """
    if training:
        return amount(run.options.get("train_rows", 0), "training row")
    return amount(run.tokens, f"held-out {'row' if run.tokens == run.sequences else 'token'}")
