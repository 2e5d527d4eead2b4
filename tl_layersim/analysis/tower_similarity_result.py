"""Result of `tower_similarity`: similarity between and within the towers of a CLIP, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float64
from torch import Tensor

from ..core.argument_checks import typed
from ..core.results import Result, axes
from ..core.wording import amount

OF_FIGURE = "(Jiang, Zhou and Zhu 2024, appendix D, figure {})."


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TowerSimilarity(Result):
    """Similarity between the layers of the two towers of a CLIP, and within each tower. All tensors are float64.

    A layer of a tower is one vector for each image or text: its residual at the position that the model reads, through the
    tower's own final norm and projection. Layer 0 is what enters block 0.

    Attributes:
        values: `vision_layer text_layer`, mean over pairs of the cosine between the image's and the text's vector.
        std: `vision_layer text_layer`, standard deviation of this cosine over pairs (divided by N).
        mismatched: `vision_layer text_layer`, mean of the cosine between an image and the text of another pair, over all
            N (N - 1) such combinations of the data, not of a batch; NaN for one pair. Two rows with the same text count as
            different pairs.
        vision: `vision_layer other_vision_layer`, mean over images of the cosine between two layers of the vision tower.
        text: `text_layer other_text_layer`, mean over texts of the cosine between two layers of the text tower.
        cka: `vision_layer text_layer`, linear CKA between residuals of images and of their texts, without norms and projections
            (unbiased, averaged over minibatches, see `CKA`); NaN at layers whose vectors are all equal, and everywhere if no
            batch has four pairs.
        vision_to_last: `comparison vision_layer`, cosine of each vision layer with the last vision layer, with the last text
            layer of the same pair, and with the last text layer of other pairs.
        text_to_last: `comparison text_layer`, the same for text layers, with the towers exchanged.
        text_layers: names of the layers of the text tower; `layers` are those of the vision tower.
        comparisons: labels of the axis `comparison`.
        projected: whether norms and projections were applied; else residuals are compared as they are.
        pairs: number of pairs N.
    """

    file_kind: ClassVar[str] = "tower_similarity"
    values: Float64[Tensor, "vision text"] = axes(
        "vision_layer",
        "text_layer",
        label="Cosine similarity",
        title="Cosine similarity between the towers",
        caption="Mean over pairs of the cosine between an image at a vision layer and its text at a text layer, each through "
        "the final norm and the projection of its tower " + OF_FIGURE.format("23 c"),
        within=(-1, 1),
    )
    std: Float64[Tensor, "vision text"] = axes(
        "vision_layer",
        "text_layer",
        label="Standard deviation of the cosine",
        title="Spread of the cosine between towers over samples",
        within=(0, 1),
    )
    mismatched: Float64[Tensor, "vision text"] = axes(
        "vision_layer",
        "text_layer",
        label="Cosine similarity",
        title="Cosine similarity between the towers, other pairs",
        caption="The same between an image and the text of another pair. Only what exceeds these values is due to the pairs.",
        within=(-1, 1),
    )
    vision: Float64[Tensor, "vision vision"] = axes(
        "vision_layer",
        "other_vision_layer",
        label="Cosine similarity",
        title="Cosine similarity within the vision tower",
        caption="Mean over images " + OF_FIGURE.format("23 a"),
        within=(-1, 1),
    )
    text: Float64[Tensor, "text text"] = axes(
        "text_layer",
        "other_text_layer",
        label="Cosine similarity",
        title="Cosine similarity within the text tower",
        caption="Mean over texts " + OF_FIGURE.format("23 b"),
        within=(-1, 1),
    )
    cka: Float64[Tensor, "vision text"] = axes(
        "vision_layer",
        "text_layer",
        label="Linear CKA",
        title="Linear CKA between the towers",
        caption="Similarity of the geometry of images and of their texts, without projections, up to rotation and scale: 1 for "
        "equal, 0 for unrelated (Kornblith et al. 2019; unbiased HSIC of Song et al. 2012).",
        within=(-1, 1),
    )
    vision_to_last: Float64[Tensor, "comparison vision"] = axes(
        "comparison",
        "vision_layer",
        label="Cosine similarity",
        title="Cosine of vision layers to the last layers",
        caption="Cosine of each vision layer with the last layer of either tower " + OF_FIGURE.format(22),
        within=(-1, 1),
    )
    text_to_last: Float64[Tensor, "comparison text"] = axes(
        "comparison",
        "text_layer",
        label="Cosine similarity",
        title="Cosine of text layers to the last layers",
        caption="Cosine of each text layer with the last layer of either tower " + OF_FIGURE.format(22),
        within=(-1, 1),
    )
    text_layers: tuple[str, ...]
    comparisons: tuple[str, ...]
    projected: bool
    pairs: int

    def coordinates(self, axis: str) -> tuple[Any, ...]:
        known = {"vision_layer": self.layers, "other_vision_layer": self.layers, "other_text_layer": self.text_layers}
        return known[axis] if axis in known else super().coordinates(axis)

    def measured_on(self, field: str) -> str:
        return amount(self.pairs, {"vision": "image", "text": "text"}.get(field, "pair"))

    def headline(self) -> dict[str, float]:
        return {
            "COS(last vision layer, last text layer)": float(self.values[-1, -1]),
            "the same with the texts of other pairs": float(self.mismatched[-1, -1]),
            f"COS({self.first_layer()}, last) of the vision tower": float(self.vision[0, -1]),
            "COS(embedding, last) of the text tower": float(self.text[0, -1]),
            "CKA(last vision layer, last text layer)": float(self.cka[-1, -1]),
        }
