"""What a stitch is fitted and judged on: batches, the right answers, and the front's activations, computed once."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..core.errors import LayersimError, in_words, warn
from ..data.batches import Batch, Batches
from ..data.labels import NO_LABEL
from ..models.model_info import Model
from ..models.split_model import SplitModel
from ..models.targets import answers, check_batch_labels

# Sizes that are said before they are taken.
MUCH = 1e8
HELD_OUT = 5
FEWEST = 10


@dataclass(frozen=True)
class StitchData:
    """Batches of the fit and of the judgement, each with something to answer.

    Attributes:
        fit: batches that adapters are fitted on.
        judged: batches that the penalty is measured on.
        labels: see `labels.targets`.
    """

    fit: tuple[Batch, ...]
    judged: tuple[Batch, ...]
    labels: str | Tensor

    @staticmethod
    def of(batches: Batches, judged: Batches | None, labels: str | Tensor, model: Model, fitted: bool) -> StitchData:
        """Read the data; where an adapter is fitted and no other data judges it, the last fifth of the rows is kept for that.

        Raises:
            LayersimError: there is nothing to answer, or too little to keep any.
        """

        def asks(batch: Batch) -> bool:
            return bool((answers(batch, labels, model) != NO_LABEL).any())

        def read(source: Batches) -> list[Batch]:
            found = []
            for batch in source:
                check_batch_labels(labels, batch, model)
                if asks(batch):
                    found.append(batch)
            if not found:
                raise LayersimError(
                    f"There is nothing to answer in {'this data' if source is batches else 'eval_data'}.",
                    given=f"no position with a {'label' if labels != 'next_token' else 'next token'}",
                    expected="rows of two or more tokens" if labels == "next_token" else "rows with labels",
                    do="check the data, its mask and skip_first=",
                )
            return found

        def finely(found: list[Batch]) -> tuple[Batch, ...]:
            """In ten batches or more, as far as there are rows: an interval over batches needs some."""
            size = max(1, min(batches.options.batch_size, sum(len(batch.tokens) for batch in found) // FEWEST))
            parts = (b.rows(start, start + size) for b in found for start in range(0, len(b.tokens), size))
            return tuple(part for part in parts if asks(part))

        own = read(batches)
        if judged is not None:
            other = read(judged)
            if fitted:
                _warn_of_common_rows(own, other)
            return StitchData(tuple(own) if fitted else (), finely(other), labels)
        if not fitted:
            return StitchData((), finely(own), labels)
        rows = sum(len(batch.tokens) for batch in own)
        left = rows - max(1, rows // HELD_OUT)
        fit, kept = list[Batch](), list[Batch]()
        for batch in own:
            here = min(left, len(batch.tokens))
            fit += [batch.rows(0, here)] if here else []
            kept += [batch.rows(here, len(batch.tokens))] if here < len(batch.tokens) else []
            left -= here
        fit = [batch for batch in fit if asks(batch)]
        parts = finely(kept)
        if not fit or not parts:
            raise LayersimError(
                "A fitted adapter is judged on data that it was not fitted on, and this data cannot be parted.",
                given=f"{rows} rows",
                expected="two rows or more with something to answer, the last fifth of which is kept; or eval_data=",
                do="more data, a smaller seq_len= that cuts it into more rows, or eval_data=other_data",
            )
        return StitchData(tuple(fit), parts, labels)


def _warn_of_common_rows(fit: list[Batch], judged: list[Batch]) -> None:
    """Say how much of what judges was fitted on."""
    seen = {row.numpy().tobytes() for batch in fit for row in _rows_of(batch)}
    common = [row.numpy().tobytes() in seen for batch in judged for row in _rows_of(batch)]
    if any(common):
        warn(
            f"{sum(common)} of {len(common)} rows of eval_data are rows of data too: the penalty is measured on what the "
            "adapter was fitted on."
        )


def _rows_of(batch: Batch) -> list[Tensor]:
    return [tokens[attended] for tokens, attended in zip(batch.tokens, batch.attention, strict=True)]


class ActivationStore:
    """The front's residual at one layer, batch by batch: read anew each time, or kept after `keep`.

    Args:
        front: the model.
        layer: where.
        batches: the data.
    """

    def __init__(self, front: SplitModel, layer: int, batches: tuple[Batch, ...]) -> None:
        self.front, self.layer, self.batches = front, layer, batches
        self._kept: Tensor | None = None
        self._starts = [0]
        for batch in batches:
            self._starts.append(self._starts[-1] + batch.tokens.numel())

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Tensor:
        """`batch pos d_model` of a batch."""
        if self._kept is None:
            return self.front.hidden(self.batches[index], self.layer)
        rows = self._kept[self._starts[index] : self._starts[index + 1]]
        return rows.view(*self.batches[index].tokens.shape, -1)

    @contextmanager
    def keep(self, folder: Path | None) -> Iterator[None]:
        """Compute all of them once, in memory or in a file of a folder that is gone afterwards.

        Raises:
            LayersimError: they do not fit.
        """
        if self._kept is not None:
            yield
            return
        first = self.front.hidden(self.batches[0], self.layer)
        width, total = first.shape[-1], self._starts[-1]
        size = total * width * first.element_size()
        self._refuse_or_say(size, folder)
        name = ""
        try:
            if folder is None:
                held = torch.empty(total, width, dtype=first.dtype)
            else:
                handle, name = tempfile.mkstemp(dir=folder, prefix="activations-", suffix=".bin")
                try:
                    _reserve(handle, size, folder)
                finally:
                    os.close(handle)
                held = torch.from_file(name, shared=True, size=total * width, dtype=first.dtype).view(total, width)
                # Mapped, it needs no name, and a killed process leaves nothing; Windows keeps the name until the end.
                with suppress(OSError):
                    Path(name).unlink()
            for index in tqdm(range(len(self)), desc="front", unit="batch", disable=None, leave=False):
                hidden = first if index == 0 else self.front.hidden(self.batches[index], self.layer)
                held[self._starts[index] : self._starts[index + 1]] = hidden.reshape(-1, width).cpu()
            self._kept = held
            yield
        finally:
            self._kept = None
            if name:
                Path(name).unlink(missing_ok=True)

    def _refuse_or_say(self, size: int, folder: Path | None) -> None:
        free, what = _free(folder)
        if size > 0.9 * free:
            raise LayersimError(
                f"The front's activations do not fit into the {what} that is free.",
                given=f"{self._starts[-1]:,} positions at {self.front.model.layers[self.layer]}: {in_words(size)}",
                expected=f"less than {in_words(0.9 * free)}",
                do="a smaller max_tokens=" + ("" if folder else ", or cache='folder' for a memory-mapped file"),
            )
        if size > MUCH or folder is not None:
            where = f"a file in {folder}" if folder else "memory"
            tqdm.write(f"The front's activations take {in_words(size)} in {where}.", file=sys.stderr)


def _reserve(handle: int, size: int, folder: Path) -> None:
    """Take the space on disk: a mapped file that meets a full disk later ends the process.

    Raises:
        LayersimError: there is not so much.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            # A file system that cannot take space ahead.
            return
        raise LayersimError(
            "`cache` names a folder on a disk that does not take the front's activations.",
            given=f"{in_words(size)} in {folder}: {error.strerror}",
            expected="free space for all of them",
            do="cache='a folder on another disk', or a smaller max_tokens=",
        ) from error


def _free(folder: Path | None) -> tuple[float, str]:
    """How many bytes are free, and of what."""
    import psutil

    if folder is not None:
        return float(psutil.disk_usage(str(folder)).free), "disk"
    return float(psutil.virtual_memory().available), "memory"
