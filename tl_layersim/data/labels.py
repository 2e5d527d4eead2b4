"""Labels as a user passes them: the next token, the data's own column, or a tensor."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import LayersimError, LayersimWarning
from ..core.provenance import Provenance
from ..core.wording import brief
from .tensors import is_missing, number_tensor


def is_none(labels: Any) -> bool:
    """Whether labels are the word "none", for measures that need no target."""
    return isinstance(labels, str) and labels == "none"


def label_source(labels: str | Tensor) -> str:
    """The source of labels, as in `Analyzer.label_source`: "rows" for a tensor, "data" for the data's column, else ""."""
    return "rows" if isinstance(labels, Tensor) else "data" if labels == "data" else ""


def label_key(labels: str | Tensor) -> str:
    """A key for the targets of these labels, equal for equal labels."""
    return labels if isinstance(labels, str) else f"tensor {id(labels)}"


def as_labels(labels: Any, optional: bool = False) -> str | Tensor:
    """A user's labels as "next_token", "data" or a tensor; or as "none", where they are optional.

    Args:
        labels: as the user passed them.
        optional: whether "none" stands for measures that need no target.

    Raises:
        LayersimError: the labels are another word, or not a table of whole numbers.
    """
    if isinstance(labels, str):
        if labels not in ("next_token", "data", *(["none"] if optional else [])):
            raise LayersimError(
                "`labels` must be 'next_token', 'data' or the labels themselves.",
                given=f"labels={labels!r}",
                expected="'next_token', 'data' (the data's column `labels` or `label`), or the labels themselves"
                + ("; 'none' for no targets" if optional else ""),
                do="rename the column to `label` and pass labels='data'",
            )
        return labels
    try:
        table = number_tensor(labels if isinstance(labels, Tensor) else np.array(labels))
    except (TypeError, ValueError, RuntimeError) as error:
        raise LayersimError(
            "`labels` must be whole numbers, one for each row or for each position, and these are no numbers.",
            given=brief(labels) if not isinstance(error, ValueError) else error,
            expected=f"int64 of shape (row,) or (row, pos), {NO_LABEL} where a label is missing",
            do="for names: names = sorted(set(labels)), then labels=[names.index(name) for name in labels]",
        ) from error
    if table.dim() not in (1, 2) or table.is_floating_point() or table.dtype == torch.bool:
        raise LayersimError(
            "`labels` must be whole numbers, one for each row of the data or for each of its positions.",
            given=f"{type(labels).__name__}: {table.dtype} of shape {tuple(table.shape)}",
            expected=f"int64 of shape (row,) or (row, pos), {NO_LABEL} where a label is missing",
            do="labels=torch.tensor(labels), of classes as whole numbers; labels.squeeze(1) for a single column",
        )
    # The tensor itself: it stays on its device, and analyzers with the same labels share their targets.
    return labels if isinstance(labels, Tensor) else table


def warn_of_unused(labels: str | Tensor, run: Provenance) -> None:
    """Warn if a table of labels has more rows than the data: one row too many at its start would shift all labels."""
    if isinstance(labels, Tensor) and run.options.get("max_tokens") is None and len(labels) > run.sequences:
        warnings.warn(
            f"labels has {len(labels)} rows, and {run.sequences} rows of data were read (those without tokens are not). Row i "
            "of the labels belongs to row i of the data.",
            LayersimWarning,
            stacklevel=3,
        )


def labels_in(data: Mapping[str, Any]) -> Any:
    """The column of labels, or None without such a column; an example's own None is a missing label."""
    return next((NO_LABEL if data[name] is None else data[name] for name in LABELS if name in data), None)


def whole_numbers(labels: Any) -> Tensor:
    """Labels as int64, `NO_LABEL` for missing ones."""
    if isinstance(labels, list | tuple):
        labels = [NO_LABEL if is_missing(x) else x for x in labels]
    elif labels is None:
        labels = NO_LABEL
    try:
        numbers = number_tensor(labels)
    except ValueError:
        numbers = None
    if numbers is None or numbers.is_floating_point() or numbers.dtype == torch.bool:
        raise LayersimError(
            "`labels` in the data must be integers.",
            given=brief(labels),
            expected="whole numbers in the column `labels` or `label`, one for each row or each token",
            do="classes: map them to whole numbers first, or hand them over as labels=tensor; scores of a regression head: "
            "lsim.TaskMetrics(labels=scores), with the column as a tensor of floats",
        )
    return numbers.long()


NO_LABEL = -100  # as in torch's cross-entropy and in Hugging Face data
LABELS = ("labels", "label")
