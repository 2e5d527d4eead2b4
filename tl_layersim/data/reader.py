"""Reading of texts, tables, mappings and tensors as an iterator over texts and rows of tokens."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import LOG, LayersimError
from ..core.wording import brief, with_article
from .data import Column, Data, Notes
from .images_of_rows import images_missing, split_images
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
    as_plain,
    decoder_alone,
    decoder_mask,
    find_column,
    further_inputs,
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
    unclear_columns_error,
    without_padding,
)
from .padding_masks import as_mask, mask_of, masked_warning
from .recordings import WAVES, cut_warning, masked_recording, without_padded_samples
from .row import NOTHING, ModelInputs, Row
from .tokenization import Text, chats_in, is_chat

ACCEPTED_DATA = (
    "texts, a token tensor (batch pos), mappings with input_ids or other inputs of the model by name, a datasets.Dataset or "
    "IterableDataset with a text, token or image column, or an iterable of these"
)
FILES = (".txt", ".md", ".csv", ".tsv", ".json", ".jsonl", ".parquet", ".arrow", ".npy", ".pt", ".safetensors", ".zip", ".gz")


@dataclass(frozen=True)
class Reader:
    """Reads data of any accepted kind as texts, chats and rows.

    Args:
        data: the data with its reading options.
        model: the model's inputs and processor.
        notes: counts of the pass, which are updated.
        labelled: whether to read labels. If False, a column with their name may hold anything.
    """

    data: Data
    model: ModelInputs
    notes: Notes
    labelled: bool = False

    @property
    def marks(self) -> str | None:
        """Name of the mask column that selects the counted positions; None if no column does."""
        return self.data.selection.column

    def items(self, data: Any, level: Level = "batch") -> Iterator[Text | Row]:
        """Yield the texts, chats and rows of tokens or other inputs, in the order of the data.

        Args:
            data: data of any accepted kind.
            level: see `Level`.
        """
        self._refuse_missing_columns(data)
        if isinstance(data, str):
            yield Text(data)
        elif isinstance(data, Row):
            yield data if self.labelled else replace(data, labels=None)
        elif isinstance(data, np.ndarray) and data.dtype.kind in "OUT":
            yield from self.items(data.tolist())
        elif self._is_one_image(data):
            yield from self._rows_of_image(data)
        elif is_images(data) and self.model.main_input == PIXELS and self.model.processor is not None:
            for image in data:
                yield from self._rows_of_image(image)
        elif isinstance(data, np.ndarray | Tensor):
            yield from self._rows_of_table(data, level)
        elif isinstance(data, Mapping):
            yield from self._items_of_mapping(data, level)
        elif hasattr(data, "columns") and hasattr(data, "to_dict"):
            # A pandas table, which iterates over the names of its columns.
            yield from self._items_of_mapping({name: data[name].tolist() for name in data.columns}, "batch")
        elif _is_row_of_ids(data):
            yield from self._rows_of_table(data, level)
        elif isinstance(data, list) and data and isinstance(data[0], Mapping) and self.data.column is None and is_chat(data):
            yield Text(None, messages=data)
        elif isinstance(data, tuple) and len(data) != 1:
            raise LayersimError(
                f"`data` holds batches of {len(data)} unnamed tensors, as from a DataLoader. Pass a mapping for each batch, "
                f"such as {{'{self.model.main_input}': x, 'label': y}} for (x, y)."
            )
        elif isinstance(data, Iterable) and not isinstance(data, bytes):
            yield from self._items_of_iterable(data)
        else:
            raise LayersimError(f"`data` holds {brief(data)}, {with_article(type(data).__name__)}; it must be {ACCEPTED_DATA}.")

    def _refuse_missing_columns(self, data: Any) -> None:
        """Raise an error if the user names a column, but the data has no columns."""
        if self.data.column is None and self._group_column is None:
            return
        without_columns = isinstance(data, str | np.ndarray | Tensor) or _is_row_of_ids(data)
        if self.data.column is not None and without_columns:
            raise LayersimError(f"`column` is {self.data.column!r}, but `data` holds {brief(data)}, which has no columns.")
        if self._group_column is not None and (without_columns or is_image(data)):
            raise LayersimError(
                f"`groups` is the name {self._group_column!r}, but `data` holds {brief(data)}, which has no columns. Pass a "
                "sequence with one value for each row."
            )

    def _is_one_image(self, data: Any) -> bool:
        """Whether data is one image. An array of integers is one only to a model whose main input is pixels."""
        if isinstance(data, list) or not is_image(data):
            return False
        return self.model.main_input == PIXELS or not isinstance(data, np.ndarray | Tensor)

    def _items_of_iterable(self, data: Iterable[Any]) -> Iterator[Text | Row]:
        level = _level_of_items(data)
        for number, item in enumerate(data):
            if number == 0:
                refuse_path(item)
            if data is self.data.source:
                self.data.note_items(number + 1)
            if is_missing(item):
                yield Text(None)
                continue
            # Tensors side by side at the top are batches; inside a batch they are tokens and something else.
            if isinstance(item, list) and len(item) > 1 and any(isinstance(x, Tensor) and x.dim() > 1 for x in item):
                item = tuple(item)
            yield from self.items(item, level)

    def _rows_of_table(self, values: Any, level: Level) -> Iterator[Row]:
        """Yield the rows of a tensor or array that holds token ids or the model's main input."""
        main_input = self.model.main_input
        table = number_tensor(values)
        images_or_features = table.is_floating_point() or (main_input in ROW_AXES and table.dim() > 2)
        is_main_input = table.numel() > 0 and main_input != TOKEN_IDS and images_or_features
        column = main_input if is_main_input else self.model.token_input
        yield from self._rows({column: table}, column, column, level)

    def _rows_of_image(self, image: Any) -> Iterator[Row]:
        if self.model.main_input != PIXELS:
            raise LayersimError(
                f"`data` holds an image ({type(image).__name__}), but {self.model.name} takes `{self.model.main_input}`."
            )
        yield from self._rows(processed([image], self.model), PIXELS, PIXELS, "batch")

    def _items_of_mapping(self, data: Mapping[str, Any], level: Level) -> Iterator[Text | Row]:
        data = {name: as_plain(value) for name, value in data.items()}
        groups = self._groups_in(data)
        column = self.data.column
        named_column = column if isinstance(column, str) else None
        images = image_column(data, self.model, named_column)
        columns_read = [*LABELS, self.model.mask_input]
        if self.marks:
            columns_read.append(self.marks)
        if images is not None:
            columns_read.append(images)
            has_several = level != "row" and (isinstance(data[images], list) or is_images(data[images]))
            if has_several:
                data |= processed(list(data[images]), self.model)
                level = "batch"
            else:
                inputs = processed([data[images]], self.model)
                data |= {name: values[0] for name, values in inputs.items()}
                level = "row"
        main = main_column(data, self.model) if column is None or named_column == images else None
        if (
            named_column is not None
            and named_column != images
            and self.model.main_input != TOKEN_IDS
            and is_floats(data.get(named_column))
        ):
            # The main input under another name.
            main = named_column
        if main is not None:
            self._log_unread(data, [*columns_read, main])
            name = main if main == EMBEDDINGS else self.model.main_input
            yield from self._rows(data, main, name, level, groups)
            return
        if column is None:
            column = self._column_in(data)
        yield from self._tokens_or_texts(data, column, columns_read, level, groups)

    def _column_in(self, data: Mapping[str, Any]) -> str | None:
        """Name of the column of tokens, texts or chats, if the user names none; None if that is unclear."""
        if reads_decoder(self.model):
            column = self.model.token_input
            if data.get(column) is None:
                raise decoder_alone(f"fields {list(data)}, without `{column}`", self.model)
            return column
        text_column = find_column(data)
        if text_column in (*TOKENS, "text", self.model.token_input):
            return text_column
        return next((name for name in data if is_chat(data[name])), text_column)

    @property
    def _group_column(self) -> str | None:
        """Name of the column that holds the group of each row; None if the groups are given otherwise."""
        return self.data.groups if isinstance(self.data.groups, str) else None

    def _groups_in(self, data: dict[str, Any]) -> Any:
        """The values of the group column, which is removed from the columns unless it is also read as something else.

        Raises:
            LayersimError: the data has no such column, or it has a value for each position.
        """
        name = self._group_column
        if name is None:
            return None
        if name not in data:
            raise LayersimError(f"`groups` is {name!r}, which is no column of the data: it has {', '.join(data)}.")
        of_positions = (*TOKENS, *OF_TOKENS, self.model.token_input, self.model.main_input, self.model.mask_input, self.marks)
        if name in of_positions:
            raise _groups_of_positions(name)
        column = self.data.column
        columns = [column] if isinstance(column, str) else list(column or ())
        columns_read = (*self.model.inputs, self.model.main_input, self.model.token_input, *LABELS, *columns, self.marks)
        return data[name] if name in columns_read else data.pop(name)

    def _tokens_or_texts(
        self, data: Mapping[str, Any], column: Column | None, columns_read: list[str], level: Level, groups: Any
    ) -> Iterator[Text | Row]:
        columns = [column] if isinstance(column, str) else list(column or ())
        if not set(columns) & data.keys() and is_chat(data):
            raise LayersimError(
                f"`data` has one chat message per row, with the fields {list(data)}. Pass a list of messages for each chat: "
                "[[{'role': 'user', 'content': '...'}, ...], ...]."
            )
        if not columns or not set(columns) <= data.keys():
            raise unclear_columns_error(data, column, self.model)
        values = data[columns[0]]
        has_texts = is_text(values)
        has_chats = is_chat(values)
        is_tokenised_here = has_texts or has_chats or is_missing(values)
        if columns[0] in (*TOKENS, self.model.token_input) and self.data.column is None and has_texts:
            raise LayersimError(f"`{columns[0]}` in the data is {brief(values)}; it must be token ids.")
        # Texts are tokenised here, so the outputs of an earlier tokenisation beside them are not inputs of the model.
        earlier_outputs = (TOKEN_IDS, *OF_TOKENS) if TOKEN_IDS in data and is_tokenised_here else ()
        self._log_unread(data, [*columns_read, *columns, *earlier_outputs])
        inputs = further_inputs(data, self.model, (*columns, *earlier_outputs, self.model.mask_input))
        if has_chats:
            yield from self._chats(data, values, inputs, groups)
        elif is_tokenised_here:
            yield from self._texts(data, columns, inputs, groups)
        else:
            yield from self._rows(data, columns[0], self.model.token_input, level, groups)

    def _chats(self, data: Mapping[str, Any], values: Any, inputs: Mapping[str, Any], groups: Any) -> Iterator[Text]:
        """Yield the chats of a column."""
        chats = chats_in(values)
        is_one_row = len(chats) == 1 and (isinstance(values, Mapping) or any(isinstance(item, Mapping) for item in values))
        inputs_of_rows = rows_of(inputs, None if is_one_row else len(chats))
        labels = self._class_labels(data, len(chats))
        groups_of_rows = _values_by_row(self._group_column, groups, len(chats))
        for chat, label, inputs_of_row, group in zip(chats, labels, inputs_of_rows, groups_of_rows, strict=True):
            yield Text(None, label, messages=chat, inputs=inputs_of_row, group=group)

    def _texts(self, data: Mapping[str, Any], columns: list[str], inputs: Mapping[str, Any], groups: Any) -> Iterator[Text]:
        """Yield the texts of a column, or the pairs of texts of two columns."""
        is_one_row = not isinstance(data[columns[0]], list)
        sides = [[data[name]] if is_one_row else data[name] for name in columns]
        if len({len(side) if isinstance(side, list) else None for side in sides}) > 1:
            contents = " and ".join(f"{brief(side)} in {name!r}" for name, side in zip(columns, sides, strict=True))
            raise LayersimError(f"`data` has {contents}; both columns must hold one text for each row.")
        texts = list(zip(*sides, strict=True))
        inputs_of_rows = rows_of(inputs, None if is_one_row else len(texts))
        labels = self._class_labels(data, len(texts))
        groups_of_rows = _values_by_row(self._group_column, groups, len(texts))
        for parts, label, inputs_of_row, group in zip(texts, labels, inputs_of_rows, groups_of_rows, strict=True):
            text = parts[0]
            second = parts[1] if len(parts) > 1 else None
            # A pair without one of its texts is a row without text.
            if any(is_missing(part) for part in parts):
                text = None
                second = None
            yield Text(text, label, second, inputs=inputs_of_row, group=group)

    def _log_unread(self, data: Mapping[str, Any], columns_read: list[str]) -> None:
        names = [name for name in data if name not in (*self.model.inputs, self.model.main_input, *columns_read)]
        if names and not self.notes.unread:
            self.notes.unread = True
            LOG.warning("Columns of the data that are not read: %s", ", ".join(names))

    def _class_labels(self, data: Mapping[str, Any], count: int) -> list[int | None]:
        labels = labels_in(data) if self.labelled else None
        if labels is None:
            return [None] * count
        return _values_by_row("labels", whole_numbers(labels).reshape(-1).tolist(), count)

    def _rows(self, data: Mapping[str, Any], column: str, name: str, level: Level, groups: Any = None) -> Iterator[Row]:
        """Yield rows of token ids, or of another input such as pixels or embeddings.

        Args:
            data: columns by name.
            column: the column of the tokens or of the other values.
            name: name of the model's input that takes them.
            level: see `Level`.
            groups: the group of each row; None without a column of groups.
        """
        model = self.model
        has_tokens = name == model.token_input
        if has_tokens:
            is_one_row, values_of_rows = _token_rows(column, data[column], model)
        else:
            is_one_row, values_of_rows = main_rows(name, data[column], level, model)
        count = None if is_one_row else len(values_of_rows)
        mask = data.get(model.mask_input)
        labels = labels_in(data) if self.labelled else None
        # A table of masks is checked at once, masks of different lengths row by row.
        masks = _values_by_row(model.mask_input, as_mask(mask, model.mask_input) if hasattr(mask, "ndim") else mask, count)
        if has_tokens and mask is None:
            masks = self._derived_masks(values_of_rows)
        if name == WAVES:
            values_of_rows = self._recordings(values_of_rows, masks)
            # The recordings have no padding any more.
            mask = None
        marks = data.get(self.marks) if self.marks else None
        marks_of_rows = _values_by_row(self.marks, marks, count)
        labels_of_rows = _values_by_row("labels", labels, count)
        skipped = [column, name, model.mask_input]
        if not has_tokens:
            # Without token ids, the mask is not passed on: `attention_mask` would belong to tokens.
            skipped.append(MASK)
        columns = further_inputs(data, model, skipped)
        of_images = frozenset[str]()
        images_of_rows: list[dict[str, Tensor]] = [{} for _ in values_of_rows]
        if has_tokens:
            of_images, images_of_rows = split_images(columns, values_of_rows, is_one_row, model)
            self.notes.once(images_missing(columns, values_of_rows, model) or "")
        inputs_of_rows = rows_of({key: column for key, column in columns.items() if key not in of_images}, count)
        groups_of_rows = _values_by_row(self._group_column, groups, count)
        if self._group_column in LABELS:
            # A column of labels has one value for each row, or one for each position.
            for group in groups_of_rows:
                if isinstance(group, list) or getattr(group, "ndim", 0) > 0:
                    raise _groups_of_positions(self._group_column)
        has_patches = name == PIXELS and model.pixel_axes == 2
        has_length = has_tokens or has_patches or name == EMBEDDINGS
        for values, mask_of_row, label, marks_of_row, further, images, group in zip(
            values_of_rows, masks, labels_of_rows, marks_of_rows, inputs_of_rows, images_of_rows, groups_of_rows, strict=True
        ):
            length = len(values) if has_length else 1
            inputs = without_padding(further, model) | images
            if not has_tokens:
                refuse_integers(name, values)
                inputs = {name: values} | inputs
            attention = torch.ones(length, dtype=torch.bool)
            if has_tokens or mask is not None:
                attention = _row_mask(mask_of_row, length, model.mask_input, unknown=length == 1 and not has_length)
            # Padding on either side is removed unless it is counted: rows are padded again on the right, so positions do not
            # depend on the side.
            places = (attention | (has_tokens and self.data.positions == "padded")).nonzero()[:, 0]
            if not len(places):
                # An empty row still counts as a row of the data.
                yield replace(NOTHING, group=group)
                continue
            row = Row(
                values if has_tokens else torch.zeros(length, dtype=torch.int64),
                attention,
                None if labels is None else _row_labels(label, length),
                marks=None if self.marks is None or marks is None else _row_mask(marks_of_row, length, self.marks),
                group=group,
                inputs=inputs,
                positional=positional(inputs, length if has_tokens or name == EMBEDDINGS else None, model) - of_images,
                of_images=of_images,
                has_tokens=has_tokens,
            )
            if len(places) < length:
                row = row[int(places[0]) : int(places[-1]) + 1]
            yield row

    def _recordings(self, waves: list[Tensor], masks: list[Any]) -> list[Tensor]:
        """Recordings without padding: that of their masks, or else zeros at their ends."""
        if any(mask is not None for mask in masks):
            column = self.model.mask_input
            return [masked_recording(wave, mask, column) for wave, mask in zip(waves, masks, strict=True)]
        recordings, count = without_padded_samples(waves)
        if count:
            self.notes.once(cut_warning(count, len(waves)))
        return recordings

    def _derived_masks(self, rows: list[Tensor]) -> list[Tensor]:
        """Derive attention masks from padding ids. Rows of equal length are processed together."""
        have_equal_length = len({len(row) for row in rows}) == 1
        tables = [torch.stack(rows)] if have_equal_length else [row[None] for row in rows]
        masks: list[Tensor] = []
        for table in tables:
            # A table of empty rows has masks without positions.
            masks.extend(self._derived_mask(table) if table.numel() else table.bool())
        return masks

    def _derived_mask(self, rows: Tensor) -> Tensor:
        mask = decoder_mask(rows, self.model) if reads_decoder(self.model) else mask_of(rows, self.model)
        self.notes.runs.add(rows, self.model)
        if mask is None:
            return torch.ones_like(rows, dtype=torch.bool)
        self.notes.masked += int((~mask).any(1).sum())
        self.notes.once(masked_warning(rows[~mask].tolist()))
        return mask


def _token_rows(column: str, values: Any, model: ModelInputs) -> tuple[bool, list[Tensor]]:
    """Convert values to rows of token ids. Returns whether they are a single row, and the rows."""
    is_nested = isinstance(values, list) and values and isinstance(values[0], list | tuple | Tensor | np.ndarray)
    is_ragged = False
    # A number among the rows has no length.
    with suppress(TypeError):
        is_ragged = bool(is_nested) and len({len(row) for row in values if row is not None}) > 1
    allowed = "only texts, or only rows of token ids"
    tables = [number_tensor(row, column, allowed) for row in values] if is_ragged else [number_tensor(values, column, allowed)]
    axes = (1,) if is_ragged else (1, 2)
    rows: list[Tensor] = []
    for table in tables:
        unlike_ids = table.is_floating_point() or table.dtype == torch.bool
        # An empty list becomes a float tensor.
        if table.numel() and (unlike_ids or table.dim() not in axes):
            raise LayersimError(
                f"`data` holds {table.dtype} of shape {tuple(table.shape)}, which are no token ids: these are integers of "
                f"shape (batch, pos) or (pos,). The main input of {model.name} is `{model.main_input}`; others are passed "
                "under their own names, as {name: values}."
            )
        if table.dim() > 1:
            rows += table.long()
        else:
            rows.append(table.long())
    is_one_row = not is_ragged and table.dim() == 1
    return is_one_row, rows


def _groups_of_positions(name: str) -> LayersimError:
    return LayersimError(
        f"`groups` is {name!r}, a column with a value for each position; it must be a column with one value for each row, such "
        "as the name of its document."
    )


def _values_by_row(name: str | None, column: Any, count: int | None) -> list[Any]:
    """Split a column of masks or labels into one item per row; each is None if the data lacks the column.

    Args:
        name: name of the column.
        column: its values.
        count: number of rows; None if the values belong to a single row without an axis of rows.
    """
    rows = 1 if count is None else count
    if column is None:
        return [None] * rows
    is_number = not isinstance(column, list | tuple) and not getattr(column, "ndim", 0)
    values = [column] if count is None or is_number else list(column)
    if len(values) != rows:
        raise LayersimError(f"`{name}` has {len(values)} rows; it must have {rows}, one for each row of the data.")
    return values


def _row_labels(label: Any, length: int) -> Tensor:
    """The labels of a row, one for each position. A single class is repeated at every position."""
    labels = whole_numbers(label)
    if labels.numel() != 1 and labels.shape != (length,):
        raise LayersimError(
            f"`labels` has shape {tuple(labels.shape)} for a row of {length} positions; it must hold one label for each row or "
            "each position."
        )
    return labels.reshape(-1).expand(length)


def _row_mask(values: Any, length: int, column: str, unknown: bool = False) -> Tensor:
    """The mask of one row (`pos`). It must be all ones if the number of positions is unknown.

    Raises:
        LayersimError: the mask hides parts of an image or of features, or has the wrong shape.
    """
    mask = as_mask(values, column)
    if mask.shape == (length,):
        return mask
    if not unknown:
        raise LayersimError(
            f"`{column}` has shape {tuple(mask.shape)} for a row of {length} positions; it must have one value for each "
            "position."
        )
    if not bool(mask.all()):
        raise LayersimError(
            f"`{column}` of shape {tuple(mask.shape)} has zeros, but a row without token ids must have no padding. Pass each "
            "row at its own length with `batch_size=1`, or pass `inputs_embeds`."
        )
    return torch.ones(length, dtype=torch.bool)


def _is_row_of_ids(data: Any) -> bool:
    """Whether data is a list of ints, a single row of token ids."""
    return isinstance(data, list) and bool(data) and all(isinstance(x, int) and not isinstance(x, bool) for x in data)


def _level_of_items(data: Any) -> Level:
    """Kind of the items of an iterable: "row" for a data set, "batch" for a DataLoader, else "either"."""
    if hasattr(data, "column_names") and hasattr(data, "features"):
        return "row"
    return "either" if getattr(data, "batch_sampler", None) is None else "batch"


def refuse_path(text: Any) -> None:
    """Raise an error if a text is a path. It would be read as a text of a few tokens.

    Raises:
        LayersimError: the text is a `PathLike`, is the path of an existing file or folder, or ends like a file name.
    """
    name = os.fspath(text) if isinstance(text, os.PathLike) else text
    if not isinstance(name, str) or "\n" in name:
        return
    # "notes.txt" and "./my notes.txt" name files, also if they do not exist; "see notes.txt" is a text.
    starts = (os.sep, f".{os.sep}", f"..{os.sep}", "~")
    is_file_name = name.lower().endswith(FILES) and (name.startswith(starts) or not re.search(r"\s", name))
    # A word such as "docs" is a text, also if the working folder has a folder of this name.
    if isinstance(text, os.PathLike) or is_file_name or os.path.isfile(name) or (os.sep in name and os.path.isdir(name)):
        raise LayersimError(
            f"`data` is the path of a file or folder, {name!r}. Pass its contents: Path(path).read_text(), split into texts, "
            "or datasets.load_from_disk(path)."
        )
