"""Reading of data of any kind: which of its named columns hold the tokens, texts, chats, images or other inputs of a model.

`Reader.items` goes through the data. What is no mapping becomes one: a tensor is a column of token ids, an image is a column of
pixels. `ColumnReader` then splits the columns of a mapping into texts and rows.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from ..core.errors import LOG, LayersimError
from ..core.wording import brief, with_article
from .columns import ColumnReader, further_inputs, group_column, groups_of_positions
from .data import Column, Data, Notes
from .input_names import EMBEDDINGS, OF_TOKENS, PIXELS, ROW_AXES, TOKEN_IDS, TOKENS, decoder_alone, reads_decoder
from .labels import LABELS, is_missing, number_tensor
from .row import ModelInputs, Row
from .tokenization import Text, is_chat
from .value_kinds import Level, as_plain, is_floats, is_image, is_images, is_row_of_ids, is_text, level_of_items

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

    @cached_property
    def columns(self) -> ColumnReader:
        """Splits named columns into texts, chats and rows."""
        return ColumnReader(self.data, self.model, self.notes, self.labelled)

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
        elif is_row_of_ids(data):
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
        groups = group_column(self.data)
        if self.data.column is None and groups is None:
            return
        without_columns = isinstance(data, str | np.ndarray | Tensor) or is_row_of_ids(data)
        if self.data.column is not None and without_columns:
            raise LayersimError(f"`column` is {self.data.column!r}, but `data` holds {brief(data)}, which has no columns.")
        if groups is not None and (without_columns or is_image(data)):
            raise LayersimError(
                f"`groups` is the name {groups!r}, but `data` holds {brief(data)}, which has no columns. Pass a "
                "sequence with one value for each row."
            )

    def _is_one_image(self, data: Any) -> bool:
        """Whether data is one image. An array of integers is one only to a model whose main input is pixels."""
        if isinstance(data, list) or not is_image(data):
            return False
        return self.model.main_input == PIXELS or not isinstance(data, np.ndarray | Tensor)

    def _items_of_iterable(self, data: Iterable[Any]) -> Iterator[Text | Row]:
        """Read the items one by one, each of which may be data of any kind again."""
        level = level_of_items(data)
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
        yield from self.columns.rows({column: table}, column, column, level)

    def _rows_of_image(self, image: Any) -> Iterator[Row]:
        """Yield the row that the model's processor makes of an image."""
        if self.model.main_input != PIXELS:
            raise LayersimError(
                f"`data` holds an image ({type(image).__name__}), but {self.model.name} takes `{self.model.main_input}`."
            )
        yield from self.columns.rows(processed([image], self.model), PIXELS, PIXELS, "batch")

    def _items_of_mapping(self, data: Mapping[str, Any], level: Level) -> Iterator[Text | Row]:
        """Choose the column of the main input, or of tokens, texts or chats, and read the others beside it."""
        columns = {name: as_plain(value) for name, value in data.items()}
        groups = self._groups_in(columns)
        images = image_column(columns, self.model, self._named_column)
        marks = self.data.selection.column
        columns_read = [*LABELS, self.model.mask_input, *filter(None, (marks, images))]
        if images is not None:
            columns, level = self._with_pixels(columns, images, level)
        main = self._main_column(columns, images)
        if main is not None:
            self._log_unread(columns, [*columns_read, main])
            name = main if main == EMBEDDINGS else self.model.main_input
            yield from self.columns.rows(columns, main, name, level, groups)
            return
        column = self._column_in(columns) if self.data.column is None else self.data.column
        yield from self._tokens_or_texts(columns, column, columns_read, level, groups)

    @property
    def _named_column(self) -> str | None:
        """The column that the user names; None if the user names none, or the two columns of pairs of texts."""
        return self.data.column if isinstance(self.data.column, str) else None

    def _with_pixels(self, columns: dict[str, Any], images: str, level: Level) -> tuple[dict[str, Any], Level]:
        """Add what the model's processor makes of a column of images. Also returns the level of the columns."""
        has_several = level != "row" and (isinstance(columns[images], list) or is_images(columns[images]))
        if has_several:
            return columns | processed(list(columns[images]), self.model), "batch"
        inputs = processed([columns[images]], self.model)
        return columns | {name: values[0] for name, values in inputs.items()}, "row"

    def _main_column(self, columns: Mapping[str, Any], images: str | None) -> str | None:
        """Name of the column read in place of token ids, such as pixels; None if the data has tokens, texts or chats.

        Args:
            columns: the columns by name.
            images: name of the column of images that the processor has read; None without one.
        """
        named = self._named_column
        if self.data.column is None or named == images:
            return main_column(columns, self.model)
        # The main input under another name.
        is_main_input = self.model.main_input != TOKEN_IDS and named is not None and is_floats(columns.get(named))
        return named if is_main_input else None

    def _column_in(self, columns: Mapping[str, Any]) -> str | None:
        """Name of the column of tokens, texts or chats, if the user names none; None if that is unclear."""
        if reads_decoder(self.model):
            column = self.model.token_input
            if columns.get(column) is None:
                raise decoder_alone(f"fields {list(columns)}, without `{column}`", self.model)
            return column
        text_column = find_column(columns)
        if text_column in (*TOKENS, "text", self.model.token_input):
            return text_column
        return next((name for name in columns if is_chat(columns[name])), text_column)

    def _groups_in(self, columns: dict[str, Any]) -> Any:
        """The values of the group column, which is removed from the columns unless it is also read as something else.

        Raises:
            LayersimError: the data has no such column, or it has a value for each position.
        """
        name = group_column(self.data)
        if name is None:
            return None
        if name not in columns:
            raise LayersimError(f"`groups` is {name!r}, which is no column of the data: it has {', '.join(columns)}.")
        model = self.model
        marks = self.data.selection.column
        if name in (*TOKENS, *OF_TOKENS, model.token_input, model.main_input, model.mask_input, marks):
            raise groups_of_positions(name)
        columns_read = (*model.inputs, model.main_input, model.token_input, *LABELS, *_as_names(self.data.column), marks)
        return columns[name] if name in columns_read else columns.pop(name)

    def _tokens_or_texts(
        self, columns: Mapping[str, Any], column: Column | None, columns_read: list[str], level: Level, groups: Any
    ) -> Iterator[Text | Row]:
        """Yield the rows of a column of token ids, or the texts or chats of a column, or the pairs of texts of two.

        Args:
            columns: the columns by name.
            column: name of the column, or of the two; None if it is unclear.
            columns_read: names of the columns that are read beside it.
            level: see `Level`.
            groups: the group of each row; None without a column of groups.
        """
        names = _as_names(column)
        if not set(names) & columns.keys() and is_chat(columns):
            raise LayersimError(
                f"`data` has one chat message per row, with the fields {list(columns)}. Pass a list of messages for each chat: "
                "[[{'role': 'user', 'content': '...'}, ...], ...]."
            )
        if not names or not set(names) <= columns.keys():
            raise unclear_columns_error(columns, column, self.model)
        values = columns[names[0]]
        has_texts = is_text(values)
        has_chats = is_chat(values)
        is_tokenised_here = has_texts or has_chats or is_missing(values)
        if names[0] in (*TOKENS, self.model.token_input) and self.data.column is None and has_texts:
            raise LayersimError(f"`{names[0]}` in the data is {brief(values)}; it must be token ids.")
        # Texts are tokenised here, so the outputs of an earlier tokenisation beside them are not inputs of the model.
        earlier_outputs = (TOKEN_IDS, *OF_TOKENS) if TOKEN_IDS in columns and is_tokenised_here else ()
        self._log_unread(columns, [*columns_read, *names, *earlier_outputs])
        inputs = further_inputs(columns, self.model, (*names, *earlier_outputs, self.model.mask_input))
        if has_chats:
            yield from self.columns.chats(columns, values, inputs, groups)
        elif is_tokenised_here:
            yield from self.columns.texts(columns, names, inputs, groups)
        else:
            yield from self.columns.rows(columns, names[0], self.model.token_input, level, groups)

    def _log_unread(self, columns: Mapping[str, Any], columns_read: list[str]) -> None:
        names = [name for name in columns if name not in (*self.model.inputs, self.model.main_input, *columns_read)]
        if names and not self.notes.unread:
            self.notes.unread = True
            LOG.warning("Columns of the data that are not read: %s", ", ".join(names))


def _as_names(column: Column | None) -> list[str]:
    """Names of the columns that hold the tokens, texts or chats: one, two for pairs of texts, none if unclear."""
    return [column] if isinstance(column, str) else list(column or ())


def main_column(data: Mapping[str, Any], model: ModelInputs) -> str | None:
    """Name of the column read in place of token ids: a main input such as pixels, or embeddings; None without such a column."""
    if model.token_input != TOKEN_IDS:
        return None
    if model.main_input != TOKEN_IDS and data.get(model.main_input) is not None:
        return model.main_input
    has_tokens = data.get(TOKEN_IDS) is not None
    has_embeddings = EMBEDDINGS in model.inputs and data.get(EMBEDDINGS) is not None
    return EMBEDDINGS if has_embeddings and not has_tokens else None


def image_column(data: Mapping[str, Any], model: ModelInputs, column: str | None) -> str | None:
    """Name of the column of images that the model's processor reads; None if there is none.

    Args:
        data: columns by name.
        model: the model.
        column: the column that the user names.

    Raises:
        LayersimError: there are several columns of images.
    """
    if PIXELS in data or PIXELS not in (model.main_input, *model.inputs):
        return None
    names = []
    for name, values in data.items():
        if name not in (TOKEN_IDS, *LABELS) and (is_image(values) or is_images(values)):
            names.append(name)
    if column is not None and (
        column in names or (column in data and model.main_input == PIXELS and not is_text(data[column]))
    ):
        # A column that is named may also hold whole numbers of another type.
        return None if is_floats(data[column]) else column
    if len(names) > 1:
        if model.main_input == PIXELS:
            remedy = f"Name one: column={names[0]!r}"
        else:
            remedy = f"Keep one: data.remove_columns({names[1:]})"
        raise LayersimError(f"`data` has several columns of images, {', '.join(names)}. {remedy}.")
    return names[0] if names else None


def find_column(data: Mapping[str, Any]) -> str | None:
    """Name of the column of texts or tokens; None if there are no or several candidates."""
    for name in (*TOKENS, "text"):
        if name in data:
            return name
    texts = [name for name in data if is_text(data[name])]
    empty = [name for name in data if is_missing(data[name]) and name not in LABELS]
    candidates = texts or empty
    return candidates[0] if len(candidates) == 1 else None


def unclear_columns_error(data: Mapping[str, Any], column: Any, model: ModelInputs) -> LayersimError:
    """The error for a mapping whose column of texts or tokens is ambiguous."""
    splits = [name for name in data if hasattr(data[name], "column_names")]
    remedy = f"Pass one split: data[{splits[0]!r}]" if splits else f"Name one: column={next(iter(data), None)!r}"
    main_input = "" if model.main_input == TOKEN_IDS else f" or `{model.main_input}`"
    option = f", and `column` is {column!r}" if column else ""
    return LayersimError(
        f"The columns of `data` are {brief(list(data))}{option}; it is unclear which holds the texts or token ids{main_input}. "
        f"{remedy}."
    )


def processed(images: list[Any], model: ModelInputs) -> dict[str, Tensor]:
    """A dict of the inputs that the model's processor makes from images; rows are the first axis.

    Raises:
        LayersimError: the model has no processor, or the processor returns another number of rows.
    """
    if model.processor is None:
        raise LayersimError(
            f"`data` contains images, and {model.name} has no image processor. Pass "
            "`Data(..., tokenizer=AutoImageProcessor.from_pretrained(name))`."
        )
    inputs = model.processor(images=[_as_image(image) for image in images], return_tensors="pt")
    if model.main_input == PIXELS and len(inputs[PIXELS]) != len(images):
        raise LayersimError(
            f"`data` has {len(images)} rows, but the processor makes {len(inputs[PIXELS])} images; a row of {model.name} "
            "is one image."
        )
    return {name: inputs[name] for name in inputs if name == model.main_input or name in model.inputs}


def _as_image(image: Any) -> Any:
    """Convert an integer image, as `datasets` formats return it, to uint8; other images are unchanged."""
    if not isinstance(image, list | np.ndarray | Tensor):
        return image
    table = np.asarray(image)
    return table.astype(np.uint8) if table.dtype.kind in "iu" else image


def labelled_without_tokens(data: Any, model: ModelInputs) -> bool:
    """Whether the data's first row has labels and no tokens.

    Args:
        data: data of any accepted kind. For an iterator the answer is False, because looking would consume a row.
        model: the model that the rows are for.
    """
    # An array without axes has no rows to look at.
    is_number = getattr(data, "shape", None) == ()
    if not _has_columns(data) and not is_number and hasattr(data, "__getitem__") and hasattr(data, "__len__") and len(data):
        # The first row, whatever the labels of a Series are.
        data = next(iter(data))
    if not _has_columns(data):
        return False
    return main_column(data, model) is not None and any(name in data for name in LABELS)


def _has_columns(data: Any) -> bool:
    """Whether data is a mapping, or a data frame. A `datasets.Dataset` is a sequence of rows."""
    return isinstance(data, Mapping) or (hasattr(data, "columns") and hasattr(data, "to_dict"))


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
