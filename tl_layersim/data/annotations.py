"""Annotations of images: classes and boxes of the objects in each image, in the format of transformers' detectors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..core.wording import brief
from .inputs import PIXELS, is_image
from .labels import LABELS

CLASSES, BOXES = "class_labels", "boxes"
# Of quotients in float32.
BOX_ROUNDING = 1e-6
SHAPE = f"{{'{CLASSES}': (objects,) whole numbers, '{BOXES}': (objects, 4)}} for each image"


class Objects(NamedTuple):
    """The objects in one image.

    Attributes:
        classes: `object`, int64.
        boxes: `object 4`, float64: centre x, centre y, width and height as fractions of the image.
    """

    classes: Tensor
    boxes: Tensor


class AnnotatedImages:
    """Images with the objects in each of them, in the order of the rows.

    Args:
        data: images as `analyze` takes them.
        annotations: one annotation for each image; None to take the column `labels` while the data is read.
        classes: number of classes that the model predicts, without "no object".

    Raises:
        LayersimError: an annotation has the wrong format.
    """

    def __init__(self, data: Any, annotations: Any, classes: int) -> None:
        self.classes, self.objects = classes, list[Objects]()
        if hasattr(data, "columns") and hasattr(data, "to_dict"):
            # A pandas table.
            data = {name: data[name].tolist() for name in data.columns}
        self.data = data
        if annotations is not None:
            self._add(annotations)
        elif isinstance(data, Mapping):
            self._note(data)
        elif isinstance(data, list):
            for item in data:
                self._note(item)
        elif isinstance(data, Iterable) and not isinstance(data, str | bytes | Tensor | np.ndarray) and not is_image(data):
            self.data = _Noting(data, self)

    def refuse_other_count(self, rows: int, more_to_come: bool) -> None:
        """Raise an error if there are fewer annotations than rows read, or more than rows in all.

        Args:
            rows: number of rows read.
            more_to_come: whether further rows may follow.

        Raises:
            LayersimError: the numbers differ.
        """
        if not self.objects:
            raise LayersimError(f"`data` has {rows} images without annotations of their objects; `labels` must be {SHAPE}.")
        if len(self.objects) < rows or (len(self.objects) > rows and not more_to_come):
            raise LayersimError(
                f"`labels` holds {len(self.objects)} annotations for {rows}{' or more' if more_to_come else ''} images; an "
                "image without objects has an empty one."
            )

    def _note(self, item: Any) -> None:
        """Keep the annotations of one item of the data: a row or a batch."""
        found = [item[name] for name in LABELS if isinstance(item, Mapping) and item.get(name) is not None]
        if not found:
            return
        before = len(self.objects)
        self._add(found[:1] if isinstance(found[0], Mapping) else found[0])
        rows = _rows_in(item)
        if rows is not None and len(self.objects) - before != rows:
            raise LayersimError(
                f"`labels` holds {len(self.objects) - before} annotations for {rows} images; an image without objects has an "
                "empty one."
            )

    def _add(self, annotations: Any) -> None:
        if isinstance(annotations, Mapping | str) or not isinstance(annotations, Iterable):
            raise _no_annotation(annotations, "`labels`")
        for one in annotations:
            self.objects.append(as_objects(one, len(self.objects), self.classes))


class _Noting:
    """Iterates over data and keeps the annotations of each item that is read.

    Args:
        data: the iterable.
        to: the images that keep the annotations.
    """

    def __init__(self, data: Iterable[Any], to: AnnotatedImages) -> None:
        self.data, self.to = data, to

    def __iter__(self) -> Iterator[Any]:
        self.to.objects.clear()
        for item in self.data:
            self.to._note(item)
            yield item

    def __getattr__(self, name: str) -> Any:
        # Readers tell a data set from a DataLoader by its attributes.
        return getattr(self.data, name)


def as_objects(annotation: Any, row: int, classes: int) -> Objects:
    """The objects of one image.

    Args:
        annotation: mapping with `class_labels` and `boxes`; further entries are not read.
        row: index of the image, for messages.
        classes: number of classes that the model predicts, without "no object".

    Raises:
        LayersimError: the format is wrong, a class is out of range, or the boxes are not normalised.

    Examples:
        >>> as_objects({"class_labels": [2], "boxes": [[0.5, 0.5, 0.2, 0.4]]}, row=0, classes=3).boxes.shape
        torch.Size([1, 4])
    """
    if not isinstance(annotation, Mapping) or CLASSES not in annotation or BOXES not in annotation:
        raise _no_annotation(annotation, f"`labels` of image {row}")
    try:
        numbers, boxes = _table(annotation[CLASSES]), _table(annotation[BOXES]).double()
    except (TypeError, ValueError, RuntimeError):
        raise _no_annotation(annotation, f"`labels` of image {row}") from None
    count = numbers.numel()
    boxes = boxes.reshape(0, 4) if not count and not boxes.numel() else boxes
    whole = not count or not (numbers.is_floating_point() or numbers.dtype == torch.bool)
    if numbers.dim() != 1 or not whole or boxes.shape != (count, 4):
        given = f"{CLASSES} {numbers.dtype} of shape {tuple(numbers.shape)}, {BOXES} of shape {tuple(boxes.shape)}"
        raise _no_annotation(given, f"`labels` of image {row}")
    numbers = numbers.long()
    if count and not 0 <= int(numbers.min()) <= int(numbers.max()) < classes:
        raise LayersimError(
            f"`labels` of image {row} holds classes from {int(numbers.min())} to {int(numbers.max())}; the model predicts 0 to "
            f"{classes - 1}, and {classes} for no object."
        )
    if not bool(((boxes >= 0) & (boxes <= 1 + BOX_ROUNDING)).all()) or not bool((boxes[:, 2:] > 0).all()):
        raise LayersimError(
            f"`labels` of image {row} holds {BOXES} with values from {float(boxes.min()):.4g} to {float(boxes.max()):.4g} and "
            f"a smallest width or height of {float(boxes[:, 2:].min()):.4g}; a box is centre x, centre y, width and height as "
            "fractions of the image, and has an area."
        )
    return Objects(numbers, boxes)


def _table(values: Any) -> Tensor:
    return values.detach().cpu() if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))


def _rows_in(item: Mapping[str, Any]) -> int | None:
    """Number of images in a mapping; None if the mapping alone does not tell."""
    images = item.get(PIXELS)
    if images is None:
        images = next((value for name, value in item.items() if name not in LABELS and is_image(value)), None)
        return len(images) if isinstance(images, list) else None
    if isinstance(images, list | tuple):
        axes = 1 + np.ndim(images[0]) if images else 1
        return len(images) if axes == 4 else None
    return len(images) if np.ndim(images) == 4 else None


def _no_annotation(given: Any, name: str) -> LayersimError:
    return LayersimError(f"{name} is {given if isinstance(given, str) else brief(given)}; it must be {SHAPE}.")
