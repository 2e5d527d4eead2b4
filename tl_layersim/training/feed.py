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

from ..data import Batches, fingerprint, new_digest
from ..errors import LayersimError
from ..labels import answers, check_batch_labels
from ..layout import call_options
from ..rows import LABELS, Row
from ..source import NO_LABEL, Model
from .stream import Piece

HELD_OUT = 10
PIXELS = "pixel_values"


class Feed(ABC):
    """Rows with something to answer."""

    @abstractmethod
    def __len__(self) -> int:
        """How many rows."""

    @abstractmethod
    def take(self, numbers: Sequence[int]) -> Piece:
        """Rows side by side."""

    @abstractmethod
    def part(self, start: int, stop: int) -> Feed:
        """Some of the rows."""

    @abstractmethod
    def digest(self) -> str:
        """SHA-256 of the rows and of what is asked of them."""

    def halves(self) -> tuple[Feed, Feed]:
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


class TokenFeed(Feed):
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

    def take(self, numbers: Sequence[int]) -> Piece:
        batch = self.batches.batch([self.rows[number] for number in numbers], 0)
        options = call_options(self.module, batch)
        return Piece(batch.tokens, options, answers(batch, self.labels, self.model), batch.attention if batch.padded else None)

    def part(self, start: int, stop: int) -> Feed:
        return TokenFeed(self.batches, self.labels, self.model, self.module, self.rows[start:stop])

    def digest(self) -> str:
        digest = new_digest()
        for row in self.rows:
            batch = self.batches.batch([row], 0)
            fingerprint(digest, batch)
            digest.update(answers(batch, self.labels, self.model).numpy().tobytes())
        found: str = digest.hexdigest()
        return found


class ImageFeed(Feed):
    """Images with a class each.

    Args:
        pixels: `row channel height width`, as the model takes them.
        labels: `row`, NO_LABEL where there is none.
    """

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        self.pixels, self.labels = pixels, labels

    @staticmethod
    def of(data: Any, labels: Any) -> ImageFeed:
        """Read `pixel_values`, and `labels` or `label` beside them.

        Raises:
            LayersimError: they do not fit.
        """
        names = data.column_names if hasattr(data, "column_names") else list(data)
        own = next((name for name in LABELS if name in names), None)
        found = labels if labels is not None and not isinstance(labels, str) else None if own is None else data[own]
        pixels = _tensor(data[PIXELS])
        classes = None if found is None else _tensor(found)
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
        return ImageFeed(pixels[keep], classes[keep].long())

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, numbers: Sequence[int]) -> Piece:
        index = torch.tensor(list(numbers))
        return Piece(self.pixels[index], {}, self.labels[index], None)

    def part(self, start: int, stop: int) -> Feed:
        return ImageFeed(self.pixels[start:stop], self.labels[start:stop])

    def digest(self) -> str:
        parts = (self.pixels.contiguous().numpy().tobytes(), self.labels.contiguous().numpy().tobytes())
        return hashlib.sha256(b"|".join(parts)).hexdigest()


def _tensor(values: Any) -> Tensor:
    return values if isinstance(values, Tensor) else torch.as_tensor(np.array(values))


def _refuse_segments(data: Any) -> None:
    """Refuse second sentences that a model is told of by `token_type_ids`: they would be read as first ones."""
    names = getattr(data, "column_names", None)
    first = data[0] if isinstance(data, list) and data else None
    keys = names if names is not None else data if isinstance(data, Mapping) else first if isinstance(first, Mapping) else ()
    if "token_type_ids" not in keys:
        return
    parts = [item.get("token_type_ids", []) for item in data] if first is not None else data["token_type_ids"]
    if any(bool(torch.as_tensor(part).any()) for part in parts):
        raise LayersimError(
            "Rows here are one text each, and these have a second one.",
            given="token_type_ids that are not all 0",
            expected="tokens of one text in a row",
            do="aligned_loss(model, tokens, labels, inputs={'token_type_ids': ...}) in a loop of your own, or AlignedTrainer",
        )


def has_images(data: Any) -> bool:
    """Whether the data is images: a mapping or a data set with `pixel_values`."""
    names = getattr(data, "column_names", None)
    return PIXELS in (names if names is not None else data if isinstance(data, Mapping) else ())


def open_feeds(
    data: Any,
    eval_data: Any,
    labels: Any,
    settings: Mapping[str, Any],
    model: Model,
    module: torch.nn.Module,
    usual: str | Tensor,
) -> tuple[Feed, Feed]:
    """What is trained on, and what is judged on.

    Args:
        data: to train on.
        eval_data: to judge on, None for the last tenth of the rows.
        labels: as the user handed them over.
        settings: of `Batches`.
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
        feed: Feed = ImageFeed.of(data, labels)
        return feed.halves() if eval_data is None else (feed, ImageFeed.of(eval_data, labels))
    for part in (data, eval_data):
        _refuse_segments(part)
    batches = Batches(data, model, **settings, labelled=isinstance(usual, str) and usual == "data")
    feed = TokenFeed(batches, usual, model, module)
    if eval_data is None:
        return feed.halves()
    return feed, TokenFeed(replace(batches, data=eval_data), usual, model, module)
