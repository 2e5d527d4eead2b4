"""Data: texts, data sets and token tensors become rows of tokens, and rows become right-padded batches with masks."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import LayersimError
from .rows import Reader, Row, Text, unknown
from .source import NO_LABEL, Model

SETTINGS = ("batch_size", "seq_len", "pack", "max_tokens", "skip_first", "prepend_bos", "column")
DATA_OPTIONS = (*SETTINGS, "tokenizer", "layers", "unembed")
TEXTS_AT_ONCE = 64
DEFAULT_SEQ_LEN = 256


@dataclass(frozen=True)
class Batch:
    """Right-padded rows of tokens.

    Attributes:
        tokens: `batch pos`, int64.
        attention: `batch pos`, what the model attends to; False at padding.
        counted: `batch pos`, what analyzers see: attended and not among the first `skip_first` positions of its row.
        first: the number of its first row, counted from the start of the data.
        labels: `batch pos`, the data's own labels, `NO_LABEL` where a position has none; None if the data has no labels.
        origins: for each row, which row of the data it came from (-1 for several) and at which position of it it starts.
    """

    tokens: Tensor
    attention: Tensor
    counted: Tensor
    first: int
    labels: Tensor | None = None
    origins: tuple[tuple[int, int], ...] = ()

    @property
    def sources(self) -> tuple[Tensor, Tensor]:
        """`batch pos` twice: which row and which position of the data each token came from; the row is -1 for several."""
        origins = self.origins or tuple((self.first + i, 0) for i in range(len(self.tokens)))
        row, start = torch.tensor(origins).unbind(1)
        return row[:, None].expand_as(self.tokens), start[:, None] + torch.arange(self.tokens.shape[1])

    @property
    def padded(self) -> bool:
        """Whether the model has to be told what is padding."""
        return not bool(self.attention.all())

    @property
    def next_tokens(self) -> Tensor:
        """`batch pos`, the token that follows, `NO_LABEL` where nothing that is attended to does."""
        return next_tokens(self.tokens, self.attention)

    @property
    def first_row(self) -> Batch:
        """Its first row alone, without padding."""
        return self.rows(0, 1)

    def rows(self, start: int, stop: int) -> Batch:
        """Some of its rows, as wide as the longest of them."""
        width = int(self.attention[start:stop].any(0).nonzero()[-1]) + 1
        cut = (slice(start, stop), slice(0, width))
        labels = None if self.labels is None else self.labels[cut]
        origins = self.origins[start:stop]
        return Batch(self.tokens[cut], self.attention[cut], self.counted[cut], self.first + start, labels, origins)


@dataclass(frozen=True)
class Batches:
    """Batches of any accepted data, in the same order each time they are iterated over.

    Args:
        data: see `tl_layersim.analyze`.
        model: whose tokenizer, vocabulary and context apply.
        batch_size: rows in a forward pass.
        seq_len: longest row; None for 256 or the model's context if that is shorter (texts) or the rows as they are (tokens).
        pack: join texts, with an end-of-text token between them, and cut rows of `seq_len` from the whole.
        max_tokens: stop after so many counted tokens.
        skip_first: positions at the start of each row that are not counted.
        prepend_bos: start each row that comes from text with the tokenizer's BOS, as TransformerLens does.
        column: of a data set, where the texts or tokens are; None to find it.
        labelled: whether an analyzer wants the data's own labels.
    """

    data: Any
    model: Model
    batch_size: int
    seq_len: int | None
    pack: bool
    max_tokens: int | None
    skip_first: int
    prepend_bos: bool
    column: str | None
    labelled: bool = False

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("seq_len", 2), ("max_tokens", 1), ("skip_first", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise LayersimError(f"{name} is too small.", given=value, expected=f"{least} or more", do=f"{name}={least}")
        if isinstance(self.data, str | Path) and os.path.isfile(self.data):
            do = "Path(path).read_text(), split into texts as you want them"
            raise unknown(f"the path of a file, {str(self.data)!r}", do)
        if self.seq_len and self.model.context and self.seq_len > self.model.context:
            raise LayersimError(
                "The model does not take rows this long.",
                given=f"seq_len={self.seq_len}",
                expected=f"at most {self.model.context}, the context of {self.model.name}",
                do=f"seq_len={self.model.context}",
            )
        if self.seq_len and self.skip_first >= self.seq_len:
            raise LayersimError(
                "Every position would be left out.",
                given=f"skip_first={self.skip_first} with seq_len={self.seq_len}",
                expected="skip_first below seq_len",
                do="skip_first=1",
            )

    @property
    def one_shot(self) -> bool:
        """Whether the data is an iterator, gone after one pass."""
        return isinstance(self.data, Iterator)

    def options(self) -> dict[str, Any]:
        """The settings, for a result's provenance."""
        tokenizer = self.model.tokenizer
        known = None if tokenizer is None else f"{type(tokenizer).__name__} of {len(tokenizer)} tokens"
        return {name: getattr(self, name) for name in SETTINGS} | {"tokenizer": known}

    def __iter__(self) -> Iterator[Batch]:
        rows = self.rows()
        first = 0
        while chunk := list(itertools.islice(rows, self.batch_size)):
            yield self.batch(chunk, first)
            first += len(chunk)

    def rows(self) -> Iterator[Row]:
        """Rows without padding, up to `max_tokens`."""
        return self._limited(self._rows())

    def batch(self, rows: list[Row], first: int) -> Batch:
        """Rows side by side, padded on the right to the longest.

        Args:
            rows: which.
            first: the number of the first of them.
        """
        length = max(len(row.tokens) for row in rows)
        tokens = torch.full((len(rows), length), _pad_id(self.model))
        attention = torch.zeros((len(rows), length), dtype=torch.bool)
        for i, row in enumerate(rows):
            tokens[i, : len(row.tokens)] = row.tokens
            attention[i, : len(row.tokens)] = row.attention
        labels = None
        if any(row.labels is not None for row in rows):
            labels = torch.full((len(rows), length), NO_LABEL)
            for i, row in enumerate(rows):
                if row.labels is not None:
                    labels[i, : len(row.labels)] = row.labels
        counted = attention.clone()
        counted[:, : self.skip_first] = False
        return Batch(tokens, attention, counted, first, labels, tuple((row.source, row.start) for row in rows))

    def _limited(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Rows until `max_tokens` are counted; the last one is cut so that the number is met exactly."""
        left = self.max_tokens
        for row in rows:
            if left is None:
                yield row
                continue
            counted = row.attention.clone()
            counted[: self.skip_first] = False
            total = counted.cumsum(0)
            if int(total[-1]) >= left:
                end = int((total < left).sum()) + 1
                yield row[:end]
                return
            left -= int(total[-1])
            yield row

    def _rows(self) -> Iterator[Row]:
        """Rows of at most `seq_len` tokens, checked against the model."""
        pieces: Iterator[Row]
        if self.pack:
            pieces = self._packed()
        else:
            pieces = itertools.chain.from_iterable(
                self._split(item) if isinstance(item, Row) else self._windows(*item) for item in self._encoded()
            )
        context = self.model.context
        for row in pieces:
            if context and len(row.tokens) > context:
                raise LayersimError(
                    "A row is longer than the model's context.",
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
                f"Token ids lie outside the vocabulary of {self.model.name}.",
                given=f"ids from {low} to {high}",
                expected=f"0 to {(self.model.vocabulary or 0) - 1}",
                do="tokenise with the model's own tokenizer, or pass the texts themselves",
            )

    def _text_length(self) -> int:
        return self.seq_len or min(DEFAULT_SEQ_LEN, self.model.context or DEFAULT_SEQ_LEN)

    def _bos(self) -> list[int]:
        bos = self.model.tokenizer.bos_token_id
        return [bos] if self.prepend_bos and bos is not None and not self._own_specials() else []

    def _own_specials(self) -> bool:
        """Whether the tokenizer adds its special tokens by itself: [CLS] models, and those without a BOS."""
        return self.model.tokenizer.bos_token_id is None or self.model.tokenizer.cls_token_id is not None

    def _windows(self, ids: list[int], label: int | None = None, source: int = -1) -> Iterator[Row]:
        """A text's tokens as rows; a long text goes on in further rows, nothing is cut off."""
        bos = self._bos()
        step = self._text_length() - len(bos)
        for start in range(0, len(ids), step):
            tokens = torch.tensor(bos + ids[start : start + step])
            labels = None if label is None else torch.full_like(tokens, label)
            yield Row(tokens, torch.ones(len(tokens), dtype=torch.bool), labels, source, start)

    def _split(self, row: Row) -> Iterator[Row]:
        return (part for part in row.split(self.seq_len or len(row.tokens)) if part.attention.any())

    def _packed(self) -> Iterator[Row]:
        length = self._text_length() - len(self._bos() if self.model.tokenizer is not None else ())
        held: list[int] = []
        for item in self._encoded():
            if isinstance(item, Row):
                raise LayersimError(
                    "Only texts can be packed.",
                    given=f"a row of {len(item.tokens)} tokens with pack=True",
                    expected="texts",
                    do="pack=False: rows of tokens are taken as they are",
                )
            end = self.model.tokenizer.eos_token_id
            held += item[0] + ([end] if end is not None else [])
            whole = len(held) // length * length
            if whole:
                yield from self._windows(held[:whole])
                held = held[whole:]
        if held:
            yield from self._windows(held)

    def _encoded(self) -> Iterator[tuple[list[int], int | None, int] | Row]:
        """Token ids, class and number of each text, without BOS, in order among rows of tokens; encoded many at a time."""
        waiting: list[tuple[int, Text]] = []
        for number, item in enumerate(Reader(self.column, self.labelled, self.model.tokenizer).items(self.data)):
            if isinstance(item, Text):
                waiting.append((number, item))
                if len(waiting) == TEXTS_AT_ONCE:
                    yield from self._encode(waiting)
                    waiting = []
            else:
                yield from self._encode(waiting)
                waiting = []
                yield replace(item, source=number)
        yield from self._encode(waiting)

    def _encode(self, items: list[tuple[int, Text]]) -> Iterator[tuple[list[int], int | None, int]]:
        if not items:
            return
        texts = [item.text for _, item in items]
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            raise LayersimError(
                f"{self.model.name} has no tokenizer, so texts cannot be read.",
                given=f"a text: {texts[0][:40]!r}",
                expected="tokens, or a model that carries its tokenizer",
                do="pass tokenizer=..., or token ids",
            )
        # BOS is ours to add, once per row, so that every source sees the same tokens: TransformerLens changes the tokenizers
        # that it loads to add their own.
        ids = tokenizer(texts, add_special_tokens=self._own_specials(), verbose=False)["input_ids"]
        for tokens, (number, item) in zip(ids, items, strict=True):
            yield tokens, item.label, number


def next_tokens(tokens: Tensor, attention: Tensor) -> Tensor:
    """The token that follows each position of a row, `NO_LABEL` where nothing that is attended to does; all `batch pos`."""
    following = torch.full_like(tokens, NO_LABEL)
    pair = attention[:, :-1] & attention[:, 1:]
    following[:, :-1] = torch.where(pair, tokens[:, 1:], NO_LABEL)
    return following


def _pad_id(model: Model) -> int:
    pad = getattr(model.tokenizer, "pad_token_id", None)
    return pad if pad is not None and (model.vocabulary is None or pad < model.vocabulary) else 0


def fingerprint(digest: Any, batch: Batch) -> None:
    """Feed a batch's rows, without padding, to a running hash: equal data gives equal digests in any batch size."""
    for tokens, attention in zip(batch.tokens, batch.attention, strict=True):
        length = int(attention.nonzero()[-1]) + 1
        digest.update(tokens[:length].numpy().tobytes() + attention[:length].numpy().tobytes() + b"|")


def new_digest() -> Any:
    """The hash that `fingerprint` feeds."""
    return hashlib.sha256()
