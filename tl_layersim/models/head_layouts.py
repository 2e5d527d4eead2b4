"""The table of heads of Hugging Face models that are not one module, or do not read one position of a row.

A new head is one entry in `HEADS_BY_CLASS`. Module paths are those of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .unembed import HeadPart, Pool


@dataclass(frozen=True)
class HeadLayout:
    """A kind of head.

    Attributes:
        classes: names of the classes of models with this head.
        parts: see `Head`.
        reads: see `Head`.
        norm: path of the final norm, with `{base}` for the base model; "" for none, None to find it beside the list of blocks.
        pool: gives the pooling for a configuration; None for a head that does not read rows.
        when: whether a model with this configuration has this head.
    """

    classes: tuple[str, ...]
    parts: tuple[HeadPart, ...]
    reads: str = "every"
    norm: str | None = None
    pool: Callable[[Any], Pool] | None = None
    when: Callable[[Any], bool] = lambda config: True


HEADS_BY_CLASS = (
    # Masked language models whose head is more than one module of the model.
    HeadLayout(("DistilBertForMaskedLM",), ("vocab_transform", "activation", "vocab_layer_norm", "vocab_projector")),
    HeadLayout(("ElectraForMaskedLM", "ElectraForCausalLM"), ("generator_predictions", "generator_lm_head")),
    HeadLayout(("ModernBertForMaskedLM",), ("head", "decoder")),
    # Classifiers of text.
    HeadLayout(("ModernBertForTokenClassification",), ("head", "classifier")),
    HeadLayout(
        ("ModernBertForSequenceClassification",),
        ("head", "classifier"),
        "rows",
        pool=lambda config: Pool(mean_from=0),
        when=lambda config: config.classifier_pooling == "mean",
    ),
    HeadLayout(("ModernBertForSequenceClassification",), ("head", "classifier"), "first"),
    HeadLayout(("DistilBertForSequenceClassification",), ("pre_classifier", "torch.relu", "classifier"), "first"),
    HeadLayout(("DebertaForSequenceClassification", "DebertaV2ForSequenceClassification"), ("pooler", "classifier"), "first"),
    # Classifiers of images.
    HeadLayout(
        ("DeiTForImageClassificationWithTeacher",),
        (("cls_classifier", "distillation_classifier"),),
        "rows",
        pool=lambda config: Pool((0, 1)),
    ),
    HeadLayout(("Dinov2ForImageClassification",), ("classifier",), "rows", pool=lambda config: Pool((0,), 1)),
    HeadLayout(
        ("Dinov2WithRegistersForImageClassification",),
        ("classifier",),
        "rows",
        pool=lambda config: Pool((0,), 1 + config.num_register_tokens),
    ),
    HeadLayout(
        (
            "SiglipForImageClassification",
            "SwinForImageClassification",
            "Swinv2ForImageClassification",
            "IJepaForImageClassification",
        ),
        ("classifier",),
        "rows",
        pool=lambda config: Pool(mean_from=0),
    ),
    # The norm after the encoder of CLIP applies to the vector that is compared with texts, which its classifier does not read.
    HeadLayout(("CLIPForImageClassification",), ("classifier",), "rows", "", lambda config: Pool(mean_from=1)),
    HeadLayout(
        ("BeitForImageClassification", "Data2VecVisionForImageClassification"),
        ("classifier",),
        "rows",
        "{base}.pooler.layernorm",
        lambda config: Pool(mean_from=1, before_norm=True),
        lambda config: config.use_mean_pooling,
    ),
)


# Why models of a class have no head that could be applied to every layer.
NO_HEAD = {
    **dict.fromkeys(
        tuple(
            f"{name}ForSequenceClassification"
            for name in ["Bart", "MBart", "PLBart", "Mvp", "BigBirdPegasus", "T5", "MT5", "UMT5"]
        ),
        "its head reads the decoder at the place where the encoder's input has its last end-of-text token, which the decoder's "
        "own inputs do not give",
    ),
    "ElectraForPreTraining": "its head gives one number for each token, the logit of a replaced token, and no classes",
}


def known_head(module: torch.nn.Module) -> HeadLayout | None:
    """The entry of the table for a model; None where it has none."""
    names, config = {cls.__name__ for cls in type(module).__mro__}, getattr(module, "config", None)
    return next((layout for layout in HEADS_BY_CLASS if names.intersection(layout.classes) and layout.when(config)), None)
