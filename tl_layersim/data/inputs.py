"""Inputs of a row besides its tokens: which columns hold them, their values for each row, and their batches.

An input has one value for each position of its row (segments of tokens, embeddings), or any values for the whole row (pixels).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..core.errors import LayersimError
from .model_properties import ModelInputs
from .other_stack import padded_apart
from .tensors import number_tensor

if TYPE_CHECKING:
    from .row import Row

TOKEN_IDS = "input_ids"
EMBEDDINGS = "inputs_embeds"
PIXELS = "pixel_values"
# Number of axes that one row has in inputs of these names.
ROW_AXES = {PIXELS: 3, "input_features": 2, "input_values": 1, EMBEDDINGS: 2}
SHARED = ("position_ids", "token_type_ids")
# What the first axis of values is: the rows of a batch, an axis of one row, or whichever their number of axes tells.
Level = Literal["batch", "row", "either"]


def main_column(data: Mapping[str, Any], model: ModelInputs) -> str | None:
    """The column that takes the place of token ids: the model's main input, or embeddings; None where there is none."""
    if model.token_input != TOKEN_IDS:
        return None
    if model.main_input != TOKEN_IDS and data.get(model.main_input) is not None:
        return model.main_input
    has_tokens = data.get(TOKEN_IDS) is not None
    return EMBEDDINGS if not has_tokens and EMBEDDINGS in model.inputs and data.get(EMBEDDINGS) is not None else None


def accepted(data: Mapping[str, Any], model: ModelInputs, skipped: Sequence[str | None]) -> dict[str, Any]:
    """The columns that are further inputs of the model, without `skipped`; a column of None is no input."""
    names = [name for name in model.inputs if name not in skipped]
    return {name: data[name] for name in names if data.get(name) is not None}


def as_values(name: str, values: Any) -> Tensor:
    """The values of an input as a tensor on the CPU.

    Raises:
        LayersimError: they are not a table of numbers.
    """
    try:
        return number_tensor(values)
    except ValueError as error:
        raise LayersimError(f"`{name}` in the data is an input of the model and not a table of numbers: {error}.") from error


def main_rows(name: str, values: Any, level: Level) -> list[Tensor]:
    """The values of the main input for each row that they hold.

    Args:
        name: of the input.
        values: of one row, or of several in their first axis.
        level: what is known from where the values were found.
    """
    is_list = isinstance(values, list | tuple)
    first = as_values(name, values[0] if is_list and len(values) else values)
    axes, known = first.dim() + is_list, ROW_AXES.get(name)
    if level == "row" or (known is not None and axes <= known):
        return [as_values(name, values)]
    if level == "batch" or known is not None or axes > 1:
        return [as_values(name, value) for value in values] if is_list else list(first)
    return [as_values(name, values)]


def by_row(name: str, values: Any, count: int) -> list[Tensor]:
    """The values of an input for each of `count` rows.

    Raises:
        LayersimError: the values are those of another number of rows.
    """
    if isinstance(values, list | tuple) and len(values) == count:
        return [as_values(name, value) for value in values]
    table = as_values(name, values)
    if name in SHARED and table.dim() and len(table) == 1:
        # Hugging Face models take one row of these for all rows.
        table = table.expand(count, *table.shape[1:])
    if table.dim() == 0 or len(table) != count:
        raise LayersimError(f"`{name}` in the data does not fit the rows: its shape is {tuple(table.shape)} for {count} rows.")
    return list(table)


def rows_of(inputs: Mapping[str, Any], count: int | None) -> list[dict[str, Tensor]]:
    """The inputs of each row, by name.

    Args:
        inputs: columns of inputs.
        count: number of rows; None for the values of one row, without an axis of rows.
    """
    columns = {name: [as_values(name, v)] if count is None else by_row(name, v, count) for name, v in inputs.items()}
    return [{name: column[i] for name, column in columns.items()} for i in range(1 if count is None else count)]


def positional(inputs: Mapping[str, Tensor], length: int | None, model: ModelInputs) -> frozenset[str]:
    """Names of the inputs that have one value for each position of a row: embeddings; segments and positions of tokens.

    Args:
        inputs: of the row.
        length: number of its tokens, None for a row without token ids.
        model: the model.
    """
    decoder = model.token_input != TOKEN_IDS
    return frozenset(
        name
        for name, values in inputs.items()
        if (name == EMBEDDINGS and not decoder)
        # Those of the other stack belong to its own tokens, also where they are as many.
        or (
            length is not None
            and name.startswith("decoder_") == decoder
            and not values.is_floating_point()
            and values.shape[:1] == (length,)
        )
    )


def collated(rows: Sequence[Row], width: int, model: ModelInputs) -> tuple[dict[str, Tensor], frozenset[str]]:
    """The inputs of a batch, `row ...`, those by position padded with zeros to `width`; and the names of these.

    Those of the other stack of an encoder-decoder are padded to the longest of their own.

    Raises:
        LayersimError: the rows have other inputs, or inputs of other shapes.
    """
    names = list(dict.fromkeys(name for row in rows for name in row.inputs))
    along = frozenset(name for row in rows for name in row.positional)
    if not names:
        return {}, along
    if len({row.has_tokens for row in rows}) > 1:
        raise _unlike("some rows with token ids, and some without")
    batch, apart = {}, padded_apart(model)
    for name in names:
        parts = [_of_row(row, name, name in along, model) for row in rows]
        if name in along or name in apart:
            longest = width if name in along else max(len(part) for part in parts)
            parts = [torch.cat([part, part.new_zeros(longest - len(part), *part.shape[1:])]) for part in parts]
        if len({part.shape for part in parts}) > 1:
            shapes = sorted({tuple(part.shape) for part in parts})
            raise _unlike(f"`{name}` of shapes {', '.join(map(str, shapes[:4]))}")
        batch[name] = torch.stack(parts)
    return batch, along


def _of_row(row: Row, name: str, along: bool, model: ModelInputs) -> Tensor:
    """An input of a row; where the row has none, the value that is equivalent to leaving it out."""
    if name in row.inputs and along == (name in row.positional):
        return row.inputs[name]
    default = model.inputs.get(name)
    if name in row.inputs or default is None or not along:
        raise _unlike(f"`{name}` by position in some, and not in others" if name in row.inputs else f"`{name}` in some alone")
    return torch.full((len(row.tokens),), default)


def _unlike(given: str) -> LayersimError:
    return LayersimError(
        f"`data` has rows of different inputs, which one forward pass cannot take: {given}. Use one call for each kind of "
        "rows, or `batch_size=1` for different shapes."
    )


def refuse_integers(name: str, values: Tensor) -> None:
    """Refuse pixels and features that are whole numbers, which have not been through the model's processor.

    Raises:
        LayersimError: they are.
    """
    if name in ROW_AXES and not values.is_floating_point():
        raise LayersimError(
            f"`{name}` is {values.dtype} of shape {tuple(values.shape)}; it "
            "must be floating-point numbers, as the model's processor gives them."
        )
