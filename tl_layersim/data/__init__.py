"""Rows, batches and labels from whatever a user passes as data."""

from .batches import Batch

__all__ = [
    "Batch",
]
