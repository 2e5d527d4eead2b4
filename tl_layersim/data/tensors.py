"""Tensors of the numbers that users pass as tokens, masks, labels and further inputs, and missing values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.wording import brief, first_line


def number_tensor(values: Any) -> Tensor:
    """A dense tensor on the CPU of real numbers or truth values.

    Args:
        values: a tensor, an array, a number, or lists of these, all of one shape.

    Raises:
        ValueError: the values are no such tensor; the message says why.

    Examples:
        >>> number_tensor([[3, 4], torch.tensor([5, 6])])
        tensor([[3, 4],
                [5, 6]])
    """
    try:
        table = _joined(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{brief(values)}: {first_line(error)}") from error
    kinds = {
        "nested": table.is_nested,
        f"{table.layout}": table.layout != torch.strided,
        "meta": table.is_meta,
        "quantised": table.is_quantized,
        "complex": table.is_complex(),
    }
    if kind := next((kind for kind, found in kinds.items() if found), ""):
        raise ValueError(f"values of {table.dtype} in a {kind} {type(values).__name__}")
    return table.detach().cpu()


def _joined(values: Any) -> Tensor:
    if not isinstance(values, list | tuple):
        return torch.as_tensor(values)
    first = values[0] if values else None
    if isinstance(first, list | tuple | Tensor | np.ndarray):
        # Floats of nested lists become float32, torch's default, and arrays keep their type.
        return torch.stack([_joined(value) for value in values])
    return torch.tensor(list(values))


def is_missing(value: Any) -> bool:
    """Whether a value is None, NaN, or pandas' NA or NaT."""
    return value is None or (isinstance(value, float) and value != value) or type(value).__name__ in ("NAType", "NaTType")
