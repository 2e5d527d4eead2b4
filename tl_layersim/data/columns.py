"""Columns of a mapping or a data set: what they hold, and the column of texts or tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..core.wording import brief
from .inputs import TOKEN_IDS
from .labels import LABELS
from .model_properties import ModelInputs
from .tensors import is_missing

TOKENS = ("input_ids", "tokens")
# Lists in lists beyond this depth contain themselves.
DEEPEST = 16
# Further outputs of tokenizers.
OF_TOKENS = ("token_type_ids", "position_ids")
ATTACH = "with lsim.attach(model, analyzers) as probe: "


def is_image(value: Any) -> bool:
    """Whether a value is an image, or a list of images: of PIL, or arrays of bytes."""
    if isinstance(value, list):
        return bool(value) and all(is_image(x) and not isinstance(x, list) for x in value)
    if isinstance(value, np.ndarray | Tensor):
        return value.dtype in (np.uint8, torch.uint8) and value.ndim in (2, 3)
    return any(cls.__module__.split(".")[0] == "PIL" for cls in type(value).__mro__)


def is_images(value: Any) -> bool:
    """Whether a value is one array of several images: whole numbers whose first axis is the rows."""
    return isinstance(value, np.ndarray | Tensor) and value.ndim == 4 and "int" in str(value.dtype)


def is_floats(value: Any) -> bool:
    """Whether a value is a table of floating-point numbers."""
    value = innermost(value)
    return isinstance(value, float) or (isinstance(value, Tensor | np.ndarray) and "float" in str(value.dtype))


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
        raise LayersimError(f"`data` has no text in row {number}. Leave such rows out: data.filter(...), table.dropna().")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise LayersimError(
            f"`data` has a lone surrogate in row {number}, which no tokenizer reads: "
            f"{text[max(0, error.start - 20) : error.end + 20]!r}. Use text.encode('utf-8', 'replace').decode()."
        ) from error
    return text


def as_plain(value: Any) -> Any:
    """A sequence (a tuple, an array of texts, a column of a table) as a list; any other value unchanged."""
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OUT":
        return value
    if isinstance(value, np.ndarray) or type(value).__name__ == "Series":
        return value.tolist()
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes | list) else value


def innermost(value: Any) -> Any:
    """The first item of lists in lists that is not None; any other value unchanged."""
    for _ in range(DEEPEST):
        value = as_plain(value)
        if not isinstance(value, list):
            break
        value = next((item for item in value if item is not None), None)
    return value


def find_column(data: Mapping[str, Any]) -> str | None:
    """The column of texts or tokens, None where several may be meant."""
    known = [name for name in (*TOKENS, "text") if name in data]
    texts = [name for name in data if is_text(data[name])]
    empty = [name for name in data if is_missing(data[name]) and name not in LABELS]
    candidates = known or texts or empty
    return candidates[0] if known or len(candidates) == 1 else None


def unclear_columns(data: Mapping[str, Any], column: Any, model: ModelInputs) -> LayersimError:
    """The error for a mapping whose column of tokens, of texts or of the model's main input is not clear."""
    splits = [name for name in data if hasattr(data[name], "column_names")]
    named = [name for name in data if isinstance(name, str) and name not in LABELS]
    likely = [name for name in named if is_text(data[name]) or _is_ids(data[name])]
    if model.main_input != TOKEN_IDS and model.token_input == TOKEN_IDS:
        likely = [name for name in data if name not in LABELS and is_floats(data[name])] or likely
    do = f" Name it: column={likely[0]!r}." if likely else ""
    do = f" Pass one split: data[{splits[0]!r}]." if splits else do
    other = "" if model.main_input == TOKEN_IDS else f" or of `{model.main_input}`"
    return LayersimError(
        f"`data` has no unambiguous column of texts or token ids{other} among {brief(list(data))}"
        + (f", and `column` is {column!r}" if column else "")
        + f".{do}"
    )


def _is_ids(value: Any) -> bool:
    """Whether a value is rows of whole numbers, or one row."""
    value = innermost(value)
    return isinstance(value, int) or (isinstance(value, Tensor | np.ndarray) and "int" in str(value.dtype))
