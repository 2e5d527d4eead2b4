"""Finds the positions that the head of a row classifier reads, from one recorded forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..activations.block_call import first_tensor
from ..architectures.output_heads import is_norm
from ..architectures.unembed import Head, Pool, rounding, tensor_of
from .find_anatomy import RecordedForward, tail_runs
from .hooks import in_this_thread, on_leave, temporary_hooks

# The first position, the last one, and means over all positions and over those after one special token.
POOLINGS = (Pool((0,)), Pool((-1,)), Pool(mean_from=0), Pool(mean_from=1))


def pooled_head(recorded: RecordedForward, last_block: str, logits: Tensor, dtype: torch.dtype) -> Head | None:
    """The head of a row classifier as a chain of modules with one pooling over positions; None if it is no such chain.

    Each module reads what the one before returns, or the vector to which its positions are pooled: the first position, the last
    one, or a mean. The head pools before all modules but the norm, so its logits must be compared with the model's own: after
    an activation, a mean is another one.

    Args:
        recorded: a forward pass over one row without padding.
        last_block: path of the last block.
        logits: the logits of the row, `1 classes`.
        dtype: dtype of the weights.
    """
    last_block_run = recorded.runs_of(last_block)[-1]
    hidden = last_block_run.output
    norm = ""
    parts: list[str] = []
    pool: Pool | None = None
    for run in tail_runs(recorded, last_block_run):
        if run.input is None or run.output is None or hidden is None:
            return None
        if not _agree(run.input, hidden, dtype):
            pool = _pooling(hidden, run.input, dtype)
            if pool is None:
                return None
            pool = replace(pool, before_norm=not norm)
        hidden = run.output
        if torch.equal(run.output, run.input):
            # Dropout.
            continue
        if not parts and not norm and is_norm(run.module):
            norm = run.path
            continue
        parts.append(run.path)
    if not parts or hidden is None:
        return None
    if pool is None:
        pool = _pooling(hidden, logits, dtype)
    if pool is None:
        return None
    if pool.single:
        return Head(norm, tuple(parts), "first" if pool.single == (0,) else "last")
    # Without a norm, nothing comes before or after it.
    return Head(norm, tuple(parts), "rows", pool=pool if norm else replace(pool, before_norm=False))


def _pooling(states: Tensor, vector: Tensor, dtype: torch.dtype) -> Pool | None:
    """The one of `POOLINGS` that maps states (`1 pos width`) to a vector (`1 width` or `1 1 width`); None if none does."""
    if states.dim() != 3 or states.shape[1] < 2 or vector.numel() != states.shape[2]:
        return None
    every = torch.ones(states.shape[:2], dtype=torch.bool)
    exact_states = _in_float64(states)
    target = _in_float64(vector).flatten()
    # The nearest one, because two means over many positions may agree up to the rounding of half precision.
    gaps = [float((pool(exact_states, every).flatten() - target).norm()) for pool in POOLINGS]
    nearest = POOLINGS[gaps.index(min(gaps))]
    return nearest if _agree(vector, nearest(states, every), dtype) else None


def positions_of_head(
    block: torch.nn.Module, call: Callable[[], Any], logits: Tensor, dtype: torch.dtype
) -> Literal["first", "last", "rows"]:
    """The positions of the last block's output that the logits of a row depend on; "rows" for several.

    Args:
        block: the last block.
        call: runs the forward pass over the row.
        logits: the logits of the row.
        dtype: dtype of the weights.
    """
    if _depends_on_one(block, call, logits, dtype, 0):
        return "first"
    return "last" if _depends_on_one(block, call, logits, dtype, -1) else "rows"


def _depends_on_one(block: torch.nn.Module, call: Callable[[], Any], logits: Tensor, dtype: torch.dtype, place: int) -> bool:
    """Whether the logits stay as they are if the vectors at all other positions change."""

    def change_others(_module: torch.nn.Module, _args: Any, output: Any) -> None:
        states = first_tensor(output)
        vector = states[:, place].clone()
        states.copy_(states.flip(-1))
        states[:, place] = vector

    with temporary_hooks() as handles, torch.no_grad():
        handles.append(on_leave(block, in_this_thread(change_others)))
        return _agree(tensor_of(call()), logits, dtype)


def _agree(tensor: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Whether two tensors hold the same numbers up to rounding, whatever their axes of length 1."""
    ours = _in_float64(tensor).flatten()
    theirs = _in_float64(other).flatten()
    return ours.shape == theirs.shape and float((ours - theirs).norm()) <= rounding(dtype) * float(theirs.norm())


def _in_float64(tensor: Tensor) -> Tensor:
    """A tensor in float64 on the CPU: not every device has float64, and parts of a head may be on several."""
    return tensor.detach().cpu().double()
