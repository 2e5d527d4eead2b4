"""Model inputs other than token ids, such as images and embeddings.

An input has one value for each position of its row, such as segment ids and embeddings, or any values for the whole row, such
as pixels.

Of an encoder-decoder, one stack is measured. Inputs of the other stack have positions of their own: each row holds them without
padding, and batches pad them on the right with their own mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..core.wording import brief
from .images_of_rows import padded_images
from .labels import LABELS, is_missing, number_tensor
from .padding_masks import as_mask, mask_of
from .row import ModelInputs, Row

TOKEN_IDS = "input_ids"
EMBEDDINGS = "inputs_embeds"
PIXELS = "pixel_values"
# Number of axes that one row has in inputs of these names.
ROW_AXES = {PIXELS: 3, "input_features": 2, "input_values": 1, EMBEDDINGS: 2}
# Numbers of channels of images.
CHANNELS = (1, 2, 3, 4)
# Inputs that may have a single row for all rows of a batch.
SHARED = ("position_ids", "token_type_ids")
# Names of columns of tokens, and further outputs of tokenizers.
TOKENS = ("input_ids", "tokens")
OF_TOKENS = ("token_type_ids", "position_ids")
# The mask of a stack, and its inputs with one value for each position.
ENCODER = ("attention_mask", "input_ids", "inputs_embeds")
DECODER = ("decoder_attention_mask", "decoder_input_ids", "decoder_inputs_embeds")
DECODER_IDS = "decoder_input_ids"
MASK = "attention_mask"
ATTACH = "with lsim.attach(model, analyzers) as probe: "
# First axis of values: rows of a batch, an axis of a single row, or either, which the number of axes then decides.
Level = Literal["batch", "row", "either"]


def main_column(data: Mapping[str, Any], model: ModelInputs) -> str | None:
    """Name of the column read in place of token ids: a main input such as pixels, or embeddings; None without such a column."""
    if model.token_input != TOKEN_IDS:
        return None
    if model.main_input != TOKEN_IDS and data.get(model.main_input) is not None:
        return model.main_input
    has_tokens = data.get(TOKEN_IDS) is not None
    has_embeddings = EMBEDDINGS in model.inputs and data.get(EMBEDDINGS) is not None
    return EMBEDDINGS if has_embeddings and not has_tokens else None


def further_inputs(data: Mapping[str, Any], model: ModelInputs, skipped: Sequence[str | None]) -> dict[str, Any]:
    """A dict of the columns that the model takes as further inputs. Columns of None and those in `skipped` are left out."""
    names = [name for name in model.inputs if name not in skipped]
    return {name: data[name] for name in names if data.get(name) is not None}


def main_rows(name: str, values: Any, level: Level, model: ModelInputs) -> tuple[bool, list[Tensor]]:
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


def rows_of(inputs: Mapping[str, Any], count: int | None) -> list[dict[str, Tensor]]:
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


def positional(inputs: Mapping[str, Tensor], length: int | None, model: ModelInputs) -> frozenset[str]:
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


def refuse_integers(name: str, values: Tensor) -> None:
    """Raise an error if pixels or features are integers. Models would convert them to floats without scaling."""
    if name in ROW_AXES and not values.is_floating_point():
        raise LayersimError(
            f"`{name}` is {values.dtype} of shape {tuple(values.shape)}; it must be floating-point numbers, as the model's "
            "processor returns."
        )


def is_image(value: Any) -> bool:
    """Whether a value is an image or a list of images: PIL images or uint8 arrays."""
    if isinstance(value, list):
        return bool(value) and all(is_image(item) and not isinstance(item, list) for item in value)
    if isinstance(value, np.ndarray | Tensor):
        return value.dtype in (np.uint8, torch.uint8) and value.ndim in (2, 3)
    return any(cls.__module__.split(".")[0] == "PIL" for cls in type(value).__mro__)


def is_images(value: Any) -> bool:
    """Whether a value is a batch of images: an integer array with four axes."""
    return isinstance(value, np.ndarray | Tensor) and value.ndim == 4 and "int" in str(value.dtype)


def is_floats(value: Any) -> bool:
    """Whether a value holds floating-point numbers."""
    value = innermost(value)
    return isinstance(value, float) or (isinstance(value, Tensor | np.ndarray) and "float" in str(value.dtype))


def is_text(value: Any) -> bool:
    """Whether a value is a text or a list of texts; some may be missing."""
    if not isinstance(value, list):
        return isinstance(value, str)
    return any(isinstance(item, str) for item in value) and all(isinstance(item, str) or is_missing(item) for item in value)


def as_plain(value: Any) -> Any:
    """Convert a tuple, an array of texts or a table column to a list; other values are unchanged."""
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OUT":
        return value
    if isinstance(value, np.ndarray) or type(value).__name__ == "Series":
        return value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | list):
        return list(value)
    return value


def innermost(value: Any) -> Any:
    """Descend into nested lists to the first item that is not None; return other values unchanged."""
    value = as_plain(value)
    while isinstance(value, list):
        first = next((item for item in value if item is not None), None)
        value = as_plain(first)
    return value


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


def reads_decoder(model: ModelInputs) -> bool:
    """Whether the model is an encoder-decoder whose decoder layers are measured."""
    return model.token_input == DECODER_IDS


def other_stack(model: ModelInputs) -> tuple[str, ...]:
    """Names of the mask and the inputs of the encoder or decoder that is not measured. The mask is first."""
    return ENCODER if reads_decoder(model) else DECODER


def without_padding(inputs: Mapping[str, Tensor], model: ModelInputs) -> dict[str, Tensor]:
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


def decoder_mask(rows: Tensor, model: ModelInputs) -> Tensor | None:
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


def decoder_alone(content: str, model: ModelInputs) -> LayersimError:
    """The error for data that lacks the inputs of the encoder or of the decoder."""
    return LayersimError(
        f"`data` holds {content}, but the decoder of {model.name} needs the inputs of both stacks, such as `input_ids` and "
        f"`decoder_input_ids`. To measure only the encoder, pass texts or token ids with `at='encoder.resid_post'`."
    )


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
