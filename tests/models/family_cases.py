"""Tiny float32 models of every encoder and vision family, with data that they take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

WORDS, CLASSES, SIDE = 60, 3, 8
TEXT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": WORDS,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
IMAGE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": SIDE,
    "patch_size": 4,
    "initializer_range": 0.3,
}
DISENTANGLED = TEXT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
T5 = {"d_model": 16, "num_layers": 2, "num_heads": 2, "d_ff": 24, "d_kv": 8, "vocab_size": WORDS, "decoder_start_token_id": 0}
BART = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "vocab_size": WORDS,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "init_std": 0.3,
}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2}
MORE = {"conv_kernel_size": 3}


@dataclass(frozen=True)
class Case:
    """A tiny model of a family.

    Attributes:
        model: name of its class in transformers.
        settings: of its configuration.
        labels: "classes" of a model that classifies rows, "tokens" of one that predicts tokens, "" of a model without a head.
        side: height and width of its images; 0 for a model of tokens.
        options: that `analyze` needs for it.
    """

    model: str
    settings: dict[str, Any]
    labels: str = ""
    side: int = 0
    options: dict[str, Any] = field(default_factory=dict)


def texts(stem: str, settings: dict[str, Any], prefix: str) -> dict[str, Case]:
    return {
        stem: Case(f"{prefix}Model", settings),
        f"{stem} masked": Case(f"{prefix}ForMaskedLM", settings, "tokens"),
        f"{stem} classes": Case(f"{prefix}ForSequenceClassification", settings | {"num_labels": CLASSES}, "classes"),
    }


def images(stem: str, settings: dict[str, Any], prefix: str, side: int = SIDE) -> dict[str, Case]:
    return {
        stem: Case(f"{prefix}Model", settings, side=side),
        f"{stem} classes": Case(f"{prefix}ForImageClassification", settings | {"num_labels": CLASSES}, "classes", side),
    }


DISTIL = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "vocab_size": WORDS, "max_position_embeddings": 32}
CASES: dict[str, Case] = {
    **texts("bert", TEXT, "Bert"),
    **texts("roberta", TEXT, "Roberta"),
    **texts("distilbert", DISTIL | {"initializer_range": 0.3}, "DistilBert"),
    **texts("electra", TEXT | {"embedding_size": 8}, "Electra"),
    **texts("deberta", DISENTANGLED, "Deberta"),
    **texts("deberta-v2", DISENTANGLED, "DebertaV2"),
    **texts("modernbert", TEXT | {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 8}, "ModernBert"),
    **texts("mpnet", TEXT, "MPNet"),
    **images("vit", IMAGE, "ViT"),
    **images("deit", IMAGE, "DeiT"),
    "deit distilled": Case("DeiTForImageClassificationWithTeacher", IMAGE | {"num_labels": CLASSES}, "classes", SIDE),
    **images("dinov2", IMAGE | {"mlp_ratio": 2}, "Dinov2"),
    **images("beit", IMAGE, "Beit"),
    **images("swin", SWIN, "Swin", 16),
    "siglip vision": Case("SiglipVisionModel", IMAGE, side=SIDE),
    "siglip classes": Case("SiglipForImageClassification", {"vision_config": IMAGE, "num_labels": CLASSES}, "classes", SIDE),
    "clip vision": Case("CLIPVisionModel", IMAGE, side=SIDE),
    "clip vision projected": Case("CLIPVisionModelWithProjection", IMAGE | {"projection_dim": 8}, side=SIDE),
    "clip text": Case("CLIPTextModel", TEXT),
    "clip text projected": Case("CLIPTextModelWithProjection", TEXT | {"projection_dim": 8}),
    "clip classes": Case("CLIPForImageClassification", {"vision_config": IMAGE, "num_labels": CLASSES}, "classes", SIDE),
    "t5": Case("T5ForConditionalGeneration", T5, "tokens"),
    "t5 encoder": Case("T5EncoderModel", T5),
    "bart": Case("BartForConditionalGeneration", BART, "tokens"),
}
