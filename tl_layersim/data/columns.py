"""Columns of a mapping or a data set: where its texts or tokens are, and which inputs of the model stand beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import LayersimError
from .model_inputs import ModelInputs

LABELS = ("labels", "label")
TOKENS = ("input_ids", "tokens")
# What a tokenizer writes beside input_ids.
OF_TOKENS = ("token_type_ids", "position_ids")
ATTACH = "with lsim.attach(model, analyzers) as probe: "


def refuse_dropped(data: Mapping[str, Any], model: ModelInputs) -> None:
    """Refuse a column that the model's forward takes and that would not reach it, unless it says what leaving it out does.

    Args:
        data: the columns that are not read here.
        model: what would be given the data.
    """
    for name, same in model.inputs.items():
        value = data.get(name)
        if value is None or (same is not None and _all_equal(value, same)):
            continue
        raise LayersimError(
            f"`{name}` in the data is an input of {model.name} that would not reach it.",
            given=f"data with {', '.join(f'`{key}`' for key in data)}",
            expected="token ids or texts, an attention_mask and labels: nothing else is passed on"
            + ("" if same is None else f"; or `{name}` of {same} alone, which is what the model takes where it is left out"),
            do=f"{ATTACH}model(**inputs), which passes every input; aligned_loss(model, tokens, inputs=...) or AlignedTrainer "
            f"to train; or data without `{name}`, if the model is to run without it",
        )


def is_text(value: Any) -> bool:
    """A text, or texts among which some may be missing."""
    if not isinstance(value, list):
        return isinstance(value, str)
    return any(isinstance(x, str) for x in value) and all(isinstance(x, str) or is_missing(x) for x in value)


def is_missing(value: Any) -> bool:
    """None, NaN, or what pandas has for them."""
    return value is None or (isinstance(value, float) and value != value) or type(value).__name__ in ("NAType", "NaTType")


def as_plain(value: Any) -> Any:
    """Texts and lists of any kind (a tuple, an array of texts, a column of a table) as a list; all else as it is."""
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OUT":
        return value
    if isinstance(value, np.ndarray) or type(value).__name__ == "Series":
        return value.tolist()
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes | list) else value


def find_column(data: Mapping[str, Any]) -> str | None:
    """Where the texts or tokens are, as far as that is clear."""
    known = [name for name in (*TOKENS, "text") if name in data]
    texts = [name for name in data if is_text(data[name])]
    empty = [name for name in data if is_missing(data[name]) and name not in LABELS]
    found = known or texts or empty
    return found[0] if known or len(found) == 1 else None


def unclear_columns(data: Mapping[str, Any], column: str | None) -> LayersimError:
    """The refusal of a mapping whose tokens or texts are not found."""
    splits = [name for name in data if hasattr(data[name], "column_names")]
    likely = [name for name in data if name not in LABELS and (is_text(data[name]) or _is_ids(data[name]))]
    do = f"name it: column={likely[0]!r}" if likely else "data with a column of texts, or of token ids as `input_ids`"
    return LayersimError(
        "It is not clear where the texts or tokens are.",
        given=f"fields {list(data)}" + (f" and column={column!r}" if column else ""),
        expected="input_ids, tokens or text, or one single text column",
        do=f"name it: data[{splits[0]!r}]" if splits else do,
    )


def _is_ids(value: Any) -> bool:
    """Rows of whole numbers, or one row."""
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, int) or (isinstance(value, Tensor | np.ndarray) and "int" in str(value.dtype))


def is_chat(value: Any) -> bool:
    """Messages of a chat: mappings with role and content, in lists."""
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, Mapping) and {"role", "content"} <= set(value)


def chat_refusal(where: str, given: str) -> LayersimError:
    """The refusal of messages, with the call that makes texts of them."""
    return LayersimError(
        "`data` holds chat messages, which become texts by the model's own chat template.",
        given=given,
        expected="texts",
        do=f"[tokenizer.apply_chat_template(chat, tokenize=False) for chat in {where}]; a BOS in them is not doubled",
    )


def _all_equal(value: Any, number: int) -> bool:
    """Whether a value, nested as it may be, is that number throughout."""
    try:
        return bool((torch.as_tensor(value) == number).all())
    except (TypeError, ValueError, RuntimeError):
        # Rows of different lengths.
        return isinstance(value, list) and all(_all_equal(row, number) for row in value)
