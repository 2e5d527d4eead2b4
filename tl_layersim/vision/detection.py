"""`detection_by_layer`: class accuracy and box errors of a DETR's decoder layers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from ..activations.view import Kernel, View
from ..analyzers.analyzer import Analyzer, Run
from ..analyzers.needs import Needs
from ..architectures.output_heads import DetectionHeads, detection_heads
from ..architectures.unembed import rounding
from ..core.arguments import typed
from ..core.errors import LayersimError, warn
from ..core.result_declarations import result_class
from ..core.results import Result, axes
from ..core.sums import Sums
from ..core.wording import WHY_NOT_FINITE, amount, brief
from ..data.batches import Batch
from ..data.data import Data
from ..data.input_names import PIXELS
from ..data.labels import LABELS
from ..data.value_kinds import is_image
from ..engine.analyze_and_compare import analyze
from ..engine.site_plan import refuse_selection
from ..remote.open_model import open_source
from ..sources.hooked_module import HookedSource
from ..sources.model_description import ModelDescription

# Settings of a DETR's matching cost and loss in its configuration, by the name under which a result records them.
WEIGHTS = {
    "class_cost": "class_cost",
    "bbox_cost": "bbox_cost",
    "giou_cost": "giou_cost",
    "no_object": "eos_coefficient",
    "bbox_loss": "bbox_loss_coefficient",
    "giou_loss": "giou_loss_coefficient",
}
# Rounding of quotients in float32.
BOX_ROUNDING = 1e-6
SHAPE = "{'class_labels': integers of shape (objects,), 'boxes': numbers of shape (objects, 4)}"


class Objects(NamedTuple):
    """Classes and boxes of the objects in one image.

    Attributes:
        classes: `object`, int64.
        boxes: `object 4`, float64: centre x, centre y, width and height as fractions of the image.
    """

    classes: Tensor
    boxes: Tensor


class AnnotatedImages:
    """Images and the annotated objects in each image, in the order of the data.

    Iterating over it gives the items of the data, and keeps the annotations of each item that is read.

    Args:
        images: images as `analyze` takes them.
        annotations: one annotation for each image; None to take the column `labels` of the data.
        classes: number of classes that the model predicts, without "no object".

    Attributes:
        data: the data to read: this object if its annotations are kept while it is read, else the images as given.

    Raises:
        LayersimError: an annotation has the wrong format.
    """

    def __init__(self, images: Any, annotations: Any, classes: int) -> None:
        if hasattr(images, "columns") and hasattr(images, "to_dict"):
            # A pandas table.
            images = {name: images[name].tolist() for name in images.columns}
        self.images = images
        self.classes = classes
        self.objects = list[Objects]()
        self.data: Any = images
        if annotations is not None:
            self._add(annotations)
        elif isinstance(images, Mapping):
            self._add_from(images)
        elif _yields_rows(images):
            self.data = self

    def __iter__(self) -> Iterator[Any]:
        self.objects.clear()
        for item in self.images:
            self._add_from(item)
            yield item

    def __getattr__(self, name: str) -> Any:
        # Readers tell a data set from a DataLoader by its attributes.
        return getattr(self.__dict__["images"], name)

    def refuse_other_count(self, rows: int, more_to_come: bool) -> None:
        """Raise an error if the number of annotations does not fit the number of images.

        Args:
            rows: number of rows read.
            more_to_come: whether further rows may follow.

        Raises:
            LayersimError: the numbers differ.
        """
        if not self.objects:
            raise LayersimError(
                f"`data` has no annotations for its {rows} images; pass `labels`, a list with an entry for each image: {SHAPE}."
            )
        if len(self.objects) < rows or (len(self.objects) > rows and not more_to_come):
            raise LayersimError(
                f"`labels` holds {len(self.objects)} annotations for {rows}{' or more' if more_to_come else ''} images; an "
                "image without objects needs an empty annotation."
            )

    def _add_from(self, item: Any) -> None:
        """Store the annotations of one item of the data, which is a row or a batch."""
        if not isinstance(item, Mapping):
            return
        columns = [item[name] for name in LABELS if item.get(name) is not None]
        if not columns:
            return
        labels = columns[0]
        before = len(self.objects)
        # A row has one annotation, a batch a list of them.
        self._add([labels] if isinstance(labels, Mapping) else labels)
        added = len(self.objects) - before
        images = item.get(PIXELS)
        # In a later batch, too few annotations would make up for too many in this one.
        if isinstance(images, Tensor | np.ndarray) and images.ndim == 4 and len(images) != added:
            raise LayersimError(
                f"`labels` holds {added} annotations for {len(images)} images; an image without objects needs an empty "
                "annotation."
            )

    def _add(self, annotations: Any) -> None:
        if isinstance(annotations, Mapping | str) or not isinstance(annotations, Iterable):
            raise LayersimError(f"`labels` is {brief(annotations)}; it must be a list with an entry for each image: {SHAPE}.")
        for annotation in annotations:
            self.objects.append(as_objects(annotation, len(self.objects), self.classes))


def _yields_rows(images: Any) -> bool:
    """Whether images come one after the other, in rows or batches that may hold annotations."""
    if isinstance(images, str | bytes | Tensor | np.ndarray):
        return False
    return isinstance(images, Iterable) and not is_image(images)


def as_objects(annotation: Any, row: int, classes: int) -> Objects:
    """Convert the annotation of one image to `Objects`.

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
    labels_of_image = f"`labels` of image {row}"
    try:
        numbers = _as_tensor(annotation["class_labels"])
        boxes = _as_tensor(annotation["boxes"])
    except (TypeError, ValueError, RuntimeError, KeyError, IndexError):
        raise LayersimError(f"{labels_of_image} is {brief(annotation)}; it must be {SHAPE}.") from None
    if not numbers.numel() and not boxes.numel():
        # Empty lists have the dtype of floats, and no second axis.
        numbers = numbers.long()
        boxes = boxes.reshape(0, 4)
    are_integers = numbers.dim() == 1 and not numbers.is_floating_point() and numbers.dtype != torch.bool
    if not are_integers or boxes.shape != (len(numbers), 4):
        raise LayersimError(
            f"{labels_of_image} has class_labels {numbers.dtype} of shape {tuple(numbers.shape)} and boxes of shape "
            f"{tuple(boxes.shape)}; it must be {SHAPE}."
        )
    numbers = numbers.long()
    boxes = boxes.double()
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < classes:
        raise LayersimError(
            f"{labels_of_image} holds classes from {int(numbers.min())} to {int(numbers.max())}; the model predicts 0 to "
            f"{classes - 1}, and {classes} for no object."
        )
    if not bool(((boxes >= 0) & (boxes <= 1 + BOX_ROUNDING)).all()) or not bool((boxes[:, 2:] > 0).all()):
        raise LayersimError(
            f"{labels_of_image} holds boxes with values from {float(boxes.min()):.4g} to {float(boxes.max()):.4g} and a "
            f"smallest width or height of {float(boxes[:, 2:].min()):.4g}. A box is centre x, centre y, width and height as "
            "fractions of the image, with width and height above 0."
        )
    return Objects(numbers, boxes)


def _as_tensor(values: Any) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().cpu()
    # By numpy, so that lists of floats keep float64.
    return torch.as_tensor(np.asarray(values))


def generalised_iou(a: Tensor, b: Tensor) -> Tensor:
    r"""Generalised intersection over union of boxes, between -1 and 1.

    $$\mathrm{GIoU}(A, B) = \frac{|A \cap B|}{|A \cup B|} - \frac{|C| - |A \cup B|}{|C|}$$

    with C the smallest box around A and B.

    Args:
        a: boxes `... 4` as centre x, centre y, width and height.
        b: boxes of a shape that broadcasts with `a`, with areas above 0.

    Source:
        Rezatofighi et al. 2019 (arXiv 1902.09630), algorithm 1.

    Examples:
        >>> a, b = torch.tensor([0.25, 0.5, 0.5, 1.0]), torch.tensor([0.75, 0.5, 0.5, 1.0])
        >>> float(generalised_iou(a, a)), float(generalised_iou(a, b))
        (1.0, 0.0)
    """
    a_left_top = a[..., :2] - a[..., 2:] / 2
    a_right_bottom = a[..., :2] + a[..., 2:] / 2
    b_left_top = b[..., :2] - b[..., 2:] / 2
    b_right_bottom = b[..., :2] + b[..., 2:] / 2
    left_top = torch.maximum(a_left_top, b_left_top)
    right_bottom = torch.minimum(a_right_bottom, b_right_bottom)
    overlap = (right_bottom - left_top).clamp(min=0).prod(-1)
    union = a[..., 2:].prod(-1) + b[..., 2:].prod(-1) - overlap
    # Area of the smallest box around both.
    around = (torch.maximum(a_right_bottom, b_right_bottom) - torch.minimum(a_left_top, b_left_top)).prod(-1)
    return overlap / union - (around - union) / around


def match(logits: Tensor, boxes: Tensor, objects: Objects, weights: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """Match queries and objects one to one with the smallest total cost.

    The cost of a query and an object is that of transformers' `HungarianMatcher`: minus the probability of the object's class,
    plus the L1 distance of the boxes, minus their generalised IoU, each with its weight.

    Args:
        logits: `query class`, float64.
        boxes: `query 4`, float64.
        objects: the objects in the image.
        weights: `class_cost`, `bbox_cost` and `giou_cost`.

    Returns:
        Indices of matched queries, ascending, and of their objects. There are as many as the smaller of both numbers.
    """
    from scipy.optimize import linear_sum_assignment

    cost = -weights["class_cost"] * logits.softmax(-1)[:, objects.classes]
    cost = cost + weights["bbox_cost"] * (boxes[:, None] - objects.boxes).abs().sum(-1)
    cost = cost - weights["giou_cost"] * generalised_iou(boxes[:, None], objects.boxes)
    queries, matched_objects = linear_sum_assignment(cost.numpy())
    return torch.as_tensor(queries), torch.as_tensor(matched_objects)


def detection_kernel(
    view: View, *, heads: DetectionHeads, objects: Sequence[Objects], weights: Mapping[str, float]
) -> dict[str, Tensor]:
    """A dict of sums over images: errors of matched queries by layer, and numbers of queries and objects.

    Args:
        view: activations of one batch, all queries of each image.
        heads: the heads of the model.
        objects: the objects, by row of the data.
        weights: weights of the matching cost and the loss, see `WEIGHTS`.
    """
    assert view.row is not None
    logits, boxes = heads(view.activations[1:])
    if not bool(logits.isfinite().all() and boxes.isfinite().all()):
        raise LayersimError(
            f"{int((~logits.isfinite()).sum())} logits and {int((~boxes.isfinite()).sum())} coordinates of boxes are NaN or "
            f"infinite. {WHY_NOT_FINITE}"
        )
    names = ("correct", "l1", "giou", "no_object", "cross_entropy", "class_weight")
    sums = {name: torch.zeros(len(logits), dtype=torch.float64) for name in names}
    counts = dict.fromkeys(("matched", "objects", "queries"), 0)
    for row in sorted(set(view.row.tolist())):
        of_image = (view.row == row).cpu()
        image_objects = objects[row]
        query_count = int(of_image.sum())
        object_count = len(image_objects.classes)
        counts["queries"] += query_count
        counts["objects"] += object_count
        counts["matched"] += min(query_count, object_count)
        for layer in range(len(logits)):
            image_sums = _image_sums(logits[layer, of_image], boxes[layer, of_image], image_objects, weights)
            for name, value in image_sums.items():
                sums[name][layer] += value
    return sums | {name: torch.tensor(count) for name, count in counts.items()}


def _image_sums(logits: Tensor, boxes: Tensor, objects: Objects, weights: Mapping[str, float]) -> dict[str, Tensor]:
    """The sums of `detection_kernel` for one image and one layer."""
    queries, matched_objects = match(logits, boxes, objects, weights)
    # The last class is "no object".
    no_object = logits.shape[-1] - 1
    target = torch.full((len(logits),), no_object)
    target[queries] = objects.classes[matched_objects]
    matched = torch.zeros(len(logits), dtype=torch.bool)
    matched[queries] = True
    prediction = logits.argmax(-1)
    importance = torch.full((len(logits),), weights["no_object"], dtype=torch.float64).masked_fill(matched, 1.0)
    log_prob = logits.log_softmax(-1).gather(-1, target[:, None])[:, 0]
    return {
        "correct": (prediction == target)[matched].sum(),
        "l1": (boxes[queries] - objects.boxes[matched_objects]).abs().sum(),
        "giou": generalised_iou(boxes[queries], objects.boxes[matched_objects]).sum(),
        "no_object": (prediction == no_object)[~matched].sum(),
        "cross_entropy": -(importance * log_prob).sum(),
        "class_weight": importance.sum(),
    }


DETR = "(DETR: Carion et al. 2020, section 3.1; by layer: Jiang, Zhou and Zhu 2024, appendix B.5)."


@result_class
class DetectionResult(Result):
    """Class accuracy and box errors of every decoder layer's predictions. All tensors are float64.

    Queries are matched to objects one to one, anew for each layer. Means over matched queries are NaN if no image has an
    object.

    Attributes:
        values: `layer`, the same as `accuracy`: fraction of matched queries whose most likely class is their object's;
            "no object" is one of the classes.
        box_l1: `layer`, mean absolute difference between the four coordinates (centre x, centre y, width, height) of a matched
            query's box and of its object's, as a fraction of the image's width or height. transformers' `loss_bbox` is four
            times this mean.
        giou: `layer`, mean generalised intersection over union of matched queries and their objects, -1 to 1.
        no_object: `layer`, fraction of queries without an object whose most likely class is "no object"; NaN if every query
            has one.
        cross_entropy: `layer`, cross-entropy of the classes in nats, over all queries. Queries without an object have the
            weight `eos_coefficient` of the configuration.
        loss: `layer`, weighted sum of cross-entropy, L1 distance and 1 - generalised IoU, as transformers adds them for a layer
            on one batch of all images.
        images: number of images.
        objects: number of objects in them.
        matched: number of matched queries: the number of objects, unless an image has more objects than the model has queries.
    """

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
        """Fraction of matched queries that predict the class of their object (`layer`); the same as `values`."""
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


NAME = "detection"


@typed
def detection_by_layer(model: Any, data: Any, *, labels: Any = None) -> DetectionResult:
    r"""Compare the objects that each decoder layer of a DETR predicts with the objects in the images.

    The output of each layer passes through the model's own decoder norm, class head and box head. For each image and layer,
    queries are matched to objects one to one with the least total cost, that of transformers' `HungarianMatcher`,

    $$-\lambda_c \, p_q(c_o) + \lambda_b \, \lVert b_q - b_o \rVert_1 - \lambda_g \, \mathrm{GIoU}(b_q, b_o)$$

    for query q and object o of class $c_o$, with the weights `class_cost`, `bbox_cost` and `giou_cost` of the configuration. On
    the first image, logits and boxes of the last layer are compared with the model's own.

    Args:
        model: `DetrForObjectDetection` of transformers; for a `DetrForSegmentation`, its part `model.detr`.
        data: a `Data`, or raw data: a mapping with `pixel_values`, and `pixel_mask` if images of a batch differ in size, a data
            set, a DataLoader, or an iterable of these; for images themselves, `Data(images, tokenizer=processor)`.
        labels: for each image a mapping with `class_labels`, a whole number for each object, and `boxes`, `object 4`: centre x,
            centre y, width and height as fractions of the image. Default: the column `labels` of the data, in the form of
            transformers' detectors.

    Returns:
        A `DetectionResult`: accuracy, box L1, generalised IoU and loss, each by layer.

    Raises:
        LayersimError: the model is no DETR, or the annotations are missing, out of range or not normalised.

    Source:
        Carion et al. 2020 (arXiv 2005.12872), section 3.1; Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), appendix B.5, where
        figure 18 shows average precision (AP50) by layer.

    Examples:
        >>> import torch
        >>> from tl_layersim.vision import detection_by_layer
        >>> from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig
        >>> backbone = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic")
        >>> sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 3, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
        >>> config = DetrConfig(backbone_config=backbone, num_queries=4, num_labels=2, **sizes)
        >>> labels = [{"class_labels": [1], "boxes": [[0.5, 0.5, 0.2, 0.4]]}] * 2
        >>> found = detection_by_layer(DetrForObjectDetection(config), torch.randn(2, 3, 32, 32), labels=labels)
        >>> found.box_l1.shape, found.objects, found.matched
        (torch.Size([3]), 2, 2)
    """
    source = open_source(model, either_stack=True)
    if not isinstance(source, HookedSource):
        raise LayersimError(
            f"`model` is {brief(model)}; it must be the Hugging Face model itself, because its heads run in this process."
        )
    heads = detection_heads(source.module, source.unembed)
    config: Any = source.module.config
    data = Data.of(data)
    refuse_selection(data, "every query is matched", "positions", "skip_first")
    images = AnnotatedImages(data.source, labels, config.num_labels)
    weights = {name: float(getattr(config, setting)) for name, setting in WEIGHTS.items()}
    analyzer = _Detection(source, heads, images, weights)
    source.check_first_row(analyzer.check_heads)
    result: DetectionResult = analyze(source, data.like(images.data), analyzer)[NAME]
    return result


@dataclass(frozen=True, eq=False)
class _Detection(Analyzer):
    """The analyzer that `detection_by_layer` runs.

    Args:
        source: source of the model.
        heads: the heads of the model.
        images: the data with the objects in each image.
        weights: weights of the matching cost and the loss.
    """

    name: ClassVar[str] = NAME
    needs = Needs(sites="every_block")

    source: HookedSource
    heads: DetectionHeads
    images: AnnotatedImages
    weights: Mapping[str, float]

    def check_heads(self, batch: Batch) -> None:
        """Compare logits and boxes of the last layer with the model's own, on the first image."""
        row = batch.first_row
        with torch.no_grad():
            logits, boxes = self.heads(self.source.collect(row).activations[1:])
            output = self.source.call(row)
        allowed = rounding(self.source.model.torch_dtype)
        comparisons = (("logits", logits[-1], output.logits[0]), ("boxes", boxes[-1], output.pred_boxes[0]))
        for name, of_heads, of_model in comparisons:
            of_model = of_model.cpu().double()
            gap = float((of_heads - of_model).norm() / of_model.norm().clamp(min=1e-3))
            if not gap <= allowed:
                raise LayersimError(
                    f"The heads at the last decoder layer do not give the model's own {name}: the relative "
                    f"difference is {gap:.2g}, and rounding explains at most {allowed:.1g}. "
                    "Remove hooks that change the outputs of the heads."
                )

    def check_batch(self, batch: Batch, model: ModelDescription) -> None:
        self.images.refuse_other_count(batch.first + len(batch.tokens), more_to_come=True)

    def kernel(self, first: Sums) -> Kernel:
        return partial(detection_kernel, heads=self.heads, objects=self.images.objects, weights=self.weights)

    def compute(self, sums: Sums, run: Run) -> DetectionResult:
        self.images.refuse_other_count(run.provenance.sequences, more_to_come=False)
        matched = int(sums["matched"])
        objects = int(sums["objects"])
        queries = int(sums["queries"])
        if objects > matched:
            warn(
                f"{objects - matched} of {objects} objects have no query: some images have more objects than the model has "
                "queries."
            )
        # Without a matched query, 0 / 0 is NaN.
        accuracy = sums["correct"] / matched
        box_l1 = sums["l1"] / matched / 4
        giou = sums["giou"] / matched
        cross_entropy = sums["cross_entropy"] / sums["class_weight"]
        box_loss = self.weights["bbox_loss"] * sums["l1"] + self.weights["giou_loss"] * (matched - sums["giou"])
        return DetectionResult(
            values=accuracy,
            box_l1=box_l1,
            giou=giou,
            no_object=sums["no_object"] / (queries - matched),
            cross_entropy=cross_entropy,
            loss=cross_entropy + box_loss / max(objects, 1),
            images=run.provenance.sequences,
            objects=objects,
            matched=matched,
            layers=run.layers,
            provenance=run.provenance,
        )

    def options(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for classes, boxes in self.images.objects:
            digest.update(classes.numpy().tobytes() + boxes.numpy().tobytes() + b"|")
        return {"labels": f"objects sha256 {digest.hexdigest()[:12]}", **self.weights}
