"""What a value in the data is, judged by the value alone: an image, texts, token ids, floats, one row or many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from .labels import is_missing

# First axis of values: rows of a batch, an axis of a single row, or either, which the number of axes then decides.
Level = Literal["batch", "row", "either"]


def is_image(value: Any) -> bool:
    """Whether a value is an image or a list of images: PIL images or uint8 arrays."""
    if isinstance(value, list):
        return bool(value) and all(is_image(item) and not isinstance(item, list) for item in value)
    if isinstance(value, np.ndarray | Tensor):
        return value.dtype in (np.uint8, torch.uint8) and value.ndim in (2, 3)
    return any(cls.__module__.split(".")[0] == "PIL" for cls in type(value).__mro__)


def is_images(value: Any) -> bool:
    """Whether a value is a batch of images: an integer array with four axes."""
    return isinstance(value, np.ndarray | Tensor) and value.ndim == 4 and "int" in str(value.dtype)


def is_floats(value: Any) -> bool:
    """Whether a value holds floating-point numbers."""
    value = innermost(value)
    return isinstance(value, float) or (isinstance(value, Tensor | np.ndarray) and "float" in str(value.dtype))


def is_text(value: Any) -> bool:
    """Whether a value is a text or a list of texts; some may be missing."""
    if not isinstance(value, list):
        return isinstance(value, str)
    return any(isinstance(item, str) for item in value) and all(isinstance(item, str) or is_missing(item) for item in value)


def is_row_of_ids(data: Any) -> bool:
    """Whether data is a list of ints, a single row of token ids."""
    return isinstance(data, list) and bool(data) and all(isinstance(x, int) and not isinstance(x, bool) for x in data)


def as_plain(value: Any) -> Any:
    """Convert a tuple, an array of texts or a table column to a list; other values are unchanged."""
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OUT":
        return value
    if isinstance(value, np.ndarray) or type(value).__name__ == "Series":
        return value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | list):
        return list(value)
    return value


def innermost(value: Any) -> Any:
    """Descend into nested lists to the first item that is not None; return other values unchanged."""
    value = as_plain(value)
    while isinstance(value, list):
        first = next((item for item in value if item is not None), None)
        value = as_plain(first)
    return value


def level_of_items(data: Any) -> Level:
    """Kind of the items of an iterable: "row" for a data set, "batch" for a DataLoader, else "either"."""
    if hasattr(data, "column_names") and hasattr(data, "features"):
        return "row"
    return "either" if getattr(data, "batch_sampler", None) is None else "batch"
