"""SHA-256 digest of the rows of a run, which does not depend on the batch size."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from .batches import Batch
from .other_stack import cut_to_longest


def fingerprint(digest: Any, batch: Batch, marked: bool = False) -> None:
    """Add a batch's rows, without padding, to a running hash: equal data gives equal digests in any batch size.

    Args:
        digest: the hash.
        batch: the rows.
        marked: whether the data marks the counted positions, which then are a part of it.
    """
    for number in range(len(batch.tokens)):
        digest.update(row_bytes(batch, number))
        if marked:
            digest.update(batch.counted[number][batch.attention[number]].numpy().tobytes() + b"|")


def row_bytes(batch: Batch, number: int) -> bytes:
    """A row of a batch without padding, all of its inputs included, as bytes."""
    attention = batch.attention[number]
    length = int(attention.nonzero()[-1]) + 1
    found = batch.tokens[number, :length].numpy().tobytes() + attention[:length].numpy().tobytes() + b"|"
    inputs = cut_to_longest({name: values[number : number + 1] for name, values in batch.inputs.items()})
    for name, values in sorted(inputs.items()):
        row = values[0, :length] if name in batch.positional else values[0]
        # NumPy has no bfloat16.
        plain = row.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found += f"{name} {row.dtype} {tuple(row.shape)} ".encode() + plain + b"|"
    return found


def new_digest() -> Any:
    """An empty hash for `fingerprint`."""
    return hashlib.sha256()
