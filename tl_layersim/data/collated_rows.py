"""Joins the inputs of rows in a batch, and cuts them again to the rows that are left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..core.errors import LayersimError
from .images_of_rows import padded_images
from .input_names import DECODER, ENCODER, other_stack
from .row import ModelInputs, Row


def collated(
    rows: Sequence[Row], width: int, model: ModelInputs
) -> tuple[dict[str, Tensor], frozenset[str], dict[str, tuple[int, ...]]]:
    """Join the inputs of rows in a batch, zero-padded to `width`.

    Also returns the names of `positional` inputs, and for inputs that have one entry for each image, how many each row has.

    Inputs of an encoder-decoder's other stack are padded to their own longest row.

    Raises:
        LayersimError: the rows have different inputs, or inputs of different shapes.
    """
    names = list(dict.fromkeys(name for row in rows for name in row.inputs))
    of_positions = frozenset(name for row in rows for name in row.positional)
    of_images = {name for row in rows for name in row.of_images}
    if not names:
        return {}, of_positions, {}
    of_other_stack = other_stack(model)
    batch = {}
    images: dict[str, tuple[int, ...]] = {}
    for name in names:
        if name in of_images:
            batch[name], images[name] = padded_images([row.inputs.get(name) for row in rows])
            continue
        parts = [_input_of_row(row, name, name in of_positions, model) for row in rows]
        if name in of_positions:
            parts = [_zero_padded(part, width) for part in parts]
        elif name in of_other_stack:
            longest = max(len(part) for part in parts)
            parts = [_zero_padded(part, longest) for part in parts]
        shapes = {tuple(part.shape) for part in parts}
        if len(shapes) > 1:
            examples = " and ".join(map(str, sorted(shapes)[:2]))
            raise LayersimError(f"`data` has rows with `{name}` of different shapes, such as {examples}. Pass `batch_size=1`.")
        batch[name] = torch.stack(parts)
    return batch, of_positions, images


def _zero_padded(values: Tensor, length: int) -> Tensor:
    return torch.cat([values, values.new_zeros(length - len(values), *values.shape[1:])])


def _input_of_row(row: Row, name: str, of_positions: bool, model: ModelInputs) -> Tensor:
    """One input of a row, or the default of the model if the row lacks the input."""
    if name in row.inputs and of_positions == (name in row.positional):
        return row.inputs[name]
    default = model.inputs.get(name)
    if name in row.inputs or default is None or not of_positions:
        raise LayersimError(
            f"`data` has `{name}` in some rows only, or with axes that differ by row; all rows of a batch must have the same "
            "inputs. Use one call for each kind of row."
        )
    return torch.full((len(row.tokens),), default)


def cut_to_longest(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cut the inputs of the unmeasured encoder or decoder to their longest row.

    Args:
        inputs: `row ...`; masks among them belong to the unmeasured encoder or decoder.
    """
    cut = dict(inputs)
    for mask, *names_of_stack in (ENCODER, DECODER):
        names = [name for name in names_of_stack if name in inputs]
        if mask in inputs and names and inputs[mask].shape == inputs[names[0]].shape[:2]:
            width = int(inputs[mask].any(0).nonzero()[-1]) + 1
            cut |= {name: inputs[name][:, :width] for name in (mask, *names)}
    return cut
