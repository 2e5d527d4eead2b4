"""Rows without token ids: images, audio features, embeddings and other floating-point inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import LayersimError
from .inputs import (
    EMBEDDINGS,
    PIXELS,
    TOKEN_IDS,
    Level,
    accepted,
    as_values,
    by_row,
    is_floats,
    is_image,
    is_images,
    is_text,
    main_column,
    main_rows,
    positional,
    refuse_integers,
    without_padding,
)
from .labels import LABELS, whole_numbers
from .padding import as_mask
from .rows import NOTHING, ModelInputs, Row

MASK = "attention_mask"


def rows_without_tokens(data: Mapping[str, Any], main: str, level: Level, labels: Any, model: ModelInputs) -> Iterator[Row]:
    """Rows of a mapping whose main input is not token ids.

    Args:
        data: columns by name.
        main: the column of the main input.
        level: see `inputs.Level`.
        labels: labels of the rows; None if there are none.
        model: the model that the rows are for.
    """
    name = main if main == EMBEDDINGS else model.main_input
    values = main_rows(name, data[main], level)
    refuse_integers(name, values[0])
    count, alone = len(values), len(values) == 1
    further = {
        other: [as_values(other, column)] if alone and _is_row(other, column, level) else by_row(other, column, count)
        for other, column in accepted(data, model, (main, name, MASK)).items()
    }
    targets = None if labels is None else _row_targets(whole_numbers(labels), count)
    for i, value in enumerate(values):
        inputs = {name: value} | without_padding({other: column[i] for other, column in further.items()}, model)
        length = len(value) if name == EMBEDDINGS else 1
        attention = torch.ones(length, dtype=torch.bool)
        if data.get(MASK) is not None and model.mask_input == MASK:
            attention = _row_mask(data[MASK], i, count, length)
        target = None if targets is None else targets[i].expand(length)
        row = Row(
            torch.zeros(length, dtype=torch.int64),
            attention,
            target,
            inputs=inputs,
            positional=positional(inputs, None, model),
            has_tokens=False,
        )
        attended = attention.nonzero()[:, 0]
        yield row[int(attended[0]) : int(attended[-1]) + 1] if len(attended) else NOTHING


def labelled_without_tokens(data: Any, model: ModelInputs) -> bool:
    """Whether the data's first row has labels and no tokens.

    Args:
        data: data of any accepted kind. For an iterator the answer is False, because looking would consume a row.
        model: the model that the rows are for.
    """
    table = isinstance(data, Mapping) or hasattr(data, "to_dict")
    if not table and hasattr(data, "__getitem__") and hasattr(data, "__len__") and len(data):
        data = data[0]
    if not isinstance(data, Mapping) and not (hasattr(data, "columns") and hasattr(data, "to_dict")):
        return False
    return main_column(data, model) is not None and any(name in data for name in LABELS)


def _is_row(name: str, column: Any, level: Level) -> bool:
    """Whether a column holds the input of a single row, without an axis of rows."""
    shape = as_values(name, column).shape
    return level == "row" or shape[:1] != (1,)


def _row_targets(labels: Tensor, count: int) -> Tensor:
    """Labels of rows without tokens: `row 1` for one class per row, or `row pos`."""
    labels = labels.reshape(1, -1) if labels.dim() < 2 and count == 1 else labels
    labels = labels[:, None] if labels.dim() == 1 else labels
    if labels.dim() != 2 or len(labels) != count:
        raise LayersimError(f"`labels` has shape {tuple(labels.shape)} for {count} rows; it must hold one label for each row.")
    return labels


def _row_mask(mask: Any, number: int, count: int, length: int) -> Tensor:
    """The attention mask of one row. It must be all ones unless positions are known before a forward pass.

    Raises:
        LayersimError: the mask hides parts of an image or of features, or has the wrong shape.
    """
    table = as_mask(mask)
    table = table[None] if table.dim() == 1 and count == 1 else table
    if len(table) != count:
        raise LayersimError(f"`attention_mask` has shape {tuple(table.shape)} for {count} rows.")
    if table.shape[1:] == (length,):
        return table[number]
    if not bool(table.all()):
        raise LayersimError(
            f"`attention_mask` has {int((~table).sum())} zeros and the shape {tuple(table.shape)}, and the positions of rows "
            "without token ids are not known. Pass rows of one length each, with `batch_size=1`, or `inputs_embeds`."
        )
    return torch.ones(length, dtype=torch.bool)


def processed(images: list[Any], model: ModelInputs) -> dict[str, Tensor]:
    """The inputs that the model's processor makes from images, each with an axis of rows.

    Raises:
        LayersimError: the model has no processor, or the processor returns another number of rows.
    """
    if model.processor is None:
        raise LayersimError(
            "`data` contains images, but no image processor is known for the model. Pass "
            "`Data(..., tokenizer=AutoImageProcessor.from_pretrained(name))`."
        )
    found = model.processor(images=[_as_image(image) for image in images], return_tensors="pt")
    if model.main_input == PIXELS and len(found[PIXELS]) != len(images):
        raise LayersimError(
            f"`data` has {len(images)} rows, but the processor makes {len(found[PIXELS])} images; a row of {model.name} "
            "is one image."
        )
    return {name: found[name] for name in found if name == model.main_input or name in model.inputs}


def _as_image(image: Any) -> Any:
    """Convert an integer image, as `datasets` formats return it, to uint8; other images are unchanged."""
    if not isinstance(image, list | np.ndarray | Tensor):
        return image
    table = np.asarray(image)
    return table.astype(np.uint8) if table.dtype.kind in "iu" else image


def image_column(data: Mapping[str, Any], model: ModelInputs, column: str | None) -> str | None:
    """The column of images that the model's processor reads; None if the data has none, or the model takes no images.

    Args:
        data: columns by name.
        model: the model.
        column: the column that the user names.

    Raises:
        LayersimError: there are several columns of images.
    """
    if PIXELS in data or PIXELS not in (model.main_input, *model.inputs):
        return None
    names = [name for name in data if name not in (TOKEN_IDS, *LABELS) and (is_image(data[name]) or is_images(data[name]))]
    if column is not None and (
        column in names or (column in data and model.main_input == PIXELS and not is_text(data[column]))
    ):
        # A column that is named may also hold whole numbers of another type.
        return None if is_floats(data[column]) else column
    if len(names) > 1:
        raise LayersimError(
            f"`data` has several columns of images, {', '.join(names)}. "
            + (
                f"Name it: column={names[0]!r}."
                if model.main_input == PIXELS
                else f"Keep one: data.remove_columns({names[1:]})."
            )
        )
    return names[0] if names else None
