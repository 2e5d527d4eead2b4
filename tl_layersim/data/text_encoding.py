"""Encoding of texts and pairs of texts by the model's tokenizer, and the special tokens that this package adds itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from ..core.errors import LayersimError
from .columns import readable
from .inputs import ROW_AXES
from .model_properties import ModelInputs

SEGMENTS = "token_type_ids"


@dataclass(frozen=True)
class Text:
    """A text of the data, or a pair of texts.

    Attributes:
        text: None where the row has no text.
        label: class of the text, None where the data has no labels.
        second: the second text of a pair, None for a single text.
        inputs: further inputs of the row, by name, without a row axis.
    """

    text: str | None
    label: int | None
    second: str | None = None
    inputs: Mapping[str, Tensor] = field(default_factory=dict)


class Encoded(NamedTuple):
    """Tokens of a text without BOS, or of a chat with the special tokens of its template.

    Attributes:
        ids: the tokens.
        label: class of the text, None without one.
        number: of the text in the data.
        own: whether the text began with a special token of its own, in place of the BOS.
        segments: the segment of each token, None where the model takes none or all are 0.
        inputs: see `Text`.
        chat: whether it is a chat.
        marks: as in `EncodedChat`.
        cut: whether the text is longer, and was cut to one row.
    """

    ids: list[int]
    label: int | None
    number: int
    own: bool = False
    segments: list[int] | None = None
    inputs: Mapping[str, Tensor] = MappingProxyType({})
    chat: bool = False
    marks: list[bool] | None = None
    cut: bool = False


def adds_specials(tokenizer: Any) -> bool:
    """Whether the tokenizer adds its special tokens itself: those with [CLS], without a BOS, or with BOS and EOS as CLIP's."""
    if tokenizer.bos_token_id is None or tokenizer.cls_token_id is not None:
        return True
    count = getattr(tokenizer, "num_special_tokens_to_add", None)
    return count is not None and bool(count() >= 2)


def tokenizer_of(model: ModelInputs) -> Any:
    """The tokenizer of a model.

    Args:
        model: that the texts are for.

    Raises:
        LayersimError: it has none.
    """
    if model.tokenizer is None and model.main_input in ROW_AXES:
        raise LayersimError(f"`data` holds texts, and {model.name} takes `{model.main_input}`.")
    if model.tokenizer is None:
        raise LayersimError(f"{model.name} has no tokenizer, so texts cannot be read. Pass `Data(..., tokenizer=...)`.")
    return model.tokenizer


def encode(items: Sequence[tuple[int, Text]], model: ModelInputs, longest: int | None = None) -> list[Encoded]:
    """Encode texts, or pairs of texts, as token ids.

    Args:
        items: texts, each with its number in the data.
        model: its tokenizer encodes.
        longest: most tokens of a text, to which the tokenizer cuts it; None to keep all.

    Raises:
        LayersimError: the model has no tokenizer, or one that does not join pairs; or a text is missing or unreadable.
    """
    pairs = [item.second is not None for _, item in items]
    if any(pairs) and not all(pairs):
        return [each for _, group in groupby(items, lambda i: i[1].second is not None) for each in encode(list(group), model)]
    if not items:
        return []
    texts = [readable(item.text, number) for number, item in items]
    tokenizer = tokenizer_of(model)
    specials = adds_specials(tokenizer)
    second = [readable(item.second, number) for number, item in items] if any(pairs) else None
    if second is not None and not specials:
        raise LayersimError(
            f"`column` names a pair of texts, and the tokenizer, a {type(tokenizer).__name__}, has no special tokens that "
            "separate the two."
        )
    # This package adds BOS, once per row, so that every source reads the same tokens: TransformerLens changes the
    # tokenizers that it loads, so that they add their own.
    options: dict[str, Any] = {"add_special_tokens": specials, "verbose": False}
    if longest is not None:
        options |= {"truncation": True, "max_length": longest}
    found = tokenizer(texts, second, **options) if second is not None else tokenizer(texts, **options)
    segments = found.get(SEGMENTS) if SEGMENTS in model.inputs else None
    return [
        _undoubled(Encoded(ids, item.label, number, False, _segments(segments, place), item.inputs), tokenizer)
        for place, (ids, (number, item)) in enumerate(zip(found["input_ids"], items, strict=True))
    ]


def _segments(segments: Any, place: int) -> list[int] | None:
    """The segments of one text; None where all are 0, the segment of a text that is given alone."""
    row = None if segments is None else list(segments[place])
    return row if row is not None and any(row) else None


def _undoubled(text: Encoded, tokenizer: Any) -> Encoded:
    """The text without special tokens that the tokenizer doubled at its ends."""
    if not adds_specials(tokenizer):
        return text
    ids = text.ids
    first = {tokenizer.cls_token_id, tokenizer.bos_token_id}
    last = {tokenizer.sep_token_id, tokenizer.eos_token_id}
    own = len(ids) > 1 and ids[0] == ids[1] and ids[0] in first
    ended = len(ids) - own > 1 and ids[-1] == ids[-2] and ids[-1] in last
    span = slice(int(own), len(ids) - ended)
    return text._replace(ids=ids[span], own=own, segments=None if text.segments is None else text.segments[span])
