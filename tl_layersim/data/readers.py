"""Readers of texts, tables, mappings and tensors, which become an iterator over texts and rows of tokens."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import LayersimError, warn
from .chat import Chat, chats_in, is_chat, ungrouped_messages
from .columns import (
    ATTACH,
    LABELS,
    OF_TOKENS,
    TOKENS,
    as_plain,
    find_column,
    is_missing,
    is_text,
    refuse_dropped,
    unclear_columns,
)
from .labels import NO_LABEL
from .missing_mask import mask_of, masked_warning
from .model_properties import ModelInputs
from .positions import as_marks

ACCEPTED_DATA = (
    "texts, a token tensor (batch pos), mappings with input_ids and attention_mask, a datasets.Dataset or IterableDataset "
    "with a text or token column, or an iterable of these"
)
FILES = (".txt", ".md", ".csv", ".tsv", ".json", ".jsonl", ".parquet", ".arrow", ".npy", ".pt", ".safetensors", ".zip", ".gz")


@dataclass(frozen=True)
class Text:
    """A text of the data.

    Attributes:
        text: None where the row has no text.
        label: class of the text, None where the data has no labels.
    """

    text: str | None
    label: int | None


@dataclass
class Notes:
    """Counts of rows that a pass over the data treated specially, for the provenance.

    Attributes:
        own_bos: rows of texts that began with a BOS of their own, so that none was added.
        masked: rows of tokens without a mask, whose mask was derived from the padding id.
        warned: warnings of earlier passes, which are not repeated.
    """

    own_bos: int = 0
    masked: int = 0
    warned: set[str] = field(default_factory=set)

    def once(self, text: str) -> None:
        """Warn, unless the same warning was given before."""
        if text not in self.warned:
            self.warned.add(text)
            warn(text)


@dataclass(frozen=True)
class Row:
    """A row of tokens, without padding at its ends.

    Attributes:
        tokens: `pos`.
        attention: `pos`, positions that the model attends to.
        labels: `pos`, the data's labels, a class of the whole row at each of its positions; None without labels.
        source: the row of the data that it came from; -1 for several.
        start: its start position in that row.
        marks: `pos`, positions that the data marks, in a mask column or by a chat template; None where it marks none.
        counted: `pos`, positions that analyzers measure; None as long as they are not selected.
    """

    tokens: Tensor
    attention: Tensor
    labels: Tensor | None = None
    source: int = -1
    start: int = 0
    marks: Tensor | None = None
    counted: Tensor | None = None

    def __getitem__(self, span: slice) -> Row:
        def cut(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[span]

        start = self.start + (span.start or 0)
        tokens, attention, labels = self.tokens[span], self.attention[span], cut(self.labels)
        return Row(tokens, attention, labels, self.source, start, cut(self.marks), cut(self.counted))

    def split(self, length: int) -> Iterator[Row]:
        """Split the row into rows of at most `length` tokens."""
        for start in range(0, len(self.tokens), max(length, 1)):
            yield self[start : start + length]


@dataclass(frozen=True)
class Reader:
    """Reads items of any accepted kind.

    Args:
        column: the column of a data set that holds texts or tokens; None to find it.
        labelled: whether labels are read: without need, a column of that name may hold anything.
        model: the model's inputs, tokenizer and padding ids.
        notes: counts the masks that are derived from padding.
        marks: the mask column that marks the counted positions, None for none.
    """

    column: str | None
    labelled: bool
    model: ModelInputs
    notes: Notes
    marks: str | None = None

    def items(self, data: Any) -> Iterator[Text | Chat | Row]:
        """Texts, chats and rows of tokens, in the order of the data."""
        if self.column is not None and isinstance(data, str | np.ndarray | Tensor):
            raise LayersimError(
                "`column` needs data with columns.",
                given=f"column={self.column!r} and a {type(data).__name__}",
                expected="mappings or a data set",
                do="leave column out",
            )
        if isinstance(data, str):
            yield Text(data, None)
        elif isinstance(data, np.ndarray) and data.dtype.kind in "OUT":
            yield from self.items(data.tolist())
        elif isinstance(data, np.ndarray | Tensor):
            yield from self._token_rows(_tensor(data))
        elif isinstance(data, Mapping):
            yield from self._mapping(data)
        elif hasattr(data, "columns") and hasattr(data, "to_dict"):
            # A pandas table, which iterates over the names of its columns.
            yield from self._mapping({name: data[name].tolist() for name in data.columns})
        elif isinstance(data, list) and data and all(isinstance(x, int) and not isinstance(x, bool) for x in data):
            yield from self._token_rows(torch.tensor(data))
        elif isinstance(data, list) and data and isinstance(data[0], Mapping) and self.column is None and is_chat(data):
            yield Chat(data, None)
        elif isinstance(data, tuple) and len(data) != 1:
            do = "pass the tokens alone, or {'input_ids': ..., 'attention_mask': ...}"
            raise unknown(f"{len(data)} things together, as a DataLoader gives tokens and masks", do)
        elif isinstance(data, Iterable) and not isinstance(data, bytes):
            for number, item in enumerate(data):
                if number == 0:
                    refuse_path(item)
                if is_missing(item):
                    yield Text(None, None)
                    continue
                # Tensors side by side at the top are batches; inside a batch they are tokens and something else.
                together = isinstance(item, list) and len(item) > 1 and any(isinstance(x, Tensor) and x.dim() > 1 for x in item)
                yield from self.items(tuple(item) if together else item)
        else:
            raise unknown(f"{type(data).__name__}: {str(data)[:60]}", "lsim.analyze(model, ['a text', 'another'], ...)")

    def _mapping(self, data: Mapping[str, Any]) -> Iterator[Text | Chat | Row]:
        """Rows of tokens of a mapping (a batch or an example), or its chats or texts where it has no tokens."""
        data = {name: as_plain(value) for name, value in data.items()}
        column = self.column if self.column is not None else find_column(data)
        if self.column is None and column not in (*TOKENS, "text"):
            column = next((name for name in data if is_chat(data[name])), column)
        # Texts are tokenised here, so the outputs of an earlier tokenisation beside them are not inputs of the model.
        old = OF_TOKENS if "input_ids" in data and column is not None and is_text(data.get(column)) else ()
        refuse_dropped({name: value for name, value in data.items() if name != column and name not in old}, self.model)
        if column not in data and is_chat(data):
            raise ungrouped_messages(list(data))
        if column is None or column not in data:
            raise unclear_columns(data, self.column)
        values = data[column]
        if is_missing(values):
            yield Text(None, None)
        elif is_chat(values):
            chats = chats_in(values)
            yield from map(Chat, chats, self._classes(data, len(chats)))
        elif is_text(values):
            texts = [values] if isinstance(values, str) else values
            for text, label in zip(texts, self._classes(data, len(texts)), strict=True):
                yield Text(None if is_missing(text) else text, label)
        else:
            labels = _labels(data) if self.labelled else None
            marks = None if self.marks is None else data.get(self.marks)
            yield from self._token_rows(_tensor(values), data.get("attention_mask"), labels, marks, ragged=values)

    def _classes(self, data: Mapping[str, Any], count: int) -> list[int | None]:
        """The class of each text; None for all where the data has no labels."""
        labels = _labels(data) if self.labelled else None
        if labels is None:
            return [None] * count
        classes = _whole_numbers(labels).reshape(-1).tolist()
        if len(classes) != count:
            raise _misfit(f"{len(classes)} labels for {count} texts", "one label for each text")
        return classes

    def _mask(self, rows: Tensor) -> Tensor:
        """The mask of tokens that came without one, derived from the padding ids."""
        mask = mask_of(rows, self.model)
        if mask is None:
            return torch.ones_like(rows, dtype=torch.bool)
        self.notes.masked += int((~mask).any(1).sum())
        self.notes.once(masked_warning(rows[~mask].tolist()))
        return mask

    def _token_rows(
        self, tokens: Tensor | None, mask: Any = None, labels: Any = None, marks: Any = None, ragged: Any = None
    ) -> Iterator[Row]:
        if tokens is None:
            by_row = [[None] * len(ragged) if given is None else given for given in (mask, labels, marks)]
            for kind, given in zip(("mask", "labels", f"column {self.marks!r}"), by_row, strict=True):
                if len(given) != len(ragged):
                    raise _misfit(f"{len(given)} rows of {kind} for {len(ragged)} rows of tokens", "the same number")
            for row, row_mask, row_labels, row_marks in zip(ragged, *by_row, strict=True):
                yield from self._token_rows(_tensor(row), row_mask, row_labels, row_marks, ragged=row)
            return
        if tokens.numel() == 0:
            # An empty row still counts as a row of the data.
            yield from (_NOTHING for _ in range(len(tokens) if tokens.dim() == 2 else 1))
            return
        if tokens.dim() > 3 or (tokens.is_floating_point() and tokens.dim() > 2):
            raise LayersimError(
                "`data` contains images, audio or embeddings, which are not supported here.",
                given=f"{tokens.dtype} of shape {tuple(tokens.shape)}",
                expected=ACCEPTED_DATA,
                do=f"{ATTACH}model(pixel_values=pixels), or as the model takes them: what runs through it is measured",
            )
        if tokens.dim() not in (1, 2) or tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise LayersimError(
                "`data` must hold integer token ids in one or two dimensions.",
                given=f"{tokens.dtype} of shape {tuple(tokens.shape)}",
                expected="int64 of shape (batch, pos) or (pos,)",
                do="pass the text itself; or whole ids, as tokenizer(text).input_ids and model.to_tokens(text) give them",
            )
        rows = tokens.detach().cpu().long()
        attention = self._mask(rows if rows.dim() == 2 else rows[None]).view_as(rows) if mask is None else _as_mask(mask)
        if attention.shape != rows.shape:
            raise _misfit(f"attention_mask {tuple(attention.shape)} for tokens {tuple(rows.shape)}", "the same shape")
        targets = None
        if labels is not None:
            targets = _whole_numbers(labels)
            if targets.shape not in (rows.shape, rows.shape[:-1]):
                raise _misfit(f"labels {tuple(targets.shape)} for tokens {tuple(rows.shape)}", "one for each token or each row")
            if targets.dim() < rows.dim():
                targets = targets[..., None].expand_as(rows)
        marked = None if marks is None else as_marks(marks, self.marks, rows.shape)
        if rows.dim() == 1:
            rows, attention = rows[None], attention[None]
            targets = targets[None] if targets is not None else None
            marked = marked[None] if marked is not None else None
        for i, (row, row_mask) in enumerate(zip(rows, attention, strict=True)):
            # Padding on either side is removed: rows are padded again on the right, so positions do not depend on the side.
            attended = row_mask.nonzero()[:, 0]
            row_with_padding = Row(row, row_mask, targets[i] if targets is not None else None)
            if marked is not None:
                row_with_padding = replace(row_with_padding, marks=marked[i])
            yield row_with_padding[int(attended[0]) : int(attended[-1]) + 1] if len(attended) else _NOTHING


def refuse_path(text: Any) -> None:
    """Refuse a path, which would be read as a text of a few tokens.

    Raises:
        LayersimError: the text is the path of a file or folder, or ends like that of a file.
    """
    name = os.fspath(text) if isinstance(text, os.PathLike) else text
    if not isinstance(name, str) or len(name) > 300 or "\n" in name:
        return
    exists = os.path.isfile(name) or (os.sep in name and os.path.isdir(name))
    bare = not any(c.isspace() for c in name) or name.startswith((os.sep, f".{os.sep}", f"..{os.sep}", "~"))
    if exists:
        do = "Path(path).read_text(), split into texts as you want them; datasets.load_from_disk(path) for a data set"
        raise unknown(f"the path of a file or folder, {name!r}", do)
    if isinstance(text, os.PathLike) or (bare and name.lower().endswith(FILES)):
        do = "check the path; if this is a text that ends so, add a line break"
        raise unknown(f"the path of a file that does not exist, {name!r}", do)


def unknown(given: str, do: str) -> LayersimError:
    """The error for data of an unknown kind."""
    return LayersimError("`data` has an unsupported type.", given=given, expected=ACCEPTED_DATA, do=do)


def _misfit(given: str, expected: str) -> LayersimError:
    return LayersimError(
        "`attention_mask` does not fit the tokens." if "mask" in given else "`labels` do not fit the data.",
        given=given,
        expected=expected,
        do="tokenizer(texts, return_tensors='pt', padding=True), which makes tokens and mask"
        if "mask" in given
        else f"labels beside input_ids, with {NO_LABEL} where a position has none",
    )


_NOTHING = Row(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool))


def _labels(data: Mapping[str, Any]) -> Any:
    """The column of labels, or None without such a column; an example's own None is a missing label."""
    return next((NO_LABEL if data[name] is None else data[name] for name in LABELS if name in data), None)


def _whole_numbers(labels: Any) -> Tensor:
    """Labels as int64, `NO_LABEL` for missing ones."""
    if isinstance(labels, list | tuple):
        labels = [NO_LABEL if x is None or x != x else x for x in labels]
    elif labels is None:
        labels = NO_LABEL
    try:
        numbers = torch.as_tensor(labels).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        numbers = None
    if numbers is None or numbers.is_floating_point() or numbers.dtype == torch.bool:
        raise LayersimError(
            "`labels` in the data must be integers.",
            given=f"{labels!r}"[:80],
            expected="whole numbers in the column `labels` or `label`, one for each row or each token",
            do="map them to whole numbers first, or hand them over as labels=tensor",
        )
    return numbers.long()


def _tensor(values: Any) -> Tensor | None:
    """A tensor of the values, or None for rows of different lengths."""
    try:
        if isinstance(values, list) and values and isinstance(values[0], list | tuple | Tensor | np.ndarray):
            if len({len(row) for row in values}) > 1:
                return None
            return torch.stack([torch.as_tensor(row) for row in values])
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LayersimError(
            "`data` holds neither texts nor token ids in its column.",
            given=f"{values!r}"[:120],
            expected="texts, or rows of whole numbers",
            do="another column=, or data in which this column holds texts alone or ids alone",
        ) from error


def _as_mask(mask: Any) -> Tensor:
    """Convert a mask of ones and zeros to bool; refuse an additive mask (0 keeps, -inf drops), which means the opposite."""
    try:
        values = torch.as_tensor(mask).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise _misfit(f"a mask of {str(mask)[:60]}", "ones and zeros of the tokens' shape") from error
    if values.dtype != torch.bool and not bool(((values == 0) | (values == 1)).all()):
        raise LayersimError(
            "`attention_mask` must be 1 for tokens and 0 for padding.",
            given=f"values from {float(values.min()):g} to {float(values.max()):g}",
            expected="bool, or ones and zeros",
            do="mask = additive_mask == 0, if 0 stands for what is kept",
        )
    return values.bool()
