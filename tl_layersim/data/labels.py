"""Conversion of user-supplied labels and numbers to tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from ..core.errors import LayersimError, warn
from ..core.wording import brief

if TYPE_CHECKING:
    from ..core.result_declarations import Provenance

LabelSource: TypeAlias = Literal["none", "next_token", "data", "rows"]
NO_LABEL = -100  # as in torch's cross-entropy and in Hugging Face data
LABELS = ("labels", "label")


def number_tensor(values: Any, name: str = "data", allowed: str = "numbers, in rows of equal shape") -> Tensor:
    """Convert numbers or bools to a tensor on the CPU.

    Args:
        values: a tensor, an array, a number, or lists of these, all of one shape.
        name: the argument or the column that holds the values, for the message.
        allowed: description of allowed values, for the message.

    Raises:
        LayersimError: the values are no numbers, or have different shapes.

    Examples:
        >>> number_tensor([[3, 4], torch.tensor([5, 6])])
        tensor([[3, 4],
                [5, 6]])
    """
    try:
        return _as_tensor(values).detach().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise LayersimError(f"`{name}` is {brief(values)}; it must hold {allowed}.") from error


def _as_tensor(values: Any) -> Tensor:
    if not isinstance(values, list | tuple):
        return torch.as_tensor(values)
    first = values[0] if values else None
    if isinstance(first, list | tuple | Tensor | np.ndarray):
        # Floats of nested lists become float32, torch's default, and arrays keep their type.
        return torch.stack([_as_tensor(value) for value in values])
    return torch.tensor(list(values))


def is_missing(value: Any) -> bool:
    """Whether a value is None, NaN, or pandas' NA or NaT."""
    # NaN alone differs from itself.
    is_nan = isinstance(value, float) and value != value
    return value is None or is_nan or type(value).__name__ in ("NAType", "NaTType")


def is_none(labels: Any) -> bool:
    """Whether labels are "none", for measures without a target."""
    return isinstance(labels, str) and labels == "none"


def label_source(labels: str | Tensor) -> LabelSource:
    """Source of labels that `as_labels` returned: "rows" for a tensor, else the word itself."""
    return "rows" if isinstance(labels, Tensor) else cast(LabelSource, labels)


def label_key(labels: str | Tensor) -> str:
    """A dict key for labels: the string, or the identity of the tensor."""
    return labels if isinstance(labels, str) else f"tensor {id(labels)}"


def as_labels(labels: Any, optional: bool = False) -> str | Tensor:
    """Check the argument `labels`: "next_token", "data", a tensor, or "none" if labels are optional.

    Args:
        labels: the argument as the user passed it.
        optional: whether "none" stands for measures that need no target.

    Raises:
        LayersimError: the labels are another word, or not a table of integers.
    """
    if isinstance(labels, str):
        words = ["next_token", "data"]
        if optional:
            words.append("none")
        if labels not in words:
            raise LayersimError(
                f"`labels` is {labels!r}; it must be {', '.join(map(repr, words))}, or a tensor or list of labels."
            )
        return labels
    values = labels if isinstance(labels, Tensor | list | tuple) else np.array(labels)
    table = number_tensor(values, "labels", "integers, in rows of equal shape")
    if table.dim() not in (1, 2) or table.is_floating_point() or table.dtype == torch.bool:
        raise LayersimError(
            f"`labels` is {table.dtype} of shape {tuple(table.shape)}; it must be integers, one for each row or each position, "
            f"and {NO_LABEL} for a missing label."
        )
    # The tensor itself: it stays on its device, and analyzers with the same labels share their targets.
    return labels if isinstance(labels, Tensor) else table


def warn_of_unused(labels: str | Tensor, run: Provenance, argument: str = "labels") -> None:
    """Warn if a table of labels has more rows than the data. An extra first row would shift all labels.

    Args:
        labels: the table, or a word.
        run: provenance of the run.
        argument: the caller's argument, for the message.
    """
    if isinstance(labels, Tensor) and run.options.get("max_tokens") is None and len(labels) > run.sequences:
        warn(
            f"`{argument}` has {len(labels)} rows, but {run.sequences} non-empty rows of data were read. Row i of "
            f"`{argument}` belongs to row i of the data, in which empty rows count too."
        )


def labels_in(data: Mapping[str, Any]) -> Any:
    """The column of labels in a batch or an example; None without such a column. A label of None becomes `NO_LABEL`."""
    name = next((name for name in LABELS if name in data), None)
    if name is None:
        return None
    return NO_LABEL if data[name] is None else data[name]


def whole_numbers(labels: Any) -> Tensor:
    """Convert labels to int64, with `NO_LABEL` for missing labels."""
    if isinstance(labels, list | tuple):
        labels = [NO_LABEL if is_missing(label) else label for label in labels]
    elif is_missing(labels):
        labels = NO_LABEL
    numbers = number_tensor(labels, "labels", "integers, in rows of equal shape")
    if numbers.is_floating_point() or numbers.dtype == torch.bool:
        raise LayersimError(
            f"`labels` in the data is {brief(labels)}; it must be integers, one for each row or each token. Scores for a "
            "regression head go to `TaskMetrics(labels=scores)`."
        )
    return numbers.long()
