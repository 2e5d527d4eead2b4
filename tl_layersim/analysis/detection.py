"""`detection_by_layer`: class accuracy and box errors of every decoder layer of a DETR, through its own heads."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from ..analyzers.base import Analyzer, Run, SiteNeed
from ..architectures.heads import DetectionHeads, detection_heads
from ..architectures.unembed import rounding
from ..core.argument_checks import typed
from ..core.errors import LayersimError, warn
from ..core.results import Report
from ..core.sums import Sums
from ..core.wording import brief
from ..data.annotations import AnnotatedImages
from ..data.batches import Batch, Batches
from ..data.data import Data
from ..models.hooked import HookedSource
from ..models.model_info import Model
from ..models.view import Kernel
from ..remote.open import open_source
from .box_matching import DetectionWeights, detection_kernel
from .detection_results import DetectionResult
from .engine import Analysis
from .position_rules import refuse_selection
from .run_analysis import run_analysis
from .site_plan import plan_sites
from .validation import with_tokenizer

NAME = "detection"


@typed
def detection_by_layer(model: Any, data: Any, *, labels: Any = None) -> DetectionResult:
    r"""Compare the objects that each decoder layer of a DETR predicts with those in the images.

    The output of each layer passes through the model's own decoder norm, class head and box head. For each image and layer,
    queries are matched to objects one to one with the least total cost, that of transformers' `HungarianMatcher`,

    $$-\lambda_c \, p_q(c_o) + \lambda_b \, \lVert b_q - b_o \rVert_1 - \lambda_g \, \mathrm{GIoU}(b_q, b_o)$$

    for query q and object o of class $c_o$, with the weights `class_cost`, `bbox_cost` and `giou_cost` of the configuration. On
    the first image, logits and boxes of the last layer are compared with the model's own.

    Args:
        model: `DetrForObjectDetection` of transformers; of a `DetrForSegmentation`, its part `model.detr`.
        data: a `Data`, or raw data: a mapping with `pixel_values`, and `pixel_mask` where images of a batch differ in size, a
            data set, a DataLoader, or an iterable of these; for images themselves, `Data(images, tokenizer=processor)`.
        labels: for each image a mapping with `class_labels`, a whole number for each object, and `boxes`, `object 4`: centre x,
            centre y, width and height as fractions of the image. Default: those in the column `labels` of the data, as
            transformers' detectors take them.

    Returns:
        A `DetectionResult`: accuracy, box L1, generalised IoU and loss, each by layer.

    Raises:
        LayersimError: the model is no DETR, or the annotations are missing, out of range or not normalised.

    Source:
        Carion et al. 2020 (arXiv 2005.12872), section 3.1; Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), appendix B.5, where
        figure 18 shows average precision (AP50) by layer.

    Examples:
        >>> import torch
        >>> from tl_layersim.analysis import detection_by_layer
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
            f"`model` is {brief(model)}; it must be the Hugging Face model itself, whose heads are called in this process."
        )
    heads = detection_heads(source.module, source.unembed)
    config: Any = source.module.config
    data = Data.of(data)
    refuse_selection(data, "every query is matched", "positions", "skip_first")
    images = AnnotatedImages(data.source, labels, config.num_labels)
    analyzer = _Detection(source, heads, images, DetectionWeights.of(config))
    source.check_first_row(analyzer.check_heads)
    described = with_tokenizer(source.model, data.tokenizer)
    batches = Batches(data.like(images.data), described, count_positions=source.count_positions)
    analyzers: dict[str, Analyzer] = {NAME: analyzer}
    report = run_analysis(Analysis([source], batches, analyzers, plan_sites([source], analyzers)))
    assert isinstance(report, Report)
    found: DetectionResult = report[NAME]
    return found


@dataclass(frozen=True, eq=False)
class _Detection(Analyzer):
    """The analyzer that `detection_by_layer` runs.

    Args:
        source: of the model.
        heads: of the model.
        images: the data with the objects in each image.
        weights: of the matching cost and the loss.
    """

    name: ClassVar[str] = NAME
    needs_sites: ClassVar[SiteNeed] = "every_block"

    source: HookedSource
    heads: DetectionHeads
    images: AnnotatedImages
    weights: DetectionWeights

    def check_heads(self, batch: Batch) -> None:
        """Refuse heads that do not give the model's own logits and boxes at the last layer, on the first image of a batch."""
        row = batch.first_row
        with torch.no_grad():
            ours = self.heads(self.source.collect(row).activations[1:])
            output = self.source.call(row)
        allowed = rounding(getattr(torch, self.source.model.dtype.removeprefix("torch.")))
        for name, own, given in zip(("logits", "boxes"), ours, (output.logits[0], output.pred_boxes[0]), strict=True):
            theirs = given.cpu().double()
            gap = float((own[-1] - theirs).norm() / theirs.norm().clamp(min=1e-3))
            if not gap <= allowed:
                raise LayersimError(
                    f"The heads at the last decoder layer do not give the model's own {name}: they are off by {gap:.2g} of "
                    f"their size, and rounding is {allowed:.1g}. Remove hooks that change the outputs of the heads."
                )

    def check_batch(self, batch: Batch, model: Model) -> None:
        self.images.refuse_other_count(batch.first + len(batch.tokens), more_to_come=True)

    def kernel(self, first: Sums) -> Kernel:
        return partial(detection_kernel, heads=self.heads, objects=self.images.objects, weights=self.weights)

    def compute(self, sums: Sums, run: Run) -> DetectionResult:
        self.images.refuse_other_count(run.provenance.sequences, more_to_come=False)
        matched, objects, queries = (int(sums[name]) for name in ("matched", "objects", "queries"))
        if objects > matched:
            warn(
                f"{objects - matched} of {objects} objects have no query: some images have more objects than the model has "
                "queries."
            )
        # Without a matched query, 0 / 0 is NaN.
        mean = {name: sums[name] / matched for name in ("correct", "l1", "giou")}
        cross_entropy, weights = sums["cross_entropy"] / sums["class_weight"], self.weights
        boxes = weights.bbox_loss * sums["l1"] + weights.giou_loss * (matched - sums["giou"])
        return DetectionResult(
            values=mean["correct"],
            box_l1=mean["l1"] / 4,
            giou=mean["giou"],
            no_object=sums["no_object"] / (queries - matched),
            cross_entropy=cross_entropy,
            loss=cross_entropy + boxes / max(objects, 1),
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
        return {"labels": f"objects sha256 {digest.hexdigest()[:12]}", **vars(self.weights)}
