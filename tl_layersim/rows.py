"""What one may hand over as data: texts, tables, mappings, tensors; all become an iterator over texts and rows of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import LayersimError
from .source import NO_LABEL

ACCEPTED = (
    "texts, a token tensor (batch pos), mappings with input_ids and attention_mask, a datasets.Dataset or IterableDataset "
    "with a text or token column, or an iterable of these"
)
LABELS = ("labels", "label")


@dataclass(frozen=True)
class Text:
    """A text, and its class where the data gives one."""

    text: str
    label: int | None


@dataclass(frozen=True)
class Row:
    """A row of tokens, without padding at its ends.

    Attributes:
        tokens: `pos`.
        attention: `pos`, what the model attends to.
        labels: `pos`, the data's labels, a class of the whole row at each of its positions; None where there are none.
        source: which row of the data it came from; -1 where it came from several.
        start: at which position of that row it starts.
    """

    tokens: Tensor
    attention: Tensor
    labels: Tensor | None = None
    source: int = -1
    start: int = 0

    def __getitem__(self, span: slice) -> Row:
        labels = None if self.labels is None else self.labels[span]
        return Row(self.tokens[span], self.attention[span], labels, self.source, self.start + (span.start or 0))

    def split(self, length: int) -> Iterator[Row]:
        """Pieces of at most that length."""
        for start in range(0, len(self.tokens), max(length, 1)):
            yield self[start : start + length]


@dataclass(frozen=True)
class Reader:
    """Reads items of any accepted kind.

    Args:
        column: of a data set, where the texts or tokens are; None to find it.
        labelled: whether labels are wanted: a column of that name may hold anything.
        tokenizer: whose padding token is not taken for text; None where there is none.
    """

    column: str | None
    labelled: bool
    tokenizer: Any

    def items(self, data: Any) -> Iterator[Text | Row]:
        """Texts and rows of tokens, in the order of the data."""
        if self.column is not None and isinstance(data, str | np.ndarray | Tensor):
            raise LayersimError(
                "This data has no columns.",
                given=f"column={self.column!r} and a {type(data).__name__}",
                expected="mappings or a data set",
                do="leave column out",
            )
        if isinstance(data, str):
            yield Text(data, None)
        elif isinstance(data, np.ndarray | Tensor):
            yield from self._token_rows(torch.as_tensor(data), None, None)
        elif isinstance(data, Mapping):
            yield from self._mapping(data)
        elif hasattr(data, "columns") and hasattr(data, "to_dict"):
            # A pandas table; iterating over it would give the names of its columns.
            yield from self._mapping({name: data[name].tolist() for name in data.columns})
        elif isinstance(data, list) and data and all(isinstance(x, int) and not isinstance(x, bool) for x in data):
            yield from self._token_rows(torch.tensor(data), None, None)
        elif isinstance(data, tuple) and len(data) != 1:
            do = "pass the tokens alone, or {'input_ids': ..., 'attention_mask': ...}"
            raise unknown(f"{len(data)} things together, as a DataLoader gives tokens and masks", do)
        elif isinstance(data, Iterable) and not isinstance(data, bytes):
            for item in data:
                # Tensors side by side at the top are batches; inside a batch they are tokens and something else.
                together = isinstance(item, list) and len(item) > 1 and any(isinstance(x, Tensor) and x.dim() > 1 for x in item)
                yield from self.items(tuple(item) if together else item)
        else:
            raise unknown(f"{type(data).__name__}: {str(data)[:60]}", "lsim.analyze(model, ['a text', 'another'], ...)")

    def _mapping(self, data: Mapping[str, Any]) -> Iterator[Text | Row]:
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
            texts = [values] if isinstance(values, str) else values
            for text, label in zip(texts, self._classes(data, len(texts)), strict=True):
                yield Text(text, label)
        else:
            labels = _labels(data) if self.labelled else None
            yield from self._token_rows(_tensor(values), data.get("attention_mask"), labels, ragged=values)

    def _classes(self, data: Mapping[str, Any], count: int) -> list[int | None]:
        """One class for each text; None where the data has no labels at all."""
        labels = _labels(data) if self.labelled else None
        if labels is None:
            return [None] * count
        classes = _whole_numbers(labels).reshape(-1).tolist()
        if len(classes) != count:
            raise _misfit(f"{len(classes)} labels for {count} texts", "one label for each text")
        return classes

    def _token_rows(self, tokens: Tensor | None, mask: Any, labels: Any, ragged: Any = None) -> Iterator[Row]:
        if tokens is None:
            masks = mask if mask is not None else [None] * len(ragged)
            targets = labels if labels is not None else [None] * len(ragged)
            for kind, given in (("mask", masks), ("labels", targets)):
                if len(given) != len(ragged):
                    raise _misfit(f"{len(given)} rows of {kind} for {len(ragged)} rows of tokens", "the same number")
            for row, row_mask, row_labels in zip(ragged, masks, targets, strict=True):
                yield from self._token_rows(torch.as_tensor(row), row_mask, row_labels)
            return
        if tokens.numel() == 0:
            # Nothing to read, and still a row of the data.
            yield from (_NOTHING for _ in range(len(tokens) if tokens.dim() == 2 else 1))
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
            refuse_bare_padding(rows if rows.dim() == 2 else rows[None], self.tokenizer)
            attention = torch.ones_like(rows, dtype=torch.bool)
        else:
            attention = _as_mask(mask)
        if attention.shape != rows.shape:
            raise _misfit(f"attention_mask {tuple(attention.shape)} for tokens {tuple(rows.shape)}", "the same shape")
        targets = None
        if labels is not None:
            targets = _whole_numbers(labels)
            if targets.shape not in (rows.shape, rows.shape[:-1]):
                raise _misfit(f"labels {tuple(targets.shape)} for tokens {tuple(rows.shape)}", "one for each token or each row")
            if targets.dim() < rows.dim():
                targets = targets[..., None].expand_as(rows)
        if rows.dim() == 1:
            rows, attention = rows[None], attention[None]
            targets = targets[None] if targets is not None else None
        for i, (row, row_mask) in enumerate(zip(rows, attention, strict=True)):
            # Padding on either side goes: rows are padded again on the right, so positions do not depend on the side.
            attended = row_mask.nonzero()[:, 0]
            whole = Row(row, row_mask, targets[i] if targets is not None else None)
            yield whole[int(attended[0]) : int(attended[-1]) + 1] if len(attended) else _NOTHING


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


def unknown(given: str, do: str) -> LayersimError:
    """The refusal of what is no data."""
    return LayersimError("This is no data that can be read.", given=given, expected=ACCEPTED, do=do)


def _misfit(given: str, expected: str) -> LayersimError:
    return LayersimError(
        "The mask does not fit the tokens." if "mask" in given else "The labels do not fit the data.",
        given=given,
        expected=expected,
        do="tokenizer(texts, return_tensors='pt', padding=True), which makes tokens and mask"
        if "mask" in given
        else f"labels beside input_ids, with {NO_LABEL} where a position has none",
    )


_NOTHING = Row(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool))


def _labels(data: Mapping[str, Any]) -> Any:
    """The column of labels, None where there is none; an example's own None is a label that is missing."""
    return next((NO_LABEL if data[name] is None else data[name] for name in LABELS if name in data), None)


def _whole_numbers(labels: Any) -> Tensor:
    """Labels as int64; a label that is missing is none."""
    if isinstance(labels, list | tuple):
        labels = [NO_LABEL if x is None or x != x else x for x in labels]
    elif labels is None:
        labels = NO_LABEL
    try:
        found = torch.as_tensor(labels).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        found = None
    if found is None or found.is_floating_point() or found.dtype == torch.bool:
        raise LayersimError(
            "The data has no labels that are classes.",
            given=f"{labels!r}"[:80],
            expected="whole numbers in the column `labels` or `label`, one for each row or each token",
            do="map them to whole numbers first, or hand them over as labels=tensor",
        )
    return found.long()


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
