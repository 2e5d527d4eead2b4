"""What a model is trained and judged on: rows of tokens or images, taken by number."""

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
    """Rows with something to answer."""

    @abstractmethod
    def __len__(self) -> int:
        """How many rows."""

    @abstractmethod
    def take(self, numbers: Sequence[int]) -> TrainingBatch:
        """Rows side by side."""

    @abstractmethod
    def part(self, start: int, stop: int) -> TrainingData:
        """Some of the rows."""

    @abstractmethod
    def digest(self) -> str:
        """SHA-256 of the rows and of what is asked of them."""

    def sources(self) -> tuple[Batches, ...]:
        """The data that it was read from; none of images, which are taken as they are."""
        return ()

    def halves(self) -> tuple[TrainingData, TrainingData]:
        """All but the last tenth, and the last tenth.

        Raises:
            LayersimError: there is a single row.
        """
        if len(self) < 2:
            raise LayersimError(
                "Training is judged on rows that it does not see, and this data cannot be parted.",
                given=f"{len(self)} row with something to answer",
                expected="two rows or more, the last tenth of which is kept; or eval_data=",
                do="more data, a smaller seq_len= that cuts it into more rows, or eval_data=other_data",
            )
        kept = max(1, len(self) // HELD_OUT)
        return self.part(0, len(self) - kept), self.part(len(self) - kept, len(self))


class TokenTrainingData(TrainingData):
    """Rows of tokens.

    Args:
        batches: the data.
        labels: see `labels.targets`.
        model: what is known of the model.
        module: the model.
        rows: where they are read already.
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
                "There is nothing to answer in this data.",
                given=f"no position with a {'next token' if self.labels == 'next_token' else 'label'}",
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
        labels: `row`, NO_LABEL where there is none.
    """

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        self.pixels, self.labels = pixels, labels

    @staticmethod
    def of(data: Any, labels: Any) -> ImageTrainingData:
        """Read `pixel_values`, and `labels` or `label` beside them.

        Raises:
            LayersimError: they do not fit.
        """
        names = data.column_names if hasattr(data, "column_names") else list(data)
        own = next((name for name in LABELS if name in names), None)
        found = labels if labels is not None and not isinstance(labels, str) else None if own is None else data[own]
        pixels = _as_tensor(data[PIXELS])
        classes = None if found is None else _as_tensor(found)
        if classes is None or pixels.dim() != 4 or classes.shape != pixels.shape[:1] or classes.is_floating_point():
            raise LayersimError(
                "Images are trained on with one class each.",
                given=f"pixel_values of shape {tuple(pixels.shape)} and labels "
                + ("that are missing" if classes is None else f"of shape {tuple(classes.shape)}, {classes.dtype}"),
                expected="pixel_values (row, channel, height, width) and labels (row,) of whole numbers",
                do="{'pixel_values': processor(images, return_tensors='pt').pixel_values, 'labels': labels}",
            )
        keep = classes != NO_LABEL
        if not bool(keep.any()):
            raise LayersimError(
                "There is nothing to answer in these images.",
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


def found_in_feeds(*feeds: TrainingData) -> dict[str, int]:
    """What reading the data did of itself, see `Batches.found`; two feeds may be parts of one data set."""
    return found_in(*{id(batches): batches for feed in feeds for batches in feed.sources()}.values())


def has_images(data: Any) -> bool:
    """Whether the data is images: a mapping or a data set with `pixel_values`."""
    names = getattr(data, "column_names", None)
    return PIXELS in (names if names is not None else data if isinstance(data, Mapping) else ())


def open_feeds(
    data: Any,
    eval_data: Any,
    labels: Any,
    reading: DataOptions,
    model: Model,
    module: torch.nn.Module,
    usual: str | Tensor,
) -> tuple[TrainingData, TrainingData]:
    """What is trained on, and what is judged on.

    Args:
        data: to train on.
        eval_data: to judge on, None for the last tenth of the rows.
        labels: as the user handed them over.
        reading: how the data is read.
        model: what is known of the model, with its tokenizer.
        module: the model.
        usual: the same labels, as `usual_labels` gives them.
    """
    if eval_data is not None and not (labels is None or isinstance(labels, str)):
        raise LayersimError(
            "A table of labels belongs to one data set, and here are two.",
            given="labels= as a table, with eval_data=",
            expected="labels beside the rows of each",
            do="labels='data' and a column `labels` in data and eval_data",
        )
    if has_images(data):
        for part in (data, eval_data):
            names = getattr(part, "column_names", None) or part or ()
            refuse_dropped({name: True for name in names if name != PIXELS}, model)
        feed: TrainingData = ImageTrainingData.of(data, labels)
        return feed.halves() if eval_data is None else (feed, ImageTrainingData.of(eval_data, labels))
    batches = Batches(data, model, reading, isinstance(usual, str) and usual == "data")
    feed = TokenTrainingData(batches, usual, model, module)
    if eval_data is None:
        return feed.halves()
    return feed, TokenTrainingData(replace(batches, data=eval_data), usual, model, module)
