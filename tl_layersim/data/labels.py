"""Labels as a user passes them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import LayersimError, LayersimWarning
from ..core.provenance import Provenance

if TYPE_CHECKING:
    pass


def label_source(labels: str | Tensor) -> str:
    """Where they come from, as `Analyzer.label_source` says it."""
    return "rows" if isinstance(labels, Tensor) else "data" if labels == "data" else ""


def label_key(labels: str | Tensor) -> str:
    """A name for what `targets` gives, equal for equal labels."""
    return labels if isinstance(labels, str) else f"tensor {id(labels)}"


def as_labels(labels: Any) -> str | Tensor:
    """Labels as a user hands them over, as one of two words or a tensor.

    Raises:
        LayersimError: they are neither, or no table of whole numbers.
    """
    if isinstance(labels, str):
        if labels not in ("next_token", "data"):
            raise LayersimError(
                "This is no place to take labels from.",
                given=f"labels={labels!r}",
                expected="'next_token', 'data' (the data's column `labels` or `label`), or the labels themselves",
                do="rename the column to `label` and pass labels='data'",
            )
        return labels
    try:
        table: Tensor = labels if isinstance(labels, Tensor) else torch.as_tensor(np.array(labels))
    except (TypeError, ValueError, RuntimeError):
        table = torch.zeros(0, 0, 0)
    if table.dim() not in (1, 2) or table.is_floating_point() or table.dtype == torch.bool:
        raise LayersimError(
            "Labels are whole numbers, one for each row of the data or for each of its positions.",
            given=f"{type(labels).__name__}: {table.dtype} of shape {tuple(table.shape)}",
            expected=f"int64 of shape (row,) or (row, pos), {NO_LABEL} where there is none",
            do="labels=torch.tensor(labels), of classes as whole numbers; labels.squeeze(1) for a single column",
        )
    return table


def warn_of_unused(labels: str | Tensor, run: Provenance) -> None:
    """Say where a table of labels is longer than the data: one row too many at its start would shift them all."""
    if isinstance(labels, Tensor) and run.options.get("max_tokens") is None and len(labels) > run.sequences:
        warnings.warn(
            f"labels has {len(labels)} rows, and {run.sequences} rows of data were read (those without tokens are not). Row i "
            "of the labels is taken for row i of the data.",
            LayersimWarning,
            stacklevel=3,
        )


NO_LABEL = -100  # as in torch's cross-entropy and in Hugging Face data
