"""Columns of a mapping or a data set: the column of texts or tokens, and columns that are further inputs of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import LayersimError
from .model_properties import ModelInputs

LABELS = ("labels", "label")
TOKENS = ("input_ids", "tokens")
# Further outputs of tokenizers.
OF_TOKENS = ("token_type_ids", "position_ids")
ATTACH = "with lsim.attach(model, analyzers) as probe: "


def refuse_dropped(data: Mapping[str, Any], model: ModelInputs) -> None:
    """Refuse a column that the model's forward accepts and that is not passed on, unless it holds the model's default.

    Args:
        data: the columns that are not read.
        model: the model that the data is for.

    Raises:
        LayersimError: names the column.
    """
    for name, default in model.inputs.items():
        value = data.get(name)
        if value is None or (default is not None and _all_equal(value, default)):
            continue
        raise LayersimError(
            f"`{name}` in the data is an input of {model.name} that tl_layersim does not pass on.",
            given=f"data with {', '.join(f'`{key}`' for key in data)}",
            expected="token ids or texts, an attention_mask and labels: nothing else is passed on"
            + ("" if default is None else f"; or `{name}` of {default} only, the value that the model uses without it"),
            do=f"{ATTACH}model(**inputs), which passes every input; aligned_loss(model, tokens, inputs=...) or AlignedTrainer "
            f"to train; or data without `{name}`, if the model is to run without it",
        )


def is_text(value: Any) -> bool:
    """Whether a value is a text, or a list of texts of which some may be missing."""
    if not isinstance(value, list):
        return isinstance(value, str)
    return any(isinstance(x, str) for x in value) and all(isinstance(x, str) or is_missing(x) for x in value)


def readable(text: str | None, number: int) -> str:
    """Return the text of a row; refuse a missing text, or one that cannot be written as UTF-8.

    Raises:
        LayersimError: the text is missing, or cannot be written as UTF-8.
    """
    if text is None:
        raise LayersimError(
            f"`data` has no text in row {number}.",
            given="None, or a missing value",
            expected="a text in each row",
            do="leave such rows out: data.filter(...), table.dropna(), or [text for text in texts if text is not None]",
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise LayersimError(
            f"`data` has a lone surrogate in row {number}, which no tokenizer reads.",
            given=f"{text[max(0, error.start - 20) : error.end + 20]!r}",
            expected="text that can be written as UTF-8",
            do="text.encode('utf-8', 'replace').decode(), or read the file again with its own encoding",
        ) from error
    return text


def is_missing(value: Any) -> bool:
    """Whether a value is None, NaN, or pandas' NA or NaT."""
    return value is None or (isinstance(value, float) and value != value) or type(value).__name__ in ("NAType", "NaTType")


def as_plain(value: Any) -> Any:
    """A sequence (a tuple, an array of texts, a column of a table) as a list; any other value unchanged."""
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OUT":
        return value
    if isinstance(value, np.ndarray) or type(value).__name__ == "Series":
        return value.tolist()
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes | list) else value


def find_column(data: Mapping[str, Any]) -> str | None:
    """The column of texts or tokens, None where several may be meant."""
    known = [name for name in (*TOKENS, "text") if name in data]
    texts = [name for name in data if is_text(data[name])]
    empty = [name for name in data if is_missing(data[name]) and name not in LABELS]
    candidates = known or texts or empty
    return candidates[0] if known or len(candidates) == 1 else None


def unclear_columns(data: Mapping[str, Any], column: str | None) -> LayersimError:
    """The error for a mapping whose column of tokens or texts is not clear."""
    splits = [name for name in data if hasattr(data[name], "column_names")]
    likely = [name for name in data if name not in LABELS and (is_text(data[name]) or _is_ids(data[name]))]
    do = f"name it: column={likely[0]!r}" if likely else "data with a column of texts, or of token ids as `input_ids`"
    return LayersimError(
        "`data` has no unambiguous column of texts or token ids.",
        given=f"fields {list(data)}" + (f" and column={column!r}" if column else ""),
        expected="input_ids, tokens or text, or one single text column",
        do=f"name it: data[{splits[0]!r}]" if splits else do,
    )


def _is_ids(value: Any) -> bool:
    """Whether a value is rows of whole numbers, or one row."""
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, int) or (isinstance(value, Tensor | np.ndarray) and "int" in str(value.dtype))


def _all_equal(value: Any, number: int) -> bool:
    """Whether all numbers in a value, which may be nested, equal `number`."""
    try:
        return bool((torch.as_tensor(value) == number).all())
    except (TypeError, ValueError, RuntimeError):
        # Rows of different lengths.
        return isinstance(value, list) and all(_all_equal(row, number) for row in value)
