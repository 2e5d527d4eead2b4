"""Result of `detection_by_layer`: how well each layer of a DETR's decoder finds the objects in images."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float64
from torch import Tensor

from ..core.argument_checks import typed
from ..core.results import Result, axes
from ..core.wording import amount

DETR = "(DETR: Carion et al. 2020, section 3.1; by layer: Jiang, Zhou and Zhu 2024, appendix B.5)."


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DetectionResult(Result):
    """Class accuracy and box errors of every decoder layer's predictions. All tensors are float64.

    Queries are matched to objects one to one, anew for each layer. Means over matched queries are NaN if no image has an
    object.

    Attributes:
        values: `layer`, the same as `accuracy`: fraction of matched queries whose most likely class is that of their object;
            "no object" is one of the classes.
        box_l1: `layer`, mean absolute difference between the four coordinates (centre x, centre y, width, height) of a matched
            query's box and of its object's, as a fraction of the image's width or height. transformers' `loss_bbox` is four
            times this mean.
        giou: `layer`, mean generalised intersection over union of matched queries and their objects, -1 to 1.
        no_object: `layer`, fraction of queries without an object whose most likely class is "no object"; NaN if every query
            has one.
        cross_entropy: `layer`, of the classes, in nats, over all queries; those without an object have the weight
            `eos_coefficient` of the configuration.
        loss: `layer`, weighted sum of cross-entropy, L1 distance and 1 - generalised IoU, as transformers adds them for a layer
            on one batch of all images.
        images: number of images.
        objects: number of objects in them.
        matched: number of matched queries: that of objects, unless an image has more objects than the model has queries.
    """

    file_kind: ClassVar[str] = "detection"
    values_name: ClassVar[str] = "accuracy"
    values: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Accuracy",
        unit="fraction",
        title="Class accuracy of each layer",
        caption=f"Fraction of matched queries with their object's class {DETR}",
        better="higher",
        within=(0, 1),
    )
    box_l1: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Box L1",
        unit="fraction of the image",
        title="Box error of each layer",
        caption=f"Mean absolute difference of the four coordinates of a box {DETR}",
        within=(0, math.inf),
    )
    giou: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Generalised IoU",
        title="Overlap of boxes at each layer",
        caption=f"Mean generalised IoU of matched queries and their objects {DETR}",
        within=(-1, 1),
    )
    no_object: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Queries",
        unit="fraction",
        title="Queries without an object",
        caption=f"Fraction of unmatched queries that predict no object at each layer {DETR}",
        within=(0, 1),
    )
    cross_entropy: Float64[Tensor, " layer"] = axes(
        "layer", label="Cross-entropy", unit="nats", title="Cross-entropy at each layer", better="lower", within=(0, math.inf)
    )
    loss: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Loss (weighted sum)",
        title="Loss of each layer",
        caption=f"The term of each layer in the auxiliary loss {DETR}",
        within=(0, math.inf),
    )
    images: int
    objects: int
    matched: int

    @property
    def accuracy(self) -> Tensor:
        """Fraction of matched queries with the class of their object, `layer`; the same as `values`."""
        return self.values

    def measured_on(self, field: str) -> str:
        return f"{amount(self.images, 'image')}, {amount(self.provenance.tokens, 'query', 'queries')}"

    def headline(self) -> dict[str, float]:
        numbers = {
            "class accuracy of the first layer": float(self.accuracy[0]),
            "class accuracy of the last layer": float(self.accuracy[-1]),
            "box L1 of the first layer (fraction of the image)": float(self.box_l1[0]),
            "box L1 of the last layer (fraction of the image)": float(self.box_l1[-1]),
            "generalised IoU of the last layer": float(self.giou[-1]),
            "unmatched queries with no object (fraction)": float(self.no_object[-1]),
        }
        return {name: number for name, number in numbers.items() if not math.isnan(number)}
