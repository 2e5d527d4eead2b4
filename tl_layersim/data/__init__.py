"""Data of any accepted kind as rows of tokens, batches and labels."""

from .batches import Batch

__all__ = [
    "Batch",
]
