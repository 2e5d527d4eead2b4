"""Texts as rows of tokens: tokenisation, and cutting of single or joined texts into rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.errors import LayersimError
from .data import Data, Notes
from .inputs import ROW_AXES, readable
from .rows import ModelInputs, Row

SEGMENTS = "token_type_ids"


@dataclass(frozen=True)
class Text:
    """A text in the data, or a pair of texts.

    Attributes:
        text: the text; None if the row has none.
        label: class of the text, None if the data has no labels.
        second: the second text of a pair; None for a single text.
        inputs: further inputs of the row by name, without an axis of rows.
    """

    text: str | None
    label: int | None
    second: str | None = None
    inputs: Mapping[str, Tensor] = field(default_factory=dict)


class Encoded(NamedTuple):
    """Token ids of a text without BOS, or of a chat with the special tokens of its template.

    Attributes:
        ids: the token ids.
        label: class of the text; None if it has none.
        number: index of the text in the data.
        own: whether the text itself begins with a special token, so that no BOS is added.
        segments: the segment id of each token; None if the model takes none or all are 0.
        inputs: see `Text`.
        chat: whether it is a chat.
        marks: see `EncodedChat`.
        cut: whether the text was too long and was cut to one row.
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
    """Whether the tokenizer itself adds special tokens: with [CLS], without a BOS, or with BOS and EOS like CLIP."""
    if tokenizer.bos_token_id is None or tokenizer.cls_token_id is not None:
        return True
    count = getattr(tokenizer, "num_special_tokens_to_add", None)
    return count is not None and bool(count() >= 2)


def tokenizer_of(model: ModelInputs) -> Any:
    """The tokenizer of a model.

    Raises:
        LayersimError: the model has no tokenizer.
    """
    if model.tokenizer is None and model.main_input in ROW_AXES:
        raise LayersimError(f"`data` holds texts, but {model.name} takes `{model.main_input}`.")
    if model.tokenizer is None:
        raise LayersimError(f"{model.name} has no tokenizer, so texts cannot be read. Pass `Data(..., tokenizer=...)`.")
    return model.tokenizer


def encode(items: Sequence[tuple[int, Text]], model: ModelInputs, longest: int | None = None) -> list[Encoded]:
    """Encode texts, or pairs of texts, as token ids.

    Args:
        items: texts, each with its index in the data.
        model: the model whose tokenizer is used.
        longest: number of tokens to which the tokenizer cuts each text; None to cut none.

    Raises:
        LayersimError: the model has no tokenizer, the tokenizer does not join pairs, or a text is missing or unreadable.
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
    """The segment ids of one text; None if all are 0, the default."""
    row = None if segments is None else list(segments[place])
    return row if row is not None and any(row) else None


def _undoubled(text: Encoded, tokenizer: Any) -> Encoded:
    """Remove special tokens that the tokenizer added although the text had them already."""
    if not adds_specials(tokenizer):
        return text
    ids = text.ids
    first = {tokenizer.cls_token_id, tokenizer.bos_token_id}
    last = {tokenizer.sep_token_id, tokenizer.eos_token_id}
    own = len(ids) > 1 and ids[0] == ids[1] and ids[0] in first
    ended = len(ids) - own > 1 and ids[-1] == ids[-2] and ids[-1] in last
    span = slice(int(own), len(ids) - ended)
    return text._replace(ids=ids[span], own=own, segments=None if text.segments is None else text.segments[span])


DEFAULT_SEQ_LEN = 256


@dataclass(frozen=True)
class TextRows:
    """Cuts encoded texts into rows.

    Args:
        model: the model whose tokenizer and context are used.
        data: the data with its reading options.
        notes: counts of the pass, updated here: rows with a BOS in their text, and texts that were cut.
    """

    model: ModelInputs
    data: Data
    notes: Notes

    @property
    def length(self) -> int:
        """Largest number of tokens in a row."""
        return self.data.seq_len or min(DEFAULT_SEQ_LEN, self.model.context or DEFAULT_SEQ_LEN)

    @property
    def bos(self) -> list[int]:
        """The BOS that starts each row; [] if none is added."""
        bos = self.model.tokenizer.bos_token_id
        return [bos] if self.data.prepend_bos and bos is not None and not adds_specials(self.model.tokenizer) else []

    def encoded(self, items: Sequence[tuple[int, Text]]) -> list[Encoded]:
        """Tokenise texts, given with their index in the data. For a row classifier, each text is cut to one row."""
        texts = encode(items, self.model)
        if not self.model.reads_rows:
            return texts
        return [self._one_row(text, item) for text, item in zip(texts, items, strict=True)]

    def _one_row(self, text: Encoded, item: tuple[int, Text]) -> Encoded:
        """The text, cut by the tokenizer to one row with special tokens if it is longer."""
        tokenizer = self.model.tokenizer
        # A tokenizer that cuts the beginning cuts the text's own BOS too.
        own = text.ids[:1] == self.bos and tokenizer.truncation_side == "right"
        room = self.length - (0 if own else len(self.bos))
        if len(text.ids) <= room:
            return text
        specials = tokenizer.num_special_tokens_to_add(item[1].second is not None) if adds_specials(tokenizer) else 0
        if room <= specials:
            raise LayersimError(
                f"`seq_len` is {self.length}, which leaves no room for a text beside the tokenizer's {specials} special tokens."
            )
        # A first special token that the text brings along is doubled before `encode` takes one away.
        [cut] = encode([item], self.model, room + text.own)
        return cut._replace(cut=True)

    def warn_of_cut(self) -> None:
        """Warn that texts were cut to one row."""
        if self.notes.cut:
            self.notes.once(
                f"{self.notes.cut} of {self.notes.texts} texts are longer than seq_len={self.length} tokens. The model's head "
                "makes one prediction per row, so each of them was cut to one row: pass a larger seq_len= to keep more"
                + (f", at most {self.model.context}." if self.model.context else ".")
            )

    def windows(self, text: Encoded) -> Iterator[Row]:
        """Split a text's tokens into rows; a long text continues in further rows, and no token is lost."""
        if text.chat and self.model.reads_rows and len(text.ids) > self.length:
            raise row_too_long(len(text.ids), self.length, self.model, "a chat")
        self.notes.texts += 1
        self.notes.cut += text.cut
        self.notes.own_bos += text.own
        # Rows of a chat whose template writes no BOS have none.
        adds = not text.chat or text.ids[:1] == self.bos
        start = 0
        while start < len(text.ids):
            row, taken = self.row(text.ids[start : start + self.length], text.ids[start] in self.bos, adds)
            labels = None if text.label is None else torch.full_like(row, text.label)
            inputs, positional = dict(text.inputs), frozenset[str]()
            if text.segments is not None:
                # Tokenizers that give segments add all special tokens themselves: no BOS comes before the ids.
                inputs[SEGMENTS] = torch.tensor(text.segments[start : start + taken])
                positional = frozenset([SEGMENTS])
            marks = None
            if text.marks is not None:
                marks = torch.tensor([False] * (len(row) - taken) + text.marks[start : start + taken])
            attention = torch.ones(len(row), dtype=torch.bool)
            yield Row(row, attention, labels, text.number, start, marks, None, inputs, positional)
            start += taken

    def row(self, ids: list[int], own: bool, adds: bool = True) -> tuple[Tensor, int]:
        """Build the next row of a text, with a BOS; return it and the number of ids that it takes from the text.

        Args:
            ids: the next ids of the text.
            own: whether the ids begin with a BOS, so that none is added.
            adds: whether a BOS is added at all.
        """
        self.notes.own_bos += own
        bos = [] if own or not adds else self.bos
        taken = ids[: self.length - len(bos)]
        return torch.tensor(bos + taken), len(taken)

    def packed(self, items: Iterable[Encoded | Row]) -> Iterator[Row]:
        """Join all texts with end-of-text tokens and cut them into full rows; the last row may be shorter.

        Raises:
            LayersimError: an item is not a text, or a text has further inputs.
        """
        held: list[int] = []
        # For each id, whether it separates texts: an end-of-text token may be the BOS too, and does not count as one here.
        separates: list[bool] = []

        def cut(least: int) -> Iterator[Row]:
            start = 0
            while start < len(held):
                own = held[start] in self.bos and not separates[start]
                if len(held) - start < least - (0 if own else len(self.bos)):
                    break
                row, taken = self.row(held[start : start + self.length], own)
                start += taken
                yield Row(row, torch.ones(len(row), dtype=torch.bool))
            del held[:start], separates[:start]

        for item in items:
            if isinstance(item, Row) or item.chat:
                raise LayersimError(
                    f"`pack` applies to texts only, and `data` has {'rows of tokens' if isinstance(item, Row) else 'chats'}."
                )
            end = self.model.tokenizer.eos_token_id
            ids = item.ids
            if item.inputs or item.segments is not None:
                raise LayersimError(
                    "`pack` is True, which joins texts, but each text has its own inputs: "
                    f"{', '.join(item.inputs) or SEGMENTS}."
                )
            if held and separates[-1] and ids[:1] == [held[-1]] and ids[0] in self.bos:
                # The separator is the BOS of this text.
                del held[-1], separates[-1]
            held += ids + ([end] if end is not None else [])
            separates += [False] * len(ids) + ([True] if end is not None else [])
            yield from cut(self.length)
        yield from cut(0)


def row_too_long(tokens: int, longest: int, model: ModelInputs, given: str) -> LayersimError:
    """The error for tokens that do not fit into one row of a row classifier.

    Args:
        tokens: number of tokens.
        longest: largest number of tokens in a row.
        model: the model.
        given: description of the tokens for the message, such as "a chat".
    """
    fits = model.context is None or tokens <= model.context
    remedy = f"seq_len={tokens}" if fits else f"tokenizer(texts, truncation=True, max_length={longest})"
    return LayersimError(
        f"`data` has {given} of {tokens} tokens, but `seq_len` is {longest}, and the head of {model.name} makes one prediction "
        f"per row, so the row is not split. Pass {remedy}, or texts."
    )
