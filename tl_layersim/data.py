"""Data: texts, data sets and token tensors become rows of tokens, and rows become right-padded batches with masks."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import LayersimError
from .source import Model

ACCEPTED = (
    "texts, a token tensor (batch pos), mappings with input_ids and attention_mask, a datasets.Dataset or IterableDataset "
    "with a text or token column, or an iterable of these"
)
SETTINGS = ("batch_size", "seq_len", "pack", "max_tokens", "skip_first", "prepend_bos", "column")
DATA_OPTIONS = (*SETTINGS, "tokenizer", "layers")
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
    """

    tokens: Tensor
    attention: Tensor
    counted: Tensor
    first: int

    @property
    def padded(self) -> bool:
        """Whether the model has to be told what is padding."""
        return not bool(self.attention.all())


@dataclass(frozen=True)
class _Text:
    text: str


@dataclass(frozen=True)
class _Row:
    tokens: Tensor
    attention: Tensor


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

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("seq_len", 2), ("max_tokens", 1), ("skip_first", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise LayersimError(f"{name} is too small.", given=value, expected=f"{least} or more", do=f"{name}={least}")
        if isinstance(self.data, str | Path) and os.path.isfile(self.data):
            do = "Path(path).read_text(), split into texts as you want them"
            raise _unknown(f"the path of a file, {str(self.data)!r}", do)
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
        rows = self._limited(self._rows())
        first = 0
        while chunk := list(itertools.islice(rows, self.batch_size)):
            yield self._batch(chunk, first)
            first += len(chunk)

    def _batch(self, rows: list[_Row], first: int) -> Batch:
        length = max(len(row.tokens) for row in rows)
        tokens = torch.full((len(rows), length), _pad_id(self.model))
        attention = torch.zeros((len(rows), length), dtype=torch.bool)
        for i, row in enumerate(rows):
            tokens[i, : len(row.tokens)] = row.tokens
            attention[i, : len(row.tokens)] = row.attention
        counted = attention.clone()
        counted[:, : self.skip_first] = False
        return Batch(tokens, attention, counted, first)

    def _limited(self, rows: Iterator[_Row]) -> Iterator[_Row]:
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
                yield _Row(row.tokens[:end], row.attention[:end])
                return
            left -= int(total[-1])
            yield row

    def _rows(self) -> Iterator[_Row]:
        """Rows of at most `seq_len` tokens, checked against the model."""
        pieces: Iterator[_Row]
        if self.pack:
            pieces = self._packed()
        else:
            pieces = itertools.chain.from_iterable(
                self._windows(item) if isinstance(item, list) else self._split(item) for item in self._encoded()
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

    def _windows(self, ids: list[int]) -> Iterator[_Row]:
        """A text's tokens as rows; a long text goes on in further rows, nothing is cut off."""
        bos = self._bos()
        step = self._text_length() - len(bos)
        for start in range(0, len(ids), step):
            tokens = torch.tensor(bos + ids[start : start + step])
            yield _Row(tokens, torch.ones(len(tokens), dtype=torch.bool))

    def _split(self, row: _Row) -> Iterator[_Row]:
        length = self.seq_len or len(row.tokens)
        for tokens, attention in zip(torch.split(row.tokens, length), torch.split(row.attention, length), strict=True):
            if attention.any():
                yield _Row(tokens, attention)

    def _packed(self) -> Iterator[_Row]:
        length = self._text_length() - len(self._bos() if self.model.tokenizer is not None else ())
        held: list[int] = []
        for item in self._encoded():
            if not isinstance(item, list):
                raise LayersimError(
                    "Only texts can be packed.",
                    given=f"a row of {len(item.tokens)} tokens with pack=True",
                    expected="texts",
                    do="pack=False: rows of tokens are taken as they are",
                )
            end = self.model.tokenizer.eos_token_id
            held += item + ([end] if end is not None else [])
            whole = len(held) // length * length
            if whole:
                yield from self._windows(held[:whole])
                held = held[whole:]
        if held:
            yield from self._windows(held)

    def _encoded(self) -> Iterator[list[int] | _Row]:
        """Token ids of each text, without BOS, in order among rows that came as tokens; texts are encoded many at a time."""
        waiting: list[str] = []
        for item in self._items(self.data):
            if isinstance(item, _Text):
                waiting.append(item.text)
                if len(waiting) == TEXTS_AT_ONCE:
                    yield from self._encode(waiting)
                    waiting = []
            else:
                yield from self._encode(waiting)
                waiting = []
                yield item
        yield from self._encode(waiting)

    def _encode(self, texts: list[str]) -> Iterator[list[int]]:
        if not texts:
            return
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
        yield from tokenizer(texts, add_special_tokens=self._own_specials(), verbose=False)["input_ids"]

    def _items(self, data: Any) -> Iterator[_Text | _Row]:
        if self.column is not None and isinstance(data, str | np.ndarray | Tensor):
            raise LayersimError(
                "This data has no columns.",
                given=f"column={self.column!r} and a {type(data).__name__}",
                expected="mappings or a data set",
                do="leave column out",
            )
        if isinstance(data, str):
            yield _Text(data)
        elif isinstance(data, np.ndarray | Tensor):
            yield from self._token_rows(torch.as_tensor(data), None)
        elif isinstance(data, Mapping):
            yield from self._mapping(data)
        elif hasattr(data, "columns") and hasattr(data, "to_dict"):
            # A pandas table; iterating over it would give the names of its columns.
            yield from self._mapping({name: data[name].tolist() for name in data.columns})
        elif isinstance(data, list) and data and all(isinstance(x, int) and not isinstance(x, bool) for x in data):
            yield from self._token_rows(torch.tensor(data), None)
        elif isinstance(data, tuple) and len(data) != 1:
            do = "pass the tokens alone, or {'input_ids': ..., 'attention_mask': ...}"
            raise _unknown(f"{len(data)} things together, as a DataLoader gives tokens and masks", do)
        elif isinstance(data, Iterable) and not isinstance(data, bytes):
            for item in data:
                # Tensors side by side at the top are batches; inside a batch they are tokens and something else.
                together = isinstance(item, list) and len(item) > 1 and any(isinstance(x, Tensor) and x.dim() > 1 for x in item)
                yield from self._items(tuple(item) if together else item)
        else:
            raise _unknown(f"{type(data).__name__}: {str(data)[:60]}", "lsim.analyze(model, ['a text', 'another'], ...)")

    def _mapping(self, data: Mapping[str, Any]) -> Iterator[_Text | _Row]:
        """A batch or an example: tokens if it has them, else texts."""
        names = list(data)
        column = self.column
        if column is None:
            found = [name for name in ("input_ids", "tokens", "text") if name in data]
            texts = [name for name in names if _is_text(data[name])]
            column = found[0] if found else (texts[0] if len(texts) == 1 else None)
        if column is None or column not in data:
            splits = [name for name in names if not isinstance(data[name], str | list | Tensor | np.ndarray)]
            do = f"data[{splits[0]!r}]" if splits and not self.column else f"column={names[0]!r}" if names else "pass data"
            raise LayersimError(
                "It is not clear where the texts or tokens are.",
                given=f"fields {names}" + (f" and column={self.column!r}" if self.column else ""),
                expected="input_ids, tokens or text, or one single text column",
                do=f"name it: {do}",
            )
        values = data[column]
        if _is_text(values):
            yield from (_Text(text) for text in ([values] if isinstance(values, str) else values))
        else:
            yield from self._token_rows(_tensor(values), data.get("attention_mask"), ragged=values)

    def _token_rows(self, tokens: Tensor | None, mask: Any, ragged: Any = None) -> Iterator[_Row]:
        if tokens is None:
            masks = mask if mask is not None else [None] * len(ragged)
            if len(masks) != len(ragged):
                raise LayersimError(
                    "The mask does not fit the tokens.",
                    given=f"{len(masks)} rows of mask for {len(ragged)} rows of tokens",
                    expected="the same number",
                    do="tokenizer(texts), which makes both",
                )
            for row, row_mask in zip(ragged, masks, strict=True):
                yield from self._token_rows(torch.as_tensor(row), row_mask)
            return
        if tokens.numel() == 0:
            return
        if tokens.dim() not in (1, 2) or tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise LayersimError(
                "Tokens are whole numbers in one row or in rows.",
                given=f"{tokens.dtype} of shape {tuple(tokens.shape)}",
                expected="int64 of shape (batch, pos) or (pos,)",
                do="model.to_tokens(text), or pass the text itself",
            )
        rows = tokens.detach().cpu().long()
        if mask is None:
            refuse_bare_padding(rows if rows.dim() == 2 else rows[None], self.model.tokenizer)
            attention = torch.ones_like(rows, dtype=torch.bool)
        else:
            attention = _as_mask(mask)
        if attention.shape != rows.shape:
            raise LayersimError(
                "The mask does not fit the tokens.",
                given=f"attention_mask {tuple(attention.shape)} for tokens {tuple(rows.shape)}",
                expected="the same shape",
                do="tokenizer(texts, return_tensors='pt', padding=True), which makes both",
            )
        if rows.dim() == 1:
            rows, attention = rows[None], attention[None]
        for row, row_mask in zip(rows, attention, strict=True):
            # Padding on either side goes: rows are padded again on the right, so positions do not depend on the side.
            attended = row_mask.nonzero()[:, 0]
            if len(attended):
                span = slice(int(attended[0]), int(attended[-1]) + 1)
                yield _Row(row[span], row_mask[span])


def refuse_bare_padding(rows: Tensor, tokenizer: Any) -> None:
    """Tokens with runs of the pad token at an end and no mask: counting them would be wrong, guessing too."""
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None or rows.shape[1] < 2:
        return
    # A single end-of-text token that serves as padding too may be meant.
    least = 2 if pad in (tokenizer.bos_token_id, tokenizer.eos_token_id) else 1
    ends = [rows[:, -least:], rows[:, :least]]
    padded = torch.stack([(end == pad).all(1) for end in ends]).any(0)
    if bool(padded.any()):
        raise LayersimError(
            "Rows of tokens start or end with padding, and no mask says so.",
            given=f"{int(padded.sum())} of {len(rows)} rows with pad token {pad} at an end",
            expected="an attention mask beside the tokens",
            do="{'input_ids': tokens, 'attention_mask': mask}, or probe.mask = mask in attach; ones count the pads",
        )


def _unknown(given: str, do: str) -> LayersimError:
    return LayersimError("This is no data that can be read.", given=given, expected=ACCEPTED, do=do)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and bool(value) and all(isinstance(x, str) for x in value))


def _tensor(values: Any) -> Tensor | None:
    """A tensor of the values, None for rows of different lengths."""
    if isinstance(values, list) and values and isinstance(values[0], list | Tensor | np.ndarray):
        if len({len(row) for row in values}) > 1:
            return None
        return torch.stack([torch.as_tensor(row) for row in values])
    return torch.as_tensor(values)


def _as_mask(mask: Any) -> Tensor:
    """A mask of ones and zeros as bool; an additive mask, 0 to keep and -inf to drop, would mean the opposite."""
    values = torch.as_tensor(mask).detach().cpu()
    if values.dtype != torch.bool and not bool(((values == 0) | (values == 1)).all()):
        raise LayersimError(
            "A mask says 1 for a token and 0 for padding.",
            given=f"values from {float(values.min()):g} to {float(values.max()):g}",
            expected="bool, or ones and zeros",
            do="mask = additive_mask == 0, if 0 stands for what is kept",
        )
    return values.bool()


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
