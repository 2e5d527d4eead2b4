"""Batches for fitting and evaluating a stitch, and the front model's activations."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..core.errors import LayersimError, in_words, warn
from ..data.batches import Batch, Batches, row_bytes
from ..data.labels import NO_LABEL
from ..data.texts import split_rows
from ..lens.targets import answers, check_batch_labels
from ..sources.model_description import ModelDescription
from ..sources.partial_forward import SplitModel

# Activations with more bytes than this are reported.
LARGE = 1e8
# One of this many rows is held out.
EVALUATION_EVERY = 5


def fit_and_evaluation(
    batches: Batches, held_out: Batches | None, labels: str | Tensor, model: ModelDescription, fitted: bool
) -> tuple[tuple[Batch, ...], tuple[Batch, ...]]:
    """Batches for fitting adapters, and batches for measuring the penalty; each batch has at least one target.

    If an adapter is fitted and `held_out` is None, about the last fifth of the rows is held out. A text is used for the fit
    or for the evaluation, not for both. A packed row that would belong to both is left out.

    Args:
        batches: data for the fit; data for the evaluation if no adapter is fitted.
        held_out: data for the evaluation; None to take it from `batches`.
        labels: see `lens.targets`.
        model: the back.
        fitted: whether an adapter is fitted.

    Raises:
        LayersimError: the data has no targets, or too few rows to split.
    """
    fit = _batches_with_targets(batches, "data", labels, model)
    row_count = sum(len(batch.tokens) for batch in fit)
    evaluation = fit
    if held_out is not None:
        evaluation = _batches_with_targets(held_out, "eval_data", labels, model)
        if fitted:
            _warn_of_common_rows(fit, evaluation)
    elif fitted:
        fit, evaluation = _split_between_texts(fit)
        fit = [batch for batch in fit if _has_targets(batch, labels, model)]
    evaluation = [batch for batch in evaluation if _has_targets(batch, labels, model)]
    if not fit or not evaluation:
        raise LayersimError(
            f"`data` has {row_count} rows with targets, too few to hold some out for evaluation. Pass more data, or eval_data=."
        )
    return tuple(fit) if fitted else (), tuple(evaluation)


def _has_targets(batch: Batch, labels: str | Tensor, model: ModelDescription) -> bool:
    return bool((answers(batch, labels, model) != NO_LABEL).any())


def _batches_with_targets(source: Batches, argument: str, labels: str | Tensor, model: ModelDescription) -> list[Batch]:
    batches = []
    for batch in source:
        check_batch_labels(labels, batch, model)
        if _has_targets(batch, labels, model):
            batches.append(batch)
    if not batches:
        target = "label" if labels != "next_token" else "next token"
        raise LayersimError(f"`{argument}` has no position with a {target}.")
    return batches


def _split_between_texts(batches: list[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Split the rows between texts. About the last fifth is for the evaluation.

    Args:
        batches: rows in the order of the data.
    """
    texts = [text for batch in batches for text in batch.texts]
    held_out_count = max(1, len(texts) // EVALUATION_EVERY)
    stop_of_fit, start_of_evaluation = split_rows(texts, held_out_count)
    if not stop_of_fit and len(texts) > held_out_count:
        warn(
            "The adapter is fitted and evaluated on rows of the same text, so the stitching penalty says nothing about new "
            "text. Pass several texts, or eval_data= with other texts."
        )
        stop_of_fit = start_of_evaluation = len(texts) - held_out_count
    return _rows_between(batches, 0, stop_of_fit), _rows_between(batches, start_of_evaluation, len(texts))


def _rows_between(batches: list[Batch], start: int, stop: int) -> list[Batch]:
    """The rows from `start` to `stop - 1`, counted over all batches."""
    parts = list[Batch]()
    rows_before = 0
    for batch in batches:
        first = max(start - rows_before, 0)
        end = min(stop - rows_before, len(batch.tokens))
        if first < end:
            parts.append(batch.rows(first, end))
        rows_before += len(batch.tokens)
    return parts


def _warn_of_common_rows(fit: list[Batch], held_out: list[Batch]) -> None:
    fit_rows = set(_rows_as_bytes(fit))
    held_out_rows = _rows_as_bytes(held_out)
    common = sum(row in fit_rows for row in held_out_rows)
    if common:
        warn(
            f"{common} of {len(held_out_rows)} rows of eval_data also occur in data, so the stitching penalty is partly "
            "measured on training data."
        )


def _rows_as_bytes(batches: list[Batch]) -> list[bytes]:
    rows = []
    for batch in batches:
        rows += [row_bytes(batch, number) for number in range(len(batch.tokens))]
    return rows


class ActivationStore:
    """Residual stream of the front model at one layer, for each batch of the data.

    The residuals of a batch are computed at each access, or once for all accesses in the context `keep`.

    Args:
        front: the model.
        layer: the layer.
        batches: the data.
    """

    def __init__(self, front: SplitModel, layer: int, batches: tuple[Batch, ...]) -> None:
        self.front = front
        self.layer = layer
        self.batches = batches
        # `position d_model`, the residuals of all batches in the context `keep`.
        self._residuals: Tensor | None = None
        self._starts = [0, *itertools.accumulate(batch.tokens.numel() for batch in batches)]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Tensor:
        """The residuals of a batch (`batch pos d_model`)."""
        if self._residuals is None:
            return self.front.hidden(self.batches[index], self.layer)
        residuals = self._residuals[self._starts[index] : self._starts[index + 1]]
        return residuals.view(*self.batches[index].tokens.shape, -1)

    @contextmanager
    def keep(self, folder: Path | None, required: bool = True) -> Iterator[None]:
        """Compute all residuals once and keep them until the context ends.

        Args:
            folder: folder for the file; None for memory.
            required: if False, residuals that do not fit into memory are computed at each access, and a message says so.

        Raises:
            LayersimError: memory or disk is too small.
            OSError: the disk has no room for the file.
        """
        first = self.front.hidden(self.batches[0], self.layer)
        width = first.shape[-1]
        position_count = self._starts[-1]
        size = position_count * width * first.element_size()
        free, place = _free_bytes(folder)
        if size > 0.9 * free:
            if required or folder is not None:
                remedy = "Use a smaller max_tokens=." if folder else "Use a smaller max_tokens=, or cache='folder' for a file."
                raise LayersimError(
                    f"The front model's activations take {in_words(size)}, more than 90 % of the free {place}, "
                    f"{in_words(free)}. {remedy}"
                )
            tqdm.write(
                f"The front model's activations take {in_words(size)}, which do not fit into memory. They are computed again "
                "for each back model; cache='folder' keeps them in a file.",
                file=sys.stderr,
            )
            yield
            return
        if size > LARGE or folder is not None:
            where = f"a file in {folder}" if folder else "memory"
            tqdm.write(f"The front model's activations take {in_words(size)} in {where}.", file=sys.stderr)
        if folder is None:
            residuals = torch.empty(position_count, width, dtype=first.dtype)
        else:
            # The mapped file has no name, so a killed process leaves nothing.
            with tempfile.NamedTemporaryFile(dir=folder, prefix="activations-", suffix=".bin") as file:
                if hasattr(os, "posix_fallocate"):
                    # Writing to a mapped file on a full disk would end the process.
                    os.posix_fallocate(file.fileno(), 0, size)
                numbers = torch.from_file(file.name, shared=True, size=position_count * width, dtype=first.dtype)
                residuals = numbers.view(position_count, width)
        try:
            for index in tqdm(range(len(self)), desc="front", unit="batch", disable=None, leave=False):
                hidden = first if index == 0 else self.front.hidden(self.batches[index], self.layer)
                residuals[self._starts[index] : self._starts[index + 1]] = hidden.reshape(-1, width).cpu()
            self._residuals = residuals
            yield
        finally:
            self._residuals = None


def _free_bytes(folder: Path | None) -> tuple[float, str]:
    """Number of free bytes on the disk of `folder`, or in memory if `folder` is None. Also returns "disk" or "memory"."""
    import psutil

    if folder is not None:
        return float(psutil.disk_usage(str(folder)).free), "disk"
    return float(psutil.virtual_memory().available), "memory"
