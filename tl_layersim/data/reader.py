"""Reading of texts, tables, mappings and tensors as an iterator over texts and rows of tokens."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import LOG, LayersimError
from ..core.wording import brief, with_article
from .data import Column
from .labels import LABELS, is_missing, labels_in, number_tensor, whole_numbers
from .non_token_inputs import (
    EMBEDDINGS,
    MASK,
    OF_TOKENS,
    PIXELS,
    ROW_AXES,
    TOKEN_IDS,
    TOKENS,
    Level,
    accepted,
    as_plain,
    decoder_alone,
    decoder_mask,
    find_column,
    image_column,
    is_floats,
    is_image,
    is_images,
    is_text,
    main_column,
    main_rows,
    positional,
    processed,
    reads_decoder,
    refuse_integers,
    rows_of,
    unclear_columns,
    without_padding,
)
from .padding_masks import as_mask, mask_of, masked_warning
from .positions import as_marks
from .row import NOTHING, ModelInputs, Row
from .texts import Text, TextRows, chats_in, is_chat

ACCEPTED_DATA = (
    "texts, a token tensor (batch pos), mappings with input_ids or other inputs of the model by name, a datasets.Dataset or "
    "IterableDataset with a text, token or image column, or an iterable of these"
)
FILES = (".txt", ".md", ".csv", ".tsv", ".json", ".jsonl", ".parquet", ".arrow", ".npy", ".pt", ".safetensors", ".zip", ".gz")


@dataclass(frozen=True)
class Reader(TextRows):
    """Reads data of any accepted kind as texts, chats and rows.

    Args:
        labelled: whether to read labels. If False, a column with their name may hold anything.
    """

    labelled: bool = False

    @property
    def marks(self) -> str | None:
        """The mask column that selects the counted positions; None if no column does."""
        return self.data.selection.column

    def all_items(self) -> Iterator[Text | Row]:
        """Texts, chats and rows in the order of the data."""
        try:
            yield from self.items(self.data.source)
        except RecursionError as error:
            raise LayersimError("`data` has lists or mappings that contain themselves.") from error

    def items(self, data: Any, level: Level = "batch") -> Iterator[Text | Row]:
        """Texts, chats and rows of tokens or other inputs, in the order of the data.

        Args:
            data: data of any accepted kind.
            level: see `Level`.
        """
        if self.data.column is not None and isinstance(data, str | np.ndarray | Tensor):
            raise LayersimError(f"`column` is {self.data.column!r}, but `data` holds a {type(data).__name__} without columns.")
        if isinstance(data, str):
            yield Text(data)
        elif isinstance(data, np.ndarray) and data.dtype.kind in "OUT":
            yield from self.items(data.tolist())
        elif (
            not isinstance(data, list)
            and is_image(data)
            and (self.model.main_input == PIXELS or not isinstance(data, np.ndarray | Tensor))
        ):
            yield from self._image(data)
        elif is_images(data) and self.model.main_input == PIXELS and self.model.processor is not None:
            for image in data:
                yield from self._image(image)
        elif isinstance(data, np.ndarray | Tensor):
            yield from self._table(data, level)
        elif isinstance(data, Mapping):
            yield from self._mapping(data, level)
        elif hasattr(data, "columns") and hasattr(data, "to_dict"):
            # A pandas table, which iterates over the names of its columns.
            yield from self._mapping({name: data[name].tolist() for name in data.columns}, "batch")
        elif isinstance(data, list) and data and all(isinstance(x, int) and not isinstance(x, bool) for x in data):
            yield from self._table(data, level)
        elif isinstance(data, list) and data and isinstance(data[0], Mapping) and self.data.column is None and is_chat(data):
            yield Text(None, messages=data)
        elif isinstance(data, tuple) and len(data) != 1:
            raise LayersimError(
                f"`data` holds batches of {len(data)} unnamed tensors, as from a DataLoader. Pass a mapping for each batch, "
                f"such as {{'{self.model.main_input}': x, 'label': y}} for (x, y)."
            )
        elif isinstance(data, Iterable) and not isinstance(data, bytes):
            inner = _level_of_items(data)
            for number, item in enumerate(data):
                if number == 0:
                    refuse_path(item)
                if is_missing(item):
                    yield Text(None)
                    continue
                # Tensors side by side at the top are batches; inside a batch they are tokens and something else.
                together = isinstance(item, list) and len(item) > 1 and any(isinstance(x, Tensor) and x.dim() > 1 for x in item)
                yield from self.items(tuple(item) if together else item, inner)
        else:
            raise LayersimError(f"`data` holds {brief(data)}, {with_article(type(data).__name__)}; it must be {ACCEPTED_DATA}.")

    def _table(self, values: Any, level: Level) -> Iterator[Row]:
        """Rows of a tensor or array of token ids, or of the model's main input."""
        main, table = self.model.main_input, _tensor(values)
        # Neither an array nor a list of integers has rows of different lengths.
        assert table is not None
        images_or_features = table.is_floating_point() or (main in ROW_AXES and table.dim() > 2)
        column = main if table.numel() and main != TOKEN_IDS and images_or_features else self.model.token_input
        yield from self._rows({column: table}, column, column, level)

    def _image(self, image: Any) -> Iterator[Row]:
        """The row that the model's processor makes from an image."""
        if self.model.main_input != PIXELS:
            raise LayersimError(
                f"`data` holds an image ({type(image).__name__}), but {self.model.name} takes `{self.model.main_input}`."
            )
        yield from self._rows(processed([image], self.model), PIXELS, PIXELS, "batch")

    def _mapping(self, data: Mapping[str, Any], level: Level) -> Iterator[Text | Row]:
        """Items of a batch or an example: rows of the main input, rows of tokens, chats, or texts."""
        data = {name: as_plain(value) for name, value in data.items()}
        named = self.data.column if isinstance(self.data.column, str) else None
        images = image_column(data, self.model, named)
        read = [*LABELS, self.model.mask_input, *([images] if images else []), *([self.marks] if self.marks else [])]
        if images is not None:
            many = level != "row" and (isinstance(data[images], list) or is_images(data[images]))
            made = processed(list(data[images]) if many else [data[images]], self.model)
            data |= made if many else {name: values[0] for name, values in made.items()}
            level = "batch" if many else "row"
        main = main_column(data, self.model) if self.data.column is None or named == images else None
        if named is not None and named != images and is_floats(data.get(named)) and self.model.main_input != TOKEN_IDS:
            main = named
        if main is not None:
            self._name_unread(data, [*read, main])
            name = main if main == EMBEDDINGS else self.model.main_input
            yield from self._rows(data, main, name, level)
            return
        column = self.data.column if self.data.column is not None else find_column(data)
        if reads_decoder(self.model) and self.data.column is None:
            column = self.model.token_input
            if data.get(column) is None:
                raise decoder_alone(f"fields {list(data)}, without `{column}`", self.model)
        if self.data.column is None and column not in (*TOKENS, "text", self.model.token_input):
            column = next((name for name in data if is_chat(data[name])), column)
        yield from self._tokens_or_texts(data, column, read, level)

    def _tokens_or_texts(
        self, data: Mapping[str, Any], column: Column | None, read: list[str], level: Level
    ) -> Iterator[Text | Row]:
        """Items of a mapping: rows of tokens, or chats or texts if there are no tokens."""
        columns = [column] if isinstance(column, str) else list(column or ())
        if not set(columns) & data.keys() and is_chat(data):
            raise LayersimError(
                f"`data` has chat messages as rows, with the fields {list(data)}. Pass a list of messages for each chat: "
                "[[{'role': 'user', 'content': '...'}, ...], ...]."
            )
        if not columns or not set(columns) <= data.keys():
            raise unclear_columns(data, column, self.model)
        values = data[columns[0]]
        has_texts, has_chats = is_text(values), is_chat(values)
        of_text = has_texts or has_chats or is_missing(values)
        if columns[0] in (*TOKENS, self.model.token_input) and self.data.column is None and has_texts:
            raise not_ids(brief(values))
        # Texts are tokenised here, so the outputs of an earlier tokenisation beside them are not inputs of the model.
        old = (TOKEN_IDS, *OF_TOKENS) if TOKEN_IDS in data and of_text else ()
        self._name_unread(data, [*read, *columns, *old])
        inputs = accepted(data, self.model, (*columns, *old, self.model.mask_input))
        if has_chats:
            chats = chats_in(values)
            alone = isinstance(values, Mapping) or any(isinstance(each, Mapping) for each in values)
            rows = rows_of(inputs, None if alone and len(chats) == 1 else len(chats))
            for chat, label, own in zip(chats, self._classes(data, len(chats)), rows, strict=True):
                yield Text(None, label, messages=chat, inputs=own)
        elif of_text:
            yield from self._texts(data, columns, inputs)
        else:
            yield from self._rows(data, columns[0], self.model.token_input, level)

    def _texts(self, data: Mapping[str, Any], columns: list[str], inputs: Mapping[str, Any]) -> Iterator[Text]:
        """The texts of a column, or pairs of texts of two columns."""
        alone = not isinstance(data[columns[0]], list)
        texts = [[data[name]] if alone else data[name] for name in columns]
        count = len(texts[0])
        if len(texts[-1]) != count or not all(is_text(each) or all(map(is_missing, each)) for each in texts):
            raise unclear_columns(data, tuple(columns), self.model)
        rows = rows_of(inputs, None if alone else count)
        for i, label in enumerate(self._classes(data, count)):
            parts = [None if is_missing(each[i]) else each[i] for each in texts]
            first, second = parts[0], parts[1] if len(parts) > 1 else None
            # A pair without its second text is a row without text.
            missing = len(parts) > 1 and second is None
            yield Text(None if missing else first, label, second, inputs=rows[i])

    def _name_unread(self, data: Mapping[str, Any], read: list[str]) -> None:
        """Log the columns that are not read, once."""
        names = [name for name in data if name not in (*self.model.inputs, self.model.main_input, *read)]
        if names and not self.notes.unread:
            self.notes.unread = True
            LOG.warning("Columns of the data that are not read: %s", ", ".join(names))

    def _classes(self, data: Mapping[str, Any], count: int) -> list[int | None]:
        """The class of each text; None if the data has no labels."""
        labels = labels_in(data) if self.labelled else None
        if labels is None:
            return [None] * count
        classes = whole_numbers(labels).reshape(-1).tolist()
        if len(classes) != count:
            raise LayersimError(f"`labels` has {len(classes)} entries; it must have {count}, one for each text.")
        return classes

    def _rows(self, data: Mapping[str, Any], column: str, name: str, level: Level) -> Iterator[Row]:
        """Rows of token ids, or of another input such as pixels or embeddings.

        Args:
            data: columns by name.
            column: the column of the tokens or of the other values.
            name: name of the model's input that takes them.
            level: see `Level`.
        """
        has_tokens, model = name == self.model.token_input, self.model
        alone, values = _token_rows(data[column], model) if has_tokens else main_rows(name, data[column], level)
        mask, labels = data.get(model.mask_input), labels_in(data) if self.labelled else None
        # A table of masks is checked at once, masks of different lengths row by row.
        masks = self._by_row(model.mask_input, as_mask(mask) if hasattr(mask, "ndim") else mask, values, alone)
        if has_tokens and mask is None:
            masks = self._derived_masks(values)
        marked = data.get(self.marks) if self.marks else None
        marks, targets = self._by_row(self.marks, marked, values, alone), self._by_row("labels", labels, values, alone)
        # Without token ids, the mask is not passed on: `attention_mask` would belong to tokens.
        skipped = (column, name, model.mask_input if has_tokens else MASK)
        further = rows_of(accepted(data, model, skipped), None if alone else len(values))
        for own, own_mask, label, own_marks, others in zip(values, masks, targets, marks, further, strict=True):
            length = len(own) if has_tokens or name == EMBEDDINGS else 1
            inputs = without_padding(others, model)
            if not has_tokens:
                refuse_integers(name, own)
                inputs = {name: own} | inputs
            known = has_tokens or mask is not None
            attention = _row_mask(own_mask, length, name, model) if known else torch.ones(length, dtype=torch.bool)
            # Padding on either side is removed unless it is counted: rows are padded again on the right, so positions do not
            # depend on the side.
            kept = (attention | (has_tokens and self.data.positions == "padded")).nonzero()[:, 0]
            if not len(kept):
                # An empty row still counts as a row of the data.
                yield NOTHING
                continue
            whole = Row(
                own if has_tokens else torch.zeros(length, dtype=torch.int64),
                attention,
                None if labels is None else _row_labels(label, length),
                marks=None if marked is None else as_marks(own_marks, self.marks, attention.shape),
                inputs=inputs,
                positional=positional(inputs, length if has_tokens else None, model),
                has_tokens=has_tokens,
            )
            yield whole if len(kept) == length else whole[int(kept[0]) : int(kept[-1]) + 1]

    def _by_row(self, name: str | None, column: Any, rows: list[Tensor], alone: bool) -> list[Any]:
        """Split a column of masks, labels or marks by row. If the data lacks the column, the value of each row is None."""
        if column is None:
            return [None] * len(rows)
        is_number = not isinstance(column, list | tuple) and not getattr(column, "ndim", 0)
        each = [column] if alone or is_number else list(column)
        if len(each) != len(rows):
            raise LayersimError(f"`{name}` has {len(each)} rows; it must have {len(rows)}, one for each row of the data.")
        return each

    def _derived_masks(self, rows: list[Tensor]) -> list[Tensor]:
        """Attention masks from padding ids, for rows of tokens without a mask. Rows of equal length are processed together."""
        tables = [torch.stack(rows)] if len({len(row) for row in rows}) == 1 else [row[None] for row in rows]
        return [mask for table in tables for mask in (self._derived_mask(table) if table.numel() else table.bool())]

    def _derived_mask(self, rows: Tensor) -> Tensor:
        mask = decoder_mask(rows, self.model) if reads_decoder(self.model) else mask_of(rows, self.model)
        self.notes.runs.add(rows, self.model)
        if mask is None:
            return torch.ones_like(rows, dtype=torch.bool)
        self.notes.masked += int((~mask).any(1).sum())
        self.notes.once(masked_warning(rows[~mask].tolist()))
        return mask


def _token_rows(values: Any, model: ModelInputs) -> tuple[bool, list[Tensor]]:
    """Convert values to rows of token ids, int64, of any lengths; returns whether they are a single row, and the rows."""
    table = _tensor(values)
    tables = [_tensor(row) for row in values] if table is None else [table]
    rows: list[Tensor] = []
    for one in tables:
        if one is None or (table is None and one.dim() > 1):
            raise not_ids(brief(values))
        if one.numel():
            _refuse_floats(one, model)
        rows += one.long() if one.dim() > 1 else [one.long()]
    return table is not None and table.dim() == 1, rows


def _row_labels(label: Any, length: int) -> Tensor:
    """The labels of a row, one for each position. A single class is repeated at every position."""
    labels = whole_numbers(label)
    if labels.numel() != 1 and labels.shape != (length,):
        raise LayersimError(
            f"`labels` has shape {tuple(labels.shape)} for a row of {length} positions; it must hold one label for each row or "
            "each position."
        )
    return labels.reshape(-1).expand(length)


def _row_mask(mask: Any, length: int, name: str, model: ModelInputs) -> Tensor:
    """The attention mask of one row. It must be all ones unless the number of positions is known before a forward pass.

    Raises:
        LayersimError: the mask hides parts of an image or of features, or has the wrong shape.
    """
    found = as_mask(mask)
    if found.shape == (length,):
        return found
    if name in (EMBEDDINGS, model.token_input):
        raise LayersimError(
            f"`attention_mask` has shape {tuple(found.shape)} for a row of {length} positions; it must have one value for each."
        )
    if not bool(found.all()):
        raise LayersimError(
            f"`attention_mask` of shape {tuple(found.shape)} has zeros, but a row without token ids must have no padding. Pass "
            "each row at its own length with `batch_size=1`, or pass `inputs_embeds`."
        )
    return torch.ones(length, dtype=torch.bool)


def _level_of_items(data: Any) -> Level:
    """Whether the items of an iterable are batches (of a DataLoader) or rows (of a data set)."""
    if hasattr(data, "column_names") and hasattr(data, "features"):
        return "row"
    return "either" if getattr(data, "batch_sampler", None) is None else "batch"


def _refuse_floats(tokens: Tensor, model: ModelInputs) -> None:
    """Raise an error if numbers cannot be token ids.

    Raises:
        LayersimError: the numbers are floats or bools, or have too many axes.
    """
    if tokens.dim() > 2 and not tokens.is_floating_point() and model.main_input != TOKEN_IDS:
        raise LayersimError(
            f"`data` holds {tokens.dtype} of shape {tuple(tokens.shape)}, such as uint8 images, but {model.name} takes "
            f"`{model.main_input}`. Pass floats, with channels first: torch.as_tensor(data).float() / 255."
        )
    if tokens.dim() not in (1, 2) or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise LayersimError(
            f"`data` holds {tokens.dtype} of shape {tuple(tokens.shape)}, but {model.name} takes token ids, integers of shape "
            "(batch, pos) or (pos,). Name other inputs as its forward does, such as {'inputs_embeds': embeddings}."
        )


def refuse_path(text: Any) -> None:
    """Raise an error if a text is a path, which would be read as a text of a few tokens.

    Raises:
        LayersimError: the text is the path of a file or folder, or ends like a file name.
    """
    name = os.fspath(text) if isinstance(text, os.PathLike) else text
    if not isinstance(name, str) or len(name) > 300 or "\n" in name:
        return
    plain = not any(c.isspace() for c in name) or name.startswith((os.sep, f".{os.sep}", f"..{os.sep}", "~"))
    named = plain and name.lower().endswith(FILES)
    if isinstance(text, os.PathLike) or named or os.path.isfile(name) or (os.sep in name and os.path.isdir(name)):
        raise LayersimError(
            f"`data` is the path of a file or folder, {name!r}. Pass what it holds: Path(path).read_text(), split into texts, "
            "or datasets.load_from_disk(path)."
        )


def _tensor(values: Any) -> Tensor | None:
    """Convert values to a tensor; None if the rows have different lengths."""
    try:
        nested = isinstance(values, list) and values and isinstance(values[0], list | tuple | Tensor | np.ndarray)
        if nested and len({len(row) for row in values}) > 1:
            return None
        return number_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise not_ids(str(error) if isinstance(error, ValueError) else brief(values)) from error


def not_ids(given: str) -> LayersimError:
    """The error for a column that holds neither texts nor token ids."""
    return LayersimError(f"`data` holds neither texts nor token ids: {given}.")
