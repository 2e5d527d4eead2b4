"""SHA-256 digest of the rows of a run, which does not depend on the batch size."""

from __future__ import annotations

import hashlib
from typing import Any

from .batches import Batch


def fingerprint(digest: Any, batch: Batch) -> None:
    """Add a batch's rows, without padding, to a running hash: equal data gives equal digests in any batch size."""
    for tokens, attention in zip(batch.tokens, batch.attention, strict=True):
        length = int(attention.nonzero()[-1]) + 1
        digest.update(tokens[:length].numpy().tobytes() + attention[:length].numpy().tobytes() + b"|")


def new_digest() -> Any:
    """An empty hash for `fingerprint`."""
    return hashlib.sha256()
