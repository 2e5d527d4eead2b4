"""Batches: rows of tokens from any accepted data, padded on the right, with masks and labels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.argument_checks import named
from ..core.errors import LayersimError
from .chat import Chat, ChatEncoder
from .columns import readable
from .labels import NO_LABEL
from .model_properties import ModelInputs
from .options import DataOptions
from .readers import Notes, Reader, Row, Text, refuse_path

TEXTS_AT_ONCE = 64
DEFAULT_SEQ_LEN = 256


@named
@dataclass(frozen=True)
class Batch:
    """Right-padded rows of tokens.

    Attributes:
        tokens: `batch pos`, int64.
        attention: `batch pos`, positions that the model attends to; False at padding.
        counted: `batch pos`, positions that analyzers measure: attended, and selected by `positions` and `skip_first`.
        first: number of the batch's first row, counted from the start of the data.
        labels: `batch pos`, the data's own labels, `NO_LABEL` at positions without a label; None if the data has no labels.
        origins: for each row, the row of the data that it came from (-1 for several) and its start position in that row.
        pooled: whether the counted positions of a row become one sample, the mean of their activations.
    """

    tokens: Tensor
    attention: Tensor
    counted: Tensor
    first: int
    labels: Tensor | None = None
    origins: tuple[tuple[int, int], ...] = ()
    pooled: bool = False

    @property
    def sources(self) -> tuple[Tensor, Tensor]:
        """Row and position in the data of each token, each `batch pos`; the row is -1 where a batch row joins several."""
        origins = self.origins or tuple((self.first + i, 0) for i in range(len(self.tokens)))
        row, start = torch.tensor(origins).unbind(1)
        return row[:, None].expand_as(self.tokens), start[:, None] + torch.arange(self.tokens.shape[1])

    @property
    def padded(self) -> bool:
        """Whether the batch has padding, so that the model needs a mask."""
        return not bool(self.attention.all())

    @property
    def next_tokens(self) -> Tensor:
        """The token after each position, `batch pos`; `NO_LABEL` where no attended token follows."""
        return next_tokens(self.tokens, self.attention)

    @property
    def first_row(self) -> Batch:
        """The first row as a batch, without padding."""
        return self.rows(0, 1)

    def rows(self, start: int, stop: int) -> Batch:
        """The rows from `start` to before `stop` as a batch, as wide as the longest of them."""
        width = int(self.attention[start:stop].any(0).nonzero()[-1]) + 1
        cut = (slice(start, stop), slice(0, width))
        labels = None if self.labels is None else self.labels[cut]
        origins = self.origins[start:stop]
        first = self.first + start
        return Batch(self.tokens[cut], self.attention[cut], self.counted[cut], first, labels, origins, self.pooled)


class Encoded(NamedTuple):
    """Tokens of a text without BOS, or of a chat with the special tokens of its template.

    Attributes:
        ids: the tokens.
        label: class of the text, None without one.
        number: of the text in the data.
        own: whether the text began with a special token of its own, in place of the BOS.
        chat: whether it is a chat.
        marks: as in `EncodedChat`.
    """

    ids: list[int]
    label: int | None
    number: int
    own: bool = False
    chat: bool = False
    marks: list[bool] | None = None


@dataclass(frozen=True)
class Batches:
    """Batches of any accepted data, in the same order each time they are iterated over.

    Args:
        data: see `tl_layersim.analyze`.
        model: the model whose tokenizer, vocabulary and context apply.
        options: how the data is read.
        labelled: whether an analyzer needs the data's own labels.
    """

    data: Any
    model: ModelInputs
    options: DataOptions = DataOptions()
    labelled: bool = False
    notes: Notes = field(default_factory=Notes, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.data, str | Path):
            refuse_path(self.data)
        if self.options.seq_len and self.model.context and self.options.seq_len > self.model.context:
            raise LayersimError(
                "`seq_len` is longer than the model's context.",
                given=f"seq_len={self.options.seq_len}",
                expected=f"at most {self.model.context}, the context of {self.model.name}",
                do=f"seq_len={self.model.context}",
            )

    @property
    def one_shot(self) -> bool:
        """Whether the data is an iterator, gone after one pass."""
        return isinstance(self.data, Iterator)

    def record(self) -> dict[str, Any]:
        """The options and the tokenizer, for a result's provenance."""
        tokenizer = self.model.tokenizer
        known = None if tokenizer is None else f"{type(tokenizer).__name__} of {len(tokenizer)} tokens"
        return self.options.record() | {"tokenizer": known}

    def row_counts(self) -> dict[str, int]:
        """Numbers of rows that the last pass over the data treated specially, for a result's provenance.

        `own_bos`: rows of text that began with a BOS of their own; `masked_by_pad_id`: rows of tokens whose mask was derived
        from padding ids.
        """
        return {"own_bos": self.notes.own_bos, "masked_by_pad_id": self.notes.masked}

    def __iter__(self) -> Iterator[Batch]:
        rows = self.rows()
        first = 0
        while chunk := list(itertools.islice(rows, self.options.batch_size)):
            yield self.batch(chunk, first)
            first += len(chunk)

    def rows(self) -> Iterator[Row]:
        """Rows without padding, up to `max_tokens`."""
        return self._limited(self._rows())

    def batch(self, rows: list[Row], first: int) -> Batch:
        """A batch of rows, padded on the right to the longest.

        Args:
            rows: at least one.
            first: number of the first of them.
        """
        length = max(len(row.tokens) for row in rows)
        tokens = torch.full((len(rows), length), _pad_id(self.model))
        attention, counted = torch.zeros((2, len(rows), length), dtype=torch.bool)
        for i, row in enumerate(rows):
            tokens[i, : len(row.tokens)] = row.tokens
            attention[i, : len(row.tokens)] = row.attention
            counted[i, : len(row.tokens)] = row.attention if row.counted is None else row.counted
        labels = None
        if any(row.labels is not None for row in rows):
            labels = torch.full((len(rows), length), NO_LABEL)
            for i, row in enumerate(rows):
                if row.labels is not None:
                    labels[i, : len(row.labels)] = row.labels
        origins = tuple((row.source, row.start) for row in rows)
        return Batch(tokens, attention, counted, first, labels, origins, self.options.selection.pooled)

    def _limited(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Rows with their counted positions, until `max_tokens` are counted; the last row is cut to meet that number."""
        left, selection = self.options.max_tokens, self.options.selection
        for row in rows:
            counted = selection.select(row.tokens, row.attention, row.marks)
            row = replace(row, counted=counted)
            if left is not None:
                if int(counted.sum()) >= left:
                    # Tokens after the last counted one do not run, unless the rule refers to the whole row.
                    end = int((counted.cumsum(0) < left).sum()) + 1
                    yield row[:end] if selection.rule == "all" else replace(row, counted=selection.cut(counted, left))
                    return
                left -= int(counted.sum())
            yield row

    def _rows(self) -> Iterator[Row]:
        """Rows of at most `seq_len` tokens, checked against the model."""
        self.notes.own_bos = self.notes.masked = 0
        pieces: Iterator[Row]
        if self.options.pack:
            pieces = self._packed()
        else:
            pieces = itertools.chain.from_iterable(
                self._split(item) if isinstance(item, Row) else self._windows(item) for item in self._encoded()
            )
        context = self.model.context
        for row in pieces:
            if context and len(row.tokens) > context:
                raise LayersimError(
                    "`data` has a row that is longer than the model's context.",
                    given=f"{len(row.tokens)} tokens",
                    expected=f"at most {context}",
                    do=f"seq_len={context}, which cuts longer rows into several",
                )
            self._check_ids(row.tokens)
            yield row

    def _check_ids(self, tokens: Tensor) -> None:
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or (self.model.vocabulary and high >= self.model.vocabulary):
            raise LayersimError(
                f"`data` has token ids outside the vocabulary of {self.model.name}.",
                given=f"ids from {low} to {high}",
                expected=f"0 to {(self.model.vocabulary or 0) - 1}",
                do="tokenise with the model's own tokenizer, or pass the texts themselves",
            )

    def _text_length(self) -> int:
        return self.options.seq_len or min(DEFAULT_SEQ_LEN, self.model.context or DEFAULT_SEQ_LEN)

    def _bos(self) -> list[int]:
        bos = self.model.tokenizer.bos_token_id
        return [bos] if self.options.prepend_bos and bos is not None and not self._own_specials() else []

    def _own_specials(self) -> bool:
        """Whether the tokenizer adds its special tokens itself, as tokenizers with [CLS] or without a BOS do."""
        return self.model.tokenizer.bos_token_id is None or self.model.tokenizer.cls_token_id is not None

    def _windows(self, text: Encoded) -> Iterator[Row]:
        """Rows of a text's tokens; a long text continues in further rows, without losing a token."""
        self.notes.own_bos += text.own
        # Rows of a chat whose template writes no BOS have none.
        adds = not text.chat or text.ids[:1] == self._bos()
        start = 0
        while start < len(text.ids):
            row, taken = self._row(text.ids[start : start + self._text_length()], text.ids[start] in self._bos(), adds)
            labels = None if text.label is None else torch.full_like(row, text.label)
            marks = None
            if text.marks is not None:
                marks = torch.tensor([False] * (len(row) - taken) + text.marks[start : start + taken])
            yield Row(row, torch.ones(len(row), dtype=torch.bool), labels, text.number, start, marks)
            start += taken

    def _row(self, ids: list[int], own: bool, adds: bool = True) -> tuple[Tensor, int]:
        """A row of at most the text length, with a BOS, and the number of ids that it takes from the text.

        Args:
            ids: the next ids of the text.
            own: whether they begin with a BOS, so that none is added.
            adds: whether a BOS is added at all.
        """
        self.notes.own_bos += own
        bos = [] if own or not adds else self._bos()
        taken = ids[: self._text_length() - len(bos)]
        return torch.tensor(bos + taken), len(taken)

    def _split(self, row: Row) -> Iterator[Row]:
        return (part for part in row.split(self.options.seq_len or len(row.tokens)) if part.attention.any())

    def _packed(self) -> Iterator[Row]:
        """Full rows cut from all texts, with an end-of-text token between texts, and a last shorter row."""
        held: list[int] = []
        # For each id, whether it separates texts: an end-of-text token may be the BOS too, and does not count as one here.
        separates: list[bool] = []

        def cut(least: int) -> Iterator[Row]:
            start = 0
            while start < len(held):
                own = held[start] in self._bos() and not separates[start]
                if len(held) - start < least - (0 if own else len(self._bos())):
                    break
                row, taken = self._row(held[start : start + self._text_length()], own)
                start += taken
                yield Row(row, torch.ones(len(row), dtype=torch.bool))
            del held[:start], separates[:start]

        for item in self._encoded():
            if isinstance(item, Row) or item.chat:
                raise LayersimError(
                    "`pack` applies to texts only.",
                    given=f"a row of {len(item.tokens)} tokens with pack=True"
                    if isinstance(item, Row)
                    else "a chat with pack=True",
                    expected="texts",
                    do="pack=False: each chat and each row of tokens is taken as it is",
                )
            end = self.model.tokenizer.eos_token_id
            ids = item.ids
            if held and separates[-1] and ids[:1] == [held[-1]] and ids[0] in self._bos():
                # The separator is the BOS of this text.
                del held[-1], separates[-1]
            held += ids + ([end] if end is not None else [])
            separates += [False] * len(ids) + ([True] if end is not None else [])
            yield from cut(self._text_length())
        yield from cut(0)

    def _encoded(self) -> Iterator[Encoded | Row]:
        """Encode chats and texts as token ids, texts many at a time; rows of tokens among them are passed on in order."""
        waiting: list[tuple[int, Text]] = []
        chats = ChatEncoder(self.model, self.options)
        reader = Reader(self.options.column, self.labelled, self.model, self.notes, self.options.selection.column)
        for number, item in enumerate(reader.items(self.data)):
            if not isinstance(item, Chat):
                chats.refuse_idle_options()
            if isinstance(item, Text):
                waiting.append((number, item))
                if len(waiting) == TEXTS_AT_ONCE:
                    yield from self._encode(waiting)
                    waiting = []
            else:
                yield from self._encode(waiting)
                waiting = []
                if isinstance(item, Chat):
                    ids, marks = chats.encode(item, number)
                    yield Encoded(ids, item.label, number, chat=True, marks=marks)
                else:
                    yield replace(item, source=number)
        yield from self._encode(waiting)

    def _encode(self, items: list[tuple[int, Text]]) -> Iterator[Encoded]:
        if not items:
            return
        texts = [readable(item.text, number) for number, item in items]
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            raise LayersimError(
                f"{self.model.name} has no tokenizer, so texts cannot be read.",
                given=f"a text: {texts[0][:40]!r}",
                expected="tokens, or a model that carries its tokenizer",
                do="pass tokenizer=..., or token ids",
            )
        # This package adds BOS, once per row, so that every source reads the same tokens: TransformerLens changes the
        # tokenizers that it loads, so that they add their own.
        ids = tokenizer(texts, add_special_tokens=self._own_specials(), verbose=False)["input_ids"]
        for tokens, (number, item) in zip(ids, items, strict=True):
            yield self._undoubled(Encoded(tokens, item.label, number))

    def _undoubled(self, text: Encoded) -> Encoded:
        """The text without special tokens that the tokenizer doubled at its ends."""
        if not self._own_specials():
            return text
        tokenizer, ids = self.model.tokenizer, text.ids
        first = {tokenizer.cls_token_id, tokenizer.bos_token_id}
        last = {tokenizer.sep_token_id, tokenizer.eos_token_id}
        own = len(ids) > 1 and ids[0] == ids[1] and ids[0] in first
        ids = ids[own:]
        return text._replace(ids=ids[:-1] if len(ids) > 1 and ids[-1] == ids[-2] and ids[-1] in last else ids, own=own)


def found_in(*parts: Batches) -> dict[str, int]:
    """The sums of `Batches.row_counts` over several data sets."""
    counts = [part.row_counts() for part in parts]
    return {name: sum(count[name] for count in counts) for name in (counts[0] if counts else ())}


def next_tokens(tokens: Tensor, attention: Tensor) -> Tensor:
    """The token after each position, `batch pos`; `NO_LABEL` where no attended token follows."""
    following = torch.full_like(tokens, NO_LABEL)
    pair = attention[:, :-1] & attention[:, 1:]
    following[:, :-1] = torch.where(pair, tokens[:, 1:], NO_LABEL)
    return following


def _pad_id(model: ModelInputs) -> int:
    pad = getattr(model.tokenizer, "pad_token_id", None)
    pad = next(iter(model.pads), None) if pad is None else pad
    return pad if pad is not None and (model.vocabulary is None or pad < model.vocabulary) else 0
