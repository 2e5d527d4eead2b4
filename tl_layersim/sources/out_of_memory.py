"""Batches that run out of memory: a forward pass is split by rows, and work on all samples becomes an error."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..activations.view import Kernel, Reduced, View, reduce, tokens_alone
from ..core.errors import LOG, LayersimError
from ..core.wording import counted, first_line
from .hooks import kernels_alone

if TYPE_CHECKING:
    from ..data.batches import Batch

# Torch has a class of its own for a full GPU; on a full CPU or Apple GPU, or within a library of CUDA, only the text tells.
MESSAGES = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that a device is out of memory.

    Args:
        error: any exception.

    Examples:
        >>> is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 17.99 GB)"))
        True
        >>> is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
        False
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in MESSAGES)


def release_memory() -> None:
    """Free tensors in reference cycles, and return torch's cached memory to the device."""
    gc.collect()
    # Does nothing in a process without CUDA.
    torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


@dataclass
class RowParts:
    """Runs a batch in as many forward passes as memory requires, and joins the activations in one view.

    A forward pass that runs out of memory is repeated with half of its rows; further batches begin with the number of rows that
    worked. The parts keep the width of the batch, so that positions and padding are those of the whole batch.

    Attributes:
        rows: largest number of rows in a forward pass; None as long as every batch fits.
    """

    rows: int | None = None

    def collect(self, batch: Batch, run: Callable[[Batch], View], indivisible: Callable[[], str]) -> View:
        """Run a batch and return its view.

        Args:
            batch: the rows.
            run: function that runs one forward pass over some rows and returns their view.
            indivisible: function that returns why the rows must run in one forward pass; "" if they need not.

        Raises:
            LayersimError: a forward pass of one row, or of rows that must run together, runs out of memory.
        """
        total = len(batch.tokens)
        before = size = min(self.rows or total, total)
        joined: _JoinedView | None = None
        start = 0
        while start < total:
            part = batch if size == total else batch.part(start, min(start + size, total))
            view = None
            try:
                view = run(part)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = indivisible()
                if len(part.tokens) == 1 or reason:
                    raise forward_too_large(part, error, reason) from error
            if view is None:
                # After the `except` clause, because the traceback holds the activations of the failed forward pass.
                size = (len(part.tokens) + 1) // 2
                release_memory()
                continue
            if part is batch:
                return view
            joined = joined or _JoinedView(batch, view)
            joined.add(view)
            start += len(part.tokens)
        assert joined is not None
        if size < before:
            self.rows = size
            LOG.warning(
                "Out of memory with %d rows in a forward pass (batch of rows %d to %d, %d positions): %s at a time from "
                "now on. Minibatches stay as they are.",
                before,
                batch.first,
                batch.first + total - 1,
                batch.tokens.shape[1],
                counted(size, "row"),
            )
        return joined.view


class _JoinedView:
    """The view of a batch, filled with the views of its parts in order.

    Args:
        batch: the whole batch.
        first: the view of its first part, which is not added yet.
    """

    def __init__(self, batch: Batch, first: View) -> None:
        known, device = tokens_alone(batch), first.activations.device
        sites, _, width = first.activations.shape
        samples = len(known.sequence)
        with _refusing(partial(_work_too_large, batch, f"{samples} samples at {sites} sites, {width} wide")):
            activations = first.activations.new_empty(sites, samples, width)
        fields: dict[str, Any] = {name: value.to(device) for name, value in known.token_fields().items()}
        self.view = replace(first, activations=activations, memo={}, **fields)
        self._filled = 0

    def add(self, part: View) -> None:
        """Copy the activations of the next rows."""
        end = self._filled + part.activations.shape[1]
        self.view.activations[:, self._filled : end] = part.activations
        self._filled = end


def reduce_batch(batch: Batch, kernels: Mapping[str, Kernel], *views: View) -> Reduced:
    """Run `reduce` on the views of a batch, while no other thread runs kernels.

    Args:
        batch: the rows.
        kernels: the kernels, by name.
        *views: views of the rows, one for each model.

    Raises:
        LayersimError: the kernels ran out of memory.
    """
    with kernels_alone(), _refusing(partial(_work_too_large, batch, ", ".join(kernels))):
        return reduce(kernels, *views)


def refusing_one_row(batch: Batch) -> AbstractContextManager[None]:
    """A context manager for a forward pass over one row: an out-of-memory exception becomes an error that names a setting.

    Args:
        batch: one row.

    Raises:
        LayersimError: the forward pass ran out of memory.
    """
    return _refusing(lambda error: forward_too_large(batch, error, ""))


@contextmanager
def _refusing(refusal: Callable[[BaseException], LayersimError]) -> Iterator[None]:
    """A context manager that replaces an out-of-memory exception by the error that `refusal` returns for it."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise refusal(error) from error


def _work_too_large(batch: Batch, work: str, error: BaseException) -> LayersimError:
    """The error for work on all samples of a batch that runs out of memory."""
    return LayersimError(
        f"`batch_size` is too large: measuring a batch after its forward pass ran out of memory ({work}, "
        f"{_size_of(batch)}): {first_line(error)}. Use {_smaller(batch)}."
    )


def forward_too_large(batch: Batch, error: BaseException, reason: str) -> LayersimError:
    """The error for a forward pass that runs out of memory and cannot be split.

    Args:
        batch: the rows.
        error: exception of the forward pass.
        reason: why several rows must run together; "" for one row.
    """
    one = len(batch.tokens) == 1
    argument = "`seq_len`" if one and batch.has_tokens else "`data`" if one else "`batch_size`"
    what = "a forward pass of one row" if one else "a forward pass"
    return LayersimError(
        f"{argument} is too large: {what} of {_size_of(batch)} runs out of memory{f', and {reason}' if reason else ''}: "
        f"{first_line(error)}. Use {_smaller(batch)}."
    )


def _size_of(batch: Batch) -> str:
    rows, positions = batch.tokens.shape
    return f"{counted(rows, 'row')} of {counted(positions, 'position')}"


def _smaller(batch: Batch) -> str:
    """The setting that halves the size of a batch."""
    rows, positions = batch.tokens.shape
    if rows > 1:
        return f"batch_size={rows // 2}, or fewer"
    lighter = "the model in bfloat16 or on more devices (device_map='auto')"
    return (
        f"seq_len={positions // 2}, or fewer; or {lighter}"
        if batch.has_tokens and positions > 1
        else f"smaller rows; or {lighter}"
    )
