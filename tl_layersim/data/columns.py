"""Named columns of the data as texts, chats, and rows of a model's inputs.

`Reader` says which columns these are. Each is split by row here, whether its values come as one table, as a list of rows or
without an axis of rows, and checked: a row of tokens has positions, a mask, labels and further inputs of the same length.

An input has one value for each position of its row, such as segment ids and embeddings, or any values for the whole row, such
as pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..core.wording import brief
from .data import Data, Notes
from .images_of_rows import images_missing, split_images
from .input_names import EMBEDDINGS, MASK, PIXELS, ROW_AXES, SHARED, TOKEN_IDS, other_stack, reads_decoder
from .labels import LABELS, is_missing, labels_in, number_tensor, whole_numbers
from .padding_masks import as_mask, mask_of, masked_warning
from .recordings import WAVES, cut_warning, masked_recording, without_padded_samples
from .row import NOTHING, ModelInputs, Row
from .tokenization import Text, chats_in
from .value_kinds import Level

# Numbers of channels of images.
CHANNELS = (1, 2, 3, 4)


class RowColumns(NamedTuple):
    """Inputs, masks and labels that the rows of one mapping have.

    Attributes:
        name: the input of the model that each row has, such as its token ids.
        has_tokens: whether this input is the token ids.
        has_length: whether its first axis is the positions of the row.
        has_masks: whether each row has an attention mask.
        has_labels: whether each row has labels.
        mark_column: the column with the mask of the counted positions; None if the data has none.
        of_images: names of the inputs with one entry for each image of a row.
    """

    name: str
    has_tokens: bool
    has_length: bool
    has_masks: bool
    has_labels: bool
    mark_column: str | None
    of_images: frozenset[str]


class RowValues(NamedTuple):
    """The values of one row in the columns of a mapping.

    Attributes:
        values: token ids (`pos`), or another input such as pixels.
        mask: the attention mask; None if there is none.
        label: the class of the row, or a label for each position; None if there are no labels.
        marks: the mask of the counted positions; None if there is none.
        further: further inputs by name.
        images: the tables of the images of the row by name.
        group: the group of the row; None without a column of groups.
    """

    values: Tensor
    mask: Any
    label: Any
    marks: Any
    further: dict[str, Tensor]
    images: dict[str, Tensor]
    group: Any


def group_column(data: Data) -> str | None:
    """Name of the column that holds the group of each row; None if the groups are given otherwise."""
    return data.groups if isinstance(data.groups, str) else None


@dataclass(frozen=True)
class ColumnReader:
    """Splits named columns into texts, chats and rows.

    Args:
        data: the data with its reading options.
        model: the model's inputs and processor.
        notes: counts of the pass, which are updated.
        labelled: whether to read labels. If False, a column with their name may hold anything.
    """

    data: Data
    model: ModelInputs
    notes: Notes
    labelled: bool

    def texts(self, columns: Mapping[str, Any], names: list[str], inputs: Mapping[str, Any], groups: Any) -> Iterator[Text]:
        """Yield the texts of a column, or the pairs of texts of two columns.

        Args:
            columns: the columns by name.
            names: names of the columns of texts, one or two.
            inputs: columns of further inputs.
            groups: the group of each text; None without a column of groups.
        """
        is_one_row = not isinstance(columns[names[0]], list)
        sides = [[columns[name]] if is_one_row else columns[name] for name in names]
        if len({len(side) if isinstance(side, list) else None for side in sides}) > 1:
            contents = " and ".join(f"{brief(side)} in {name!r}" for name, side in zip(names, sides, strict=True))
            raise LayersimError(f"`data` has {contents}; both columns must hold one text for each row.")
        texts = list(zip(*sides, strict=True))
        inputs_of_rows = _rows_of(inputs, None if is_one_row else len(texts))
        labels = self._class_labels(columns, len(texts))
        groups_of_rows = _values_by_row(group_column(self.data), groups, len(texts))
        for parts, label, inputs_of_row, group in zip(texts, labels, inputs_of_rows, groups_of_rows, strict=True):
            text = parts[0]
            second = parts[1] if len(parts) > 1 else None
            # A pair without one of its texts is a row without text.
            if any(is_missing(part) for part in parts):
                text = None
                second = None
            yield Text(text, label, second, inputs=inputs_of_row, group=group)

    def chats(self, columns: Mapping[str, Any], values: Any, inputs: Mapping[str, Any], groups: Any) -> Iterator[Text]:
        """Yield the chats of a column.

        Args:
            columns: the columns by name.
            values: the column of chats.
            inputs: columns of further inputs.
            groups: the group of each chat; None without a column of groups.
        """
        chats = chats_in(values)
        is_one_row = len(chats) == 1 and (isinstance(values, Mapping) or any(isinstance(item, Mapping) for item in values))
        inputs_of_rows = _rows_of(inputs, None if is_one_row else len(chats))
        labels = self._class_labels(columns, len(chats))
        groups_of_rows = _values_by_row(group_column(self.data), groups, len(chats))
        for chat, label, inputs_of_row, group in zip(chats, labels, inputs_of_rows, groups_of_rows, strict=True):
            yield Text(None, label, messages=chat, inputs=inputs_of_row, group=group)

    def _class_labels(self, columns: Mapping[str, Any], count: int) -> list[int | None]:
        """The class of each text; None for each if the data has no labels."""
        labels = labels_in(columns) if self.labelled else None
        if labels is None:
            return [None] * count
        return _values_by_row("labels", whole_numbers(labels).reshape(-1).tolist(), count)

    def rows(self, columns: Mapping[str, Any], column: str, name: str, level: Level, groups: Any = None) -> Iterator[Row]:
        """Yield rows of token ids, or of another input such as pixels or embeddings.

        Args:
            columns: the columns by name.
            column: the column of the tokens or of the other values.
            name: name of the model's input that takes them.
            level: see `Level`.
            groups: the group of each row; None without a column of groups.
        """
        model = self.model
        has_tokens = name == model.token_input
        if has_tokens:
            is_one_row, values_of_rows = _token_rows(column, columns[column], model)
        else:
            is_one_row, values_of_rows = _main_rows(name, columns[column], level, model)
        count = None if is_one_row else len(values_of_rows)
        mask = columns.get(model.mask_input)
        labels = labels_in(columns) if self.labelled else None
        masks = self._masks_of_rows(mask, values_of_rows, count, has_tokens)
        if name == WAVES:
            values_of_rows = self._recordings(values_of_rows, masks)
            # The recordings have no padding any more.
            mask = None
        mark_column = self.data.selection.column
        marks = columns.get(mark_column) if mark_column else None
        marks_of_rows = _values_by_row(mark_column, marks, count)
        labels_of_rows = _values_by_row("labels", labels, count)
        of_images, images_of_rows, further_of_rows = self._further_inputs(columns, column, name, values_of_rows, count)
        groups_of_rows = self._groups_of_rows(groups, count)
        has_patches = name == PIXELS and model.pixel_axes == 2
        present = RowColumns(
            name,
            has_tokens,
            has_length=has_tokens or has_patches or name == EMBEDDINGS,
            has_masks=has_tokens or mask is not None,
            has_labels=labels is not None,
            mark_column=None if marks is None else mark_column,
            of_images=of_images,
        )
        for row_values in zip(
            values_of_rows, masks, labels_of_rows, marks_of_rows, further_of_rows, images_of_rows, groups_of_rows, strict=True
        ):
            yield self._row(present, RowValues(*row_values))

    def _row(self, present: RowColumns, row_values: RowValues) -> Row:
        """The row of these values, without padding at its ends."""
        values = row_values.values
        length = len(values) if present.has_length else 1
        inputs = _without_padding(row_values.further, self.model) | row_values.images
        if not present.has_tokens:
            refuse_integers(present.name, values)
            inputs = {present.name: values} | inputs
        attention = torch.ones(length, dtype=torch.bool)
        if present.has_masks:
            unknown_length = length == 1 and not present.has_length
            attention = _row_mask(row_values.mask, length, self.model.mask_input, unknown_length)
        # Padding on either side is removed unless it is counted: rows are padded again on the right, so positions do not
        # depend on the side.
        counts_padding = present.has_tokens and self.data.positions == "padded"
        places = (attention | counts_padding).nonzero()[:, 0]
        if not len(places):
            # An empty row still counts as a row of the data.
            return replace(NOTHING, group=row_values.group)
        labels = _row_labels(row_values.label, length) if present.has_labels else None
        marks = None
        if present.mark_column is not None:
            marks = _row_mask(row_values.marks, length, present.mark_column)
        token_length = length if present.has_tokens or present.name == EMBEDDINGS else None
        row = Row(
            values if present.has_tokens else torch.zeros(length, dtype=torch.int64),
            attention,
            labels,
            marks=marks,
            group=row_values.group,
            inputs=inputs,
            positional=_positional(inputs, token_length, self.model) - present.of_images,
            of_images=present.of_images,
            has_tokens=present.has_tokens,
        )
        if len(places) < length:
            row = row[int(places[0]) : int(places[-1]) + 1]
        return row

    def _masks_of_rows(self, mask: Any, rows: list[Tensor], count: int | None, has_tokens: bool) -> list[Any]:
        """The attention mask of each row: that of the data, or for tokens the mask that their padding ids give."""
        if has_tokens and mask is None:
            return list(self._derived_masks(rows))
        # A table of masks is checked at once, masks of different lengths row by row.
        column = self.model.mask_input
        return _values_by_row(column, as_mask(mask, column) if hasattr(mask, "ndim") else mask, count)

    def _further_inputs(
        self, columns: Mapping[str, Any], column: str, name: str, rows: list[Tensor], count: int | None
    ) -> tuple[frozenset[str], list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        """The inputs beside the tokens or the main input.

        Returns:
            Names of the tables of images; these tables for each row; and the other inputs of each row.
        """
        has_tokens = name == self.model.token_input
        skipped = [column, name, self.model.mask_input]
        if not has_tokens:
            # Without token ids, the mask is not passed on: `attention_mask` would belong to tokens.
            skipped.append(MASK)
        inputs = further_inputs(columns, self.model, skipped)
        of_images = frozenset[str]()
        images_of_rows: list[dict[str, Tensor]] = [{} for _ in rows]
        if has_tokens:
            of_images, images_of_rows = split_images(inputs, rows, count is None, self.model)
            self.notes.once(images_missing(inputs, rows, self.model) or "")
        other_inputs = {key: values for key, values in inputs.items() if key not in of_images}
        return of_images, images_of_rows, _rows_of(other_inputs, count)

    def _groups_of_rows(self, groups: Any, count: int | None) -> list[Any]:
        column = group_column(self.data)
        groups_of_rows = _values_by_row(column, groups, count)
        if column in LABELS:
            # A column of labels has one value for each row, or one for each position.
            for group in groups_of_rows:
                if isinstance(group, list) or getattr(group, "ndim", 0) > 0:
                    raise groups_of_positions(column)
        return groups_of_rows

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
        mask = _decoder_mask(rows, self.model) if reads_decoder(self.model) else mask_of(rows, self.model)
        self.notes.runs.add(rows, self.model)
        if mask is None:
            return torch.ones_like(rows, dtype=torch.bool)
        self.notes.masked += int((~mask).any(1).sum())
        self.notes.once(masked_warning(rows[~mask].tolist()))
        return mask


def further_inputs(data: Mapping[str, Any], model: ModelInputs, skipped: Sequence[str | None]) -> dict[str, Any]:
    """A dict of the columns that the model takes as further inputs. Columns of None and those in `skipped` are left out."""
    names = [name for name in model.inputs if name not in skipped]
    return {name: data[name] for name in names if data.get(name) is not None}


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


def _main_rows(name: str, values: Any, level: Level, model: ModelInputs) -> tuple[bool, list[Tensor]]:
    """Split the main input into rows. Returns whether it is a single row without an axis of rows, and the rows.

    Args:
        name: name of the input.
        values: values of one row, or of several in their first axis.
        level: "row" for the values of one row, "batch" for several rows, "either" if unknown.
        model: the model.

    Raises:
        LayersimError: pixels may be one image or rows of patches, or are not what the model takes.
    """
    is_list = isinstance(values, list | tuple)
    first = number_tensor(values[0] if is_list and len(values) else values, name)
    axes = first.dim() + is_list
    row_axes = ROW_AXES.get(name)
    if name == PIXELS:
        row_axes = _pixel_axes(first.shape, axes, level, model)
    if row_axes is not None:
        is_one_row = level == "row" or axes <= row_axes
    else:
        is_one_row = level == "row" or (level == "either" and axes < 2)
    if is_one_row:
        return True, [number_tensor(values, name)]
    rows = [number_tensor(value, name) for value in values] if is_list else list(first)
    return False, rows


def _pixel_axes(shape: torch.Size, axes: int, level: Level, model: ModelInputs) -> int:
    """Number of axes of one row of pixels: 3 for an image, 2 for patches that are cut out already.

    Args:
        shape: shape of the values, or of the first item of a list.
        axes: number of axes of all values.
        level: see `Level`.
        model: the model.

    Raises:
        LayersimError: pixels may be one image or rows of patches, or are not what the model takes.
    """
    pixels = f"`{PIXELS}` in the data has shape {' x '.join(map(str, shape))}"
    # Three axes without an axis of rows, or with one.
    unclear = axes == len(shape) == 3 and level != "row"
    looks_like_image = shape[0] in CHANNELS
    if model.pixel_axes == 2:
        if axes > 3:
            raise LayersimError(f"{pixels}; {model.name} takes patches as its processor returns them: batch x patch x width.")
        return 2
    if model.pixel_axes == 3:
        if unclear and model.channels not in (None, shape[0]):
            raise LayersimError(
                f"{pixels}; {model.name} takes images of {model.channels} channels: batch x {model.channels} x height x width."
            )
        return 3
    if unclear and looks_like_image and level == "either":
        # An item of a list or a stream is one row of the data unless its shape says otherwise.
        return 3
    if unclear and looks_like_image:
        raise LayersimError(
            f"{pixels}, which may be one image or a batch of patches. Pass an image as batch x channel x height x width, and "
            "patches as a list of rows, each patch x width."
        )
    return 2 if axes <= 3 else 3


def _rows_of(inputs: Mapping[str, Any], count: int | None) -> list[dict[str, Tensor]]:
    """Split inputs into one mapping per row.

    Args:
        inputs: columns of inputs.
        count: number of rows; None if the values are one row without an axis of rows.
    """
    columns = {name: _tensors_by_row(name, values, count) for name, values in inputs.items()}
    rows = []
    for number in range(1 if count is None else count):
        rows.append({name: column[number] for name, column in columns.items()})
    return rows


def _tensors_by_row(name: str, values: Any, count: int | None) -> list[Tensor]:
    """Split the values of an input by row. `count` is None for a single row without an axis of rows.

    Raises:
        LayersimError: the values have another number of rows.
    """
    if count is None:
        table = number_tensor(values, name)
        # Position ids and the like may come with an axis of rows, `1 pos`.
        return [table[0] if name in SHARED and table.dim() == 2 and len(table) == 1 else table]
    if isinstance(values, list | tuple) and len(values) == count:
        return [number_tensor(value, name) for value in values]
    table = number_tensor(values, name)
    if name in SHARED and table.dim() and len(table) == 1:
        table = table.expand(count, *table.shape[1:])
    if table.dim() == 0 or len(table) != count:
        raise LayersimError(
            f"`{name}` in the data has shape {tuple(table.shape)}; it must have an entry for each of the {count} rows."
        )
    return list(table)


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


def _positional(inputs: Mapping[str, Tensor], length: int | None, model: ModelInputs) -> frozenset[str]:
    """Names of the inputs with one value per position, such as embeddings, segment ids or position ids.

    Args:
        inputs: inputs of the row.
        length: number of tokens or embeddings; None for a row of other inputs.
        model: the model.
    """
    measures_decoder = model.token_input != TOKEN_IDS
    names = set()
    for name, values in inputs.items():
        # Those of the other stack belong to its own tokens, also where they are as many.
        belongs_to_tokens = name.startswith("decoder_") == measures_decoder and not values.is_floating_point()
        if (
            (name == EMBEDDINGS and not measures_decoder)
            or (name == PIXELS and model.pixel_axes == 2)
            or (length is not None and belongs_to_tokens and values.shape[:1] == (length,))
        ):
            names.add(name)
    return frozenset(names)


def _without_padding(inputs: Mapping[str, Tensor], model: ModelInputs) -> dict[str, Tensor]:
    """Remove padding from one row of inputs to the unmeasured encoder or decoder, and add a mask.

    Without a mask, the encoder's padding ids are dropped. All positions of a decoder are kept.

    Args:
        inputs: inputs of one row.
        model: the model.

    Raises:
        LayersimError: the mask has the wrong shape, or hides all positions.
    """
    mask, *names = other_stack(model)
    names = [name for name in names if name in inputs]
    if not names:
        return dict(inputs)
    # Token ids if they are there, else embeddings.
    first_values = inputs[names[0]]
    length = len(first_values)
    attended = torch.ones(length, dtype=torch.bool)
    if mask in inputs:
        attended = as_mask(inputs[mask], mask)
    elif names[0] == TOKEN_IDS:
        derived = mask_of(first_values[None], model)
        if derived is not None:
            attended = derived[0]
    if attended.shape != (length,) or not bool(attended.any()):
        raise LayersimError(
            f"`{mask}` has shape {tuple(attended.shape)} and {int(attended.sum())} ones; it must have one value for each of "
            f"the {length} positions of `{names[0]}`, and at least one 1."
        )
    places = attended.nonzero()[:, 0]
    span = slice(int(places[0]), int(places[-1]) + 1)
    cut = {name: inputs[name][span] for name in names}
    cut[mask] = attended[span].long()
    return dict(inputs) | cut


def _decoder_mask(rows: Tensor, model: ModelInputs) -> Tensor | None:
    """Attention mask of decoder tokens, derived from padding ids; None without padding.

    The first token is attended, also if it equals the padding id.

    Raises:
        LayersimError: padding precedes other tokens.
    """
    mask_after_first = mask_of(rows[:, 1:], model)
    if mask_after_first is None:
        return None
    starts_with_padding = ~mask_after_first[:, 0] & mask_after_first.any(1)
    if bool(starts_with_padding.any()):
        raise LayersimError(
            f"`{model.mask_input}` must be passed, because {int(starts_with_padding.sum())} of {len(rows)} rows of "
            f"`{model.token_input}` start with padding."
        )
    return torch.cat([torch.ones_like(mask_after_first[:, :1]), mask_after_first], 1)


def refuse_integers(name: str, values: Tensor) -> None:
    """Raise an error if pixels or features are integers. Models would convert them to floats without scaling."""
    if name in ROW_AXES and not values.is_floating_point():
        raise LayersimError(
            f"`{name}` is {values.dtype} of shape {tuple(values.shape)}; it must be floating-point numbers, as the model's "
            "processor returns."
        )


def groups_of_positions(name: str) -> LayersimError:
    """The error for groups in a column with a value for each position."""
    return LayersimError(
        f"`groups` is {name!r}, a column with a value for each position; it must be a column with one value for each row, such "
        "as the name of its document."
    )
