"""Detection heads of a DETR: class logits and boxes of its object queries at every layer of its decoder."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..core.wording import with_article
from .call_without_hooks import Quiet
from .head_layout import is_detr, norms_between_layers
from .hooked import HookedSource
from .unembed import Unembed

OF_BOXES = "bbox_predictor"


@dataclass(frozen=True)
class DetectionHeads:
    """Class logits and boxes at every layer, by the decoder's norm, the class head and the box head of the model.

    At layers below the last these are the model's own `auxiliary_outputs`, at the last layer its own outputs.

    Attributes:
        classes: from the output of a decoder layer to class logits, the last of which is "no object".
        boxes: from the same to boxes before the sigmoid.
        norms_twice: whether the model applies the norm twice to the output of the last layer, see `norms_between_layers`.
    """

    classes: Unembed
    boxes: Unembed
    norms_twice: bool

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Class logits and boxes, both float64 on the CPU.

        Args:
            x: `layer query d_model`, outputs of all decoder layers.

        Returns:
            `layer query class`; and `layer query 4`, centre x, centre y, width and height as fractions of the image.
        """
        if self.norms_twice:
            x = torch.cat([x[:-1], self.classes.normed(x[-1:]).to(x)])
        return self.classes(x).cpu().double(), self.boxes(x).sigmoid().cpu().double()


def detection_heads(source: HookedSource) -> DetectionHeads:
    """The detection heads of a DETR.

    Args:
        source: of the model, whose decoder is read.

    Raises:
        LayersimError: the model is another detector, or no detector.
    """
    module = source.module
    config = getattr(module, "config", None)
    if not is_detr(config):
        kind = str(getattr(config, "model_type", ""))
        reason = (
            "its boxes are offsets from reference points outside a layer's output, or each layer has heads of its own"
            if "detr" in kind
            else "its heads do not predict classes and boxes of object queries"
        )
        raise LayersimError(f"`model` is {with_article(type(module).__name__)}, which is no DETR: {reason}.")
    if source.unembed is None:
        raise LayersimError(
            f"`model` is {with_article(type(module).__name__)} without a class head and a box head; load "
            "DetrForObjectDetection."
        )
    classes = replace(source.unembed, parts=source.unembed.parts[-1:])
    boxes = replace(classes, parts=(Quiet(module.get_submodule(OF_BOXES)),), linear=None)
    return DetectionHeads(classes, boxes, norms_between_layers(module))
