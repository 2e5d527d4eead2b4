"""Batches that run out of memory: forward passes are split by rows, other work raises an error."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..activations.view import Kernel, Reduced, View, reduce, tokens_alone
from ..core.errors import LayersimError
from ..core.wording import amount, first_line
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


def in_parts(batch: Batch, size: int, run: Callable[[Batch], View]) -> View:
    """Run a batch in several forward passes, and return the activations of all rows as one `View`.

    The parts keep the width of the batch, so that positions and padding are those of the whole batch.

    Args:
        batch: the rows.
        size: number of rows of a forward pass.
        run: function that runs one forward pass over some rows and returns their view.
    """
    count = len(batch.tokens)
    groups = [list(range(start, min(start + size, count))) for start in range(0, count, size)]
    return joined(batch, groups, lambda rows: run(batch.part(rows[0], rows[-1] + 1)))


def joined(batch: Batch, groups: Sequence[list[int]], run: Callable[[list[int]], View]) -> View:
    """Run groups of the rows of a batch one after the other, and return the activations of all rows as one `View`.

    Args:
        batch: the rows.
        groups: indices of the rows in each group, ascending. Together they are all rows with a counted position.
        run: function that runs the rows of a group and returns their view.
    """
    tokens_view = tokens_alone(batch)
    row_of_sample = tokens_view.sequence
    whole: View | None = None
    for rows in groups:
        view = run(rows)
        if whole is None:
            sites, _, width = view.activations.shape
            with refusing_out_of_memory(batch, f"keeping {len(row_of_sample)} samples at {sites} sites, {width} wide,"):
                activations = view.activations.new_empty(sites, len(row_of_sample), width)
            fields: dict[str, Any] = {}
            for name, value in tokens_view.token_fields().items():
                fields[name] = value.to(activations.device)
            whole = replace(view, activations=activations, memo={}, **fields)
        samples = torch.isin(row_of_sample, torch.tensor(rows)).nonzero()[:, 0]
        whole.activations[:, samples.to(view.activations.device)] = view.activations
    assert whole is not None
    return whole


def reduce_batch(batch: Batch, kernels: Mapping[str, Kernel], *views: View) -> Reduced:
    """Apply kernels to the activations of a batch by `reduce`; kernels in other threads wait.

    Args:
        batch: the rows.
        kernels: the kernels, by name.
        *views: views of the rows, one for each model.

    Raises:
        LayersimError: the kernels ran out of memory.
    """
    with kernels_alone(), refusing_out_of_memory(batch, f"measuring ({', '.join(kernels)})"):
        return reduce(kernels, *views)


@contextmanager
def refusing_out_of_memory(batch: Batch, work: str = "a forward pass") -> Iterator[None]:
    """A context manager that raises a LayersimError (`too_large`) if memory runs out.

    Args:
        batch: the rows.
        work: description of the work, for the message.

    Raises:
        LayersimError: the work ran out of memory.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise too_large(batch, work, error) from error


def too_large(batch: Batch, work: str, error: BaseException) -> LayersimError:
    """The error for a batch that runs out of memory, with the setting that makes it smaller.

    Args:
        batch: the rows.
        work: description of the work.
        error: its exception.
    """
    rows, positions = batch.tokens.shape
    other_model = "; or the model in bfloat16 or on more devices (device_map='auto')"
    if rows != 1:
        argument = "batch_size"
        remedy = f"batch_size={rows // 2}, or fewer"
    elif batch.has_tokens:
        argument = "seq_len"
        remedy = f"seq_len={positions // 2}, or fewer{other_model}"
    else:
        argument = "data"
        remedy = f"smaller rows{other_model}"
    return LayersimError(
        f"`{argument}` is too large: {work} of {amount(rows, 'row')} of {amount(positions, 'position')} runs out of memory: "
        f"{first_line(error)}. Use {remedy}."
    )
