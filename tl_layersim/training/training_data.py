"""Training data and held-out data: rows of tokens or images with targets, taken by number."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..data.batches import Batches, found_in
from ..data.columns import LABELS, refuse_dropped
from ..data.digest import fingerprint, new_digest
from ..data.labels import NO_LABEL
from ..data.options import DataOptions
from ..data.readers import Row
from ..models.layout import call_options
from ..models.model_info import Model
from ..models.targets import answers, check_batch_labels
from .residual_stream import TrainingBatch

HELD_OUT = 10
PIXELS = "pixel_values"


class TrainingData(ABC):
    """Rows with at least one target each."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def take(self, numbers: Sequence[int]) -> TrainingBatch:
        """Some rows as one batch."""

    @abstractmethod
    def part(self, start: int, stop: int) -> TrainingData:
        """The rows from `start` up to `stop`."""

    @abstractmethod
    def digest(self) -> str:
        """SHA-256 of the rows and their targets."""

    def sources(self) -> tuple[Batches, ...]:
        """The data sets that the rows were read from; empty for images, which are used as they are."""
        return ()

    def split(self) -> tuple[TrainingData, TrainingData]:
        """All rows but the last tenth for training, and the last tenth, which is held out.

        Raises:
            LayersimError: the data has a single row.
        """
        if len(self) < 2:
            raise LayersimError(
                "`data` has too few rows to hold some of them out for evaluation.",
                given=f"{len(self)} row with a target",
                expected="two rows or more, of which the last tenth is held out; or eval_data=",
                do="more data, a smaller seq_len= that cuts it into more rows, or eval_data=other_data",
            )
        kept = max(1, len(self) // HELD_OUT)
        return self.part(0, len(self) - kept), self.part(len(self) - kept, len(self))


class TokenTrainingData(TrainingData):
    """Rows of tokens.

    Args:
        batches: the data.
        labels: see `models.targets`.
        model: description of the model.
        module: the model.
        rows: of the data, None to read them.
    """

    def __init__(
        self, batches: Batches, labels: str | Tensor, model: Model, module: torch.nn.Module, rows: list[Row] | None = None
    ) -> None:
        self.batches, self.labels, self.model, self.module = batches, labels, model, module
        self.rows = self._read() if rows is None else rows

    def _read(self) -> list[Row]:
        found = []
        for row in self.batches.rows():
            batch = self.batches.batch([row], 0)
            check_batch_labels(self.labels, batch, self.model)
            if bool((answers(batch, self.labels, self.model) != NO_LABEL).any()):
                found.append(row)
        if not found:
            raise LayersimError(
                "`data` has no position with a target.",
                given=f"no {'next token' if self.labels == 'next_token' else 'label'} in any row",
                expected="rows of two or more tokens" if self.labels == "next_token" else "rows with labels",
                do="check the data, its mask and skip_first=",
            )
        return found

    def __len__(self) -> int:
        return len(self.rows)

    def sources(self) -> tuple[Batches, ...]:
        return (self.batches,)

    def take(self, numbers: Sequence[int]) -> TrainingBatch:
        batch = self.batches.batch([self.rows[number] for number in numbers], 0)
        options = call_options(self.module, batch)
        return TrainingBatch(
            batch.tokens, options, answers(batch, self.labels, self.model), batch.attention if batch.padded else None
        )

    def part(self, start: int, stop: int) -> TrainingData:
        return TokenTrainingData(self.batches, self.labels, self.model, self.module, self.rows[start:stop])

    def digest(self) -> str:
        digest = new_digest()
        for row in self.rows:
            batch = self.batches.batch([row], 0)
            fingerprint(digest, batch)
            digest.update(answers(batch, self.labels, self.model).numpy().tobytes())
        found: str = digest.hexdigest()
        return found


class ImageTrainingData(TrainingData):
    """Images with a class each.

    Args:
        pixels: `row channel height width`, as the model takes them.
        labels: `row`, NO_LABEL for an image without a class.
    """

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        self.pixels, self.labels = pixels, labels

    @staticmethod
    def of(data: Any, labels: Any) -> ImageTrainingData:
        """The images of a column `pixel_values`, with the classes of a column `labels` or `label`.

        Raises:
            LayersimError: classes are missing, or do not fit the images.
        """
        names = data.column_names if hasattr(data, "column_names") else list(data)
        own = next((name for name in LABELS if name in names), None)
        found = labels if labels is not None and not isinstance(labels, str) else None if own is None else data[own]
        pixels = _as_tensor(data[PIXELS])
        classes = None if found is None else _as_tensor(found)
        if classes is None or pixels.dim() != 4 or classes.shape != pixels.shape[:1] or classes.is_floating_point():
            raise LayersimError(
                "`data` with `pixel_values` must have one class for each image.",
                given=f"pixel_values of shape {tuple(pixels.shape)} and labels "
                + ("that are missing" if classes is None else f"of shape {tuple(classes.shape)}, {classes.dtype}"),
                expected="pixel_values (row, channel, height, width) and labels (row,) of whole numbers",
                do="{'pixel_values': processor(images, return_tensors='pt').pixel_values, 'labels': labels}",
            )
        keep = classes != NO_LABEL
        if not bool(keep.any()):
            raise LayersimError(
                "`labels` of the images are all missing.",
                given=f"{len(classes)} labels, all {NO_LABEL}",
                expected="a class for some of them",
                do="check the labels",
            )
        return ImageTrainingData(pixels[keep], classes[keep].long())

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, numbers: Sequence[int]) -> TrainingBatch:
        index = torch.tensor(list(numbers))
        return TrainingBatch(self.pixels[index], {}, self.labels[index], None)

    def part(self, start: int, stop: int) -> TrainingData:
        return ImageTrainingData(self.pixels[start:stop], self.labels[start:stop])

    def digest(self) -> str:
        parts = (self.pixels.contiguous().numpy().tobytes(), self.labels.contiguous().numpy().tobytes())
        return hashlib.sha256(b"|".join(parts)).hexdigest()


def _as_tensor(values: Any) -> Tensor:
    return values if isinstance(values, Tensor) else torch.as_tensor(np.array(values))


def found_in_data(*parts: TrainingData) -> dict[str, int]:
    """Counts of automatic corrections in reading, see `Batches.row_counts`; two parts of one data set count once."""
    return found_in(*{id(batches): batches for part in parts for batches in part.sources()}.values())


def has_images(data: Any) -> bool:
    """Whether the data consists of images: a mapping or a data set with `pixel_values`."""
    names = getattr(data, "column_names", None)
    return PIXELS in (names if names is not None else data if isinstance(data, Mapping) else ())


def open_training_data(
    data: Any,
    eval_data: Any,
    labels: Any,
    reading: DataOptions,
    model: Model,
    module: torch.nn.Module,
    usual: str | Tensor,
) -> tuple[TrainingData, TrainingData]:
    """The rows to train on, and the rows to evaluate on.

    Args:
        data: to train on.
        eval_data: to evaluate on, None for the last tenth of the rows.
        labels: as the user passed them.
        reading: how the data is read.
        model: description of the model, with its tokenizer.
        module: the model.
        usual: the same labels, as `usual_labels` gives them.
    """
    if eval_data is not None and not (labels is None or isinstance(labels, str)):
        raise LayersimError(
            "`labels` cannot be a table where `eval_data` is given: a table belongs to one data set.",
            given="labels= as a table, with eval_data=",
            expected="labels beside the rows of each",
            do="labels='data' and a column `labels` in data and eval_data",
        )
    if has_images(data):
        for part in (data, eval_data):
            names = getattr(part, "column_names", None) or part or ()
            refuse_dropped({name: True for name in names if name != PIXELS}, model)
        rows: TrainingData = ImageTrainingData.of(data, labels)
        return rows.split() if eval_data is None else (rows, ImageTrainingData.of(eval_data, labels))
    batches = Batches(data, model, reading, isinstance(usual, str) and usual == "data")
    rows = TokenTrainingData(batches, usual, model, module)
    if eval_data is None:
        return rows.split()
    return rows, TokenTrainingData(replace(batches, data=eval_data), usual, model, module)
