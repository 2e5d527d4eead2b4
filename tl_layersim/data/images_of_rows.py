"""Images of several rows in one table, as processors of models of images and texts return them.

Such a table has one entry for each image, or for each patch of an image whose size `image_grid_thw` gives. Which images belong
to a row follows from the number of image tokens in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..core.wording import brief
from .labels import number_tensor
from .row import ModelInputs

# The table of pixels of a kind, and the numbers of frames, rows and columns of patches of each image or video.
PIXEL_TABLES = {"image": "pixel_values", "video": "pixel_values_videos"}
GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}
# Rules of positions that select image tokens, or all others.
IMAGE_POSITIONS = "image"
TEXT_POSITIONS = "text"


def split_images(
    inputs: Mapping[str, Any], rows: Sequence[Tensor], is_single: bool, model: ModelInputs
) -> tuple[frozenset[str], list[dict[str, Tensor]]]:
    """Split tables of images by row. Returns the names of these tables, and a dict of tables for each row.

    Rows without images have an empty dict. Tables with one entry for each row are none of these tables.

    Args:
        inputs: columns of inputs.
        rows: token ids of each row.
        is_single: whether the inputs belong to a single row, without an axis of rows.
        model: the model.

    Raises:
        LayersimError: the images have another number of tokens than the rows have image tokens.
    """
    names: set[str] = set()
    tables: list[dict[str, Tensor]] = [{} for _ in rows]
    for kind, pixels in PIXEL_TABLES.items():
        if pixels not in inputs:
            continue
        if GRIDS[kind] in inputs:
            columns = _columns_of_grids(kind, inputs, rows, model)
        elif kind in model.image_tokens and not is_single:
            columns = _columns_of_images(kind, inputs, rows, model)
        else:
            continue
        names |= columns.keys()
        for name, parts in columns.items():
            for table, part in zip(tables, parts, strict=True):
                if len(part):
                    table[name] = part
    return frozenset(names), tables


def images_missing(inputs: Mapping[str, Any], rows: Sequence[Tensor], model: ModelInputs) -> str | None:
    """The warning that rows have image tokens and no images; None if they have none, or images."""
    for kind, token in model.image_tokens.items():
        count = sum(int((row == token).sum()) for row in rows)
        if count and inputs.get(PIXEL_TABLES[kind]) is None:
            return (
                f"{count} {kind} tokens in `{model.token_input}` have no {kind}s and are measured as words: the data lacks "
                f"`{PIXEL_TABLES[kind]}`. datasets.Dataset.from_list leaves out columns that its first row lacks."
            )
    return None


def _columns_of_grids(
    kind: str, inputs: Mapping[str, Any], rows: Sequence[Tensor], model: ModelInputs
) -> dict[str, list[Tensor]]:
    """Split the patches and the grids of images by row."""
    grids = number_tensor(inputs[GRIDS[kind]], GRIDS[kind]).reshape(-1, 3)
    patches = number_tensor(inputs[PIXEL_TABLES[kind]], PIXEL_TABLES[kind]).flatten(0, -2)
    sizes = grids.prod(1)
    if int(sizes.sum()) != len(patches):
        raise LayersimError(
            f"`{PIXEL_TABLES[kind]}` in the data has {len(patches)} patches; `{GRIDS[kind]}` has grids of {int(sizes.sum())}."
        )
    counts = _images_of_each_row(kind, rows, (sizes // model.merged_patches).tolist(), model)
    patch_counts = [int(sizes_of_row.sum()) for sizes_of_row in torch.split(sizes, counts)]
    columns = {
        GRIDS[kind]: list(torch.split(grids, counts)),
        PIXEL_TABLES[kind]: list(torch.split(patches, patch_counts)),
    }
    return columns | _columns_with_images(inputs, columns, len(grids), counts)


def _columns_of_images(
    kind: str, inputs: Mapping[str, Any], rows: Sequence[Tensor], model: ModelInputs
) -> dict[str, list[Tensor]]:
    """Split images of one size by row; nothing if each row has an entry with as many image tokens."""
    name = PIXEL_TABLES[kind]
    images = number_tensor(inputs[name], name)
    token_counts = [int((row == model.image_tokens[kind]).sum()) for row in rows]
    # With five axes, an entry holds all images of its row.
    if len(images) == len(rows) and (len(set(token_counts)) == 1 or images.dim() > 4):
        return {}
    if not any(token_counts):
        return {}
    size, remainder = divmod(sum(token_counts), len(images))
    if remainder or any(count % size for count in token_counts):
        raise LayersimError(
            f"`{name}` in the data has {len(images)} {kind}s, but its rows have {brief(token_counts)} {kind} tokens, which are "
            f"not as many for each {kind}. Pass each row with its own {kind}s as a mapping of its own, with `batch_size=1`."
        )
    counts = [count // size for count in token_counts]
    columns = {name: list(torch.split(images, counts))}
    return columns | _columns_with_images(inputs, columns, len(images), counts)


def _columns_with_images(
    inputs: Mapping[str, Any], columns: Mapping[str, Any], total: int, counts: list[int]
) -> dict[str, list[Tensor]]:
    """Split the other columns with one entry for each image or video, such as `image_sizes`."""
    split_columns = {}
    for name in inputs.keys() - columns.keys():
        is_of_images = any(word in name for word in ("image", "pixel", "video", "second_per_grid"))
        if is_of_images and hasattr(inputs[name], "__len__") and len(inputs[name]) == total:
            split_columns[name] = list(torch.split(number_tensor(inputs[name], name), counts))
    return split_columns


def _images_of_each_row(kind: str, rows: Sequence[Tensor], sizes: list[int], model: ModelInputs) -> list[int]:
    """Number of images of each row, whose numbers of tokens add up to the image tokens of the row.

    Args:
        kind: "image" or "video".
        rows: token ids of each row.
        sizes: number of tokens of each image.
        model: the model.

    Raises:
        LayersimError: they do not add up.
    """
    if kind not in model.image_tokens:
        raise LayersimError(f"`{GRIDS[kind]}` is in the data, but the configuration of {model.name} names no {kind} token.")
    counts: list[int] = []
    used = 0
    for number, row in enumerate(rows):
        remaining = int((row == model.image_tokens[kind]).sum())
        first = used
        while remaining > 0 and used < len(sizes):
            remaining -= sizes[used]
            used += 1
        # Above 0 if the images are used up, below 0 if the last one has more tokens than the row.
        if remaining:
            raise LayersimError(
                f"`{GRIDS[kind]}` in the data has {kind}s of {brief(sizes)} tokens, which do not add up to the {kind} tokens "
                f"of row {number}."
            )
        counts.append(used - first)
    if used < len(sizes):
        raise LayersimError(f"`{GRIDS[kind]}` in the data has {len(sizes)} {kind}s; the rows have tokens of {used}.")
    return counts


def image_marks(rule: Any, tokens: Tensor, model: ModelInputs) -> Tensor | None:
    """The positions of images or of text that a rule selects in a row (`pos`); None for any other rule.

    Raises:
        LayersimError: the model has no image tokens.
    """
    if rule not in (IMAGE_POSITIONS, TEXT_POSITIONS):
        return None
    if not model.image_tokens:
        raise LayersimError(f"`positions` is {rule!r}, but the configuration of {model.name} names no image token.")
    is_image = torch.isin(tokens, torch.tensor(list(model.image_tokens.values())))
    return is_image if rule == IMAGE_POSITIONS else ~is_image


def padded_images(parts: Sequence[Tensor | None]) -> tuple[Tensor, tuple[int, ...]]:
    """Join tables of rows as `row image ...`, zero-padded to the largest number of images, and count their images.

    Args:
        parts: the table of each row; None for a row without images. At least one row has images.
    """
    empty = next(part for part in parts if part is not None)[:0]
    tables = [empty if part is None else part for part in parts]
    counts = tuple(len(table) for table in tables)
    return torch.nn.utils.rnn.pad_sequence(tables, batch_first=True), counts


def joined_images(padded: Tensor, counts: Sequence[int]) -> Tensor:
    """The inverse of `padded_images`: the images of all rows in one table, as the model takes them."""
    return torch.cat([row[:count] for row, count in zip(padded, counts, strict=True)])
