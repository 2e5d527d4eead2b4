"""Matching of predicted boxes to the objects in an image, and the sums by layer of the errors of matched predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..architectures.heads import DetectionHeads
from ..core.errors import LayersimError
from ..data.annotations import Objects
from ..models.view import View


@dataclass(frozen=True)
class DetectionWeights:
    """Weights of the terms in a DETR's matching cost and in its loss, from its configuration.

    Attributes:
        class_cost: of the probability of the object's class, in the matching cost.
        bbox_cost: of the L1 distance of the boxes.
        giou_cost: of their generalised IoU.
        no_object: of the class "no object" in the cross-entropy.
        bbox_loss: of the L1 distance in the loss.
        giou_loss: of 1 - generalised IoU.
    """

    class_cost: float
    bbox_cost: float
    giou_cost: float
    no_object: float
    bbox_loss: float
    giou_loss: float

    @staticmethod
    def of(config: Any) -> DetectionWeights:
        """The weights in the configuration of a DETR."""
        costs = (config.class_cost, config.bbox_cost, config.giou_cost)
        losses = (config.eos_coefficient, config.bbox_loss_coefficient, config.giou_loss_coefficient)
        return DetectionWeights(*map(float, (*costs, *losses)))


def corners(boxes: Tensor) -> Tensor:
    """Boxes `... 4` as left, top, right and bottom, from centre x, centre y, width and height."""
    centre, half = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat([centre - half, centre + half], -1)


def generalised_iou(a: Tensor, b: Tensor) -> Tensor:
    r"""Generalised intersection over union of boxes, between -1 and 1.

    $$\mathrm{GIoU}(A, B) = \frac{|A \cap B|}{|A \cup B|} - \frac{|C| - |A \cup B|}{|C|}$$

    with C the smallest box around A and B.

    Args:
        a: `... 4`, centre x, centre y, width and height.
        b: boxes of a shape that broadcasts with `a`, with areas above 0.

    Source:
        Rezatofighi et al. 2019 (arXiv 1902.09630), algorithm 1.

    Examples:
        >>> a, b = torch.tensor([0.25, 0.5, 0.5, 1.0]), torch.tensor([0.75, 0.5, 0.5, 1.0])
        >>> float(generalised_iou(a, a)), float(generalised_iou(a, b))
        (1.0, 0.0)
    """
    first, second = corners(a), corners(b)
    left_top = torch.maximum(first[..., :2], second[..., :2])
    right_bottom = torch.minimum(first[..., 2:], second[..., 2:])
    overlap = (right_bottom - left_top).clamp(min=0).prod(-1)
    union = a[..., 2:].prod(-1) + b[..., 2:].prod(-1) - overlap
    around = (torch.maximum(first[..., 2:], second[..., 2:]) - torch.minimum(first[..., :2], second[..., :2])).prod(-1)
    return overlap / union - (around - union) / around


def match(logits: Tensor, boxes: Tensor, objects: Objects, weights: DetectionWeights) -> tuple[Tensor, Tensor]:
    """Queries and objects that are matched one to one, with the least total cost.

    The cost of a query and an object is that of transformers' `HungarianMatcher`: minus the probability of the object's class,
    plus the L1 distance of the boxes, minus their generalised IoU, each with its weight.

    Args:
        logits: `query class`, float64.
        boxes: `query 4`, float64.
        objects: in the image.
        weights: of the cost.

    Returns:
        Indices of matched queries, ascending, and of their objects: as many as the fewer of both.
    """
    from scipy.optimize import linear_sum_assignment

    cost = -weights.class_cost * logits.softmax(-1)[:, objects.classes]
    cost = cost + weights.bbox_cost * (boxes[:, None] - objects.boxes).abs().sum(-1)
    cost = cost - weights.giou_cost * generalised_iou(boxes[:, None], objects.boxes)
    queries, found = linear_sum_assignment(cost.numpy())
    return torch.as_tensor(queries), torch.as_tensor(found)


def detection_kernel(
    view: View, *, heads: DetectionHeads, objects: Sequence[Objects], weights: DetectionWeights
) -> dict[str, Tensor]:
    """Sums over images of the errors of matched queries at every layer, and numbers of queries and objects.

    Args:
        view: activations of one batch, all queries of each image.
        heads: of the model.
        objects: by row of the data.
        weights: of the matching cost and the loss.
    """
    assert view.row is not None
    logits, boxes = heads(view.activations[1:])
    if not bool(logits.isfinite().all() and boxes.isfinite().all()):
        raise LayersimError(
            f"{int((~logits.isfinite()).sum())} logits and {int((~boxes.isfinite()).sum())} coordinates of boxes are NaN or "
            "infinite. float16 overflows above 65504; load the model in float32 or bfloat16."
        )
    names = ("correct", "l1", "giou", "no_object", "cross_entropy", "class_weight")
    sums = {name: torch.zeros(len(logits), dtype=torch.float64) for name in names}
    counts = dict.fromkeys(("matched", "objects", "queries"), 0)
    for row in sorted(set(view.row.tolist())):
        of_row, shown = (view.row == row).cpu(), objects[row]
        counts["queries"] += int(of_row.sum())
        counts["objects"] += len(shown.classes)
        counts["matched"] += min(int(of_row.sum()), len(shown.classes))
        for layer in range(len(logits)):
            for name, value in _image_sums(logits[layer, of_row], boxes[layer, of_row], shown, weights).items():
                sums[name][layer] += value
    return sums | {name: torch.tensor(count) for name, count in counts.items()}


def _image_sums(logits: Tensor, boxes: Tensor, objects: Objects, weights: DetectionWeights) -> dict[str, Tensor]:
    """The sums of one image at one layer."""
    queries, found = match(logits, boxes, objects, weights)
    none = logits.shape[-1] - 1
    target = torch.full((len(logits),), none)
    target[queries] = objects.classes[found]
    matched = torch.zeros(len(logits), dtype=torch.bool)
    matched[queries] = True
    best = logits.argmax(-1)
    importance = torch.full((len(logits),), weights.no_object, dtype=torch.float64).masked_fill(matched, 1.0)
    log_prob = logits.log_softmax(-1).gather(-1, target[:, None])[:, 0]
    return {
        "correct": (best == target)[matched].sum(),
        "l1": (boxes[queries] - objects.boxes[found]).abs().sum(),
        "giou": generalised_iou(boxes[queries], objects.boxes[found]).sum(),
        "no_object": (best == none)[~matched].sum(),
        "cross_entropy": -(importance * log_prob).sum(),
        "class_weight": importance.sum(),
    }
