"""Tiny float32 models of every encoder and vision family, with data that they take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers

from tl_layersim.data.labels import NO_LABEL

WORDS = 60
CLASSES = 3
SIDE = 8
LENGTH = 8
MASK = 3
TEXT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": WORDS,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": WORDS - 1,
}
IMAGE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": SIDE,
    "patch_size": 4,
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
}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2}


@dataclass(frozen=True)
class Case:
    """A tiny model of a family.

    Attributes:
        model: name of its class in transformers.
        settings: of its configuration.
        labels: "classes" of a model that classifies rows, "tokens" of one that predicts tokens, "" of a model without a head.
        side: height and width of its images; 0 for a model of tokens.
        decodes: whether it has a decoder with tokens of its own.
        layers: paths of the blocks or modules, for models whose layout is not known.
        unembed: paths of the head, for these models.
        pooled: whether its modules have numbers of positions of their own, so that their means are measured.
    """

    model: str
    settings: dict[str, Any]
    labels: str = ""
    side: int = 0
    decodes: bool = False
    layers: tuple[str, ...] = ()
    unembed: tuple[str, ...] = ()
    pooled: bool = False

    @property
    def named(self) -> dict[str, Any]:
        """The option `layers` of functions of one model, where the model needs it."""
        return {"layers": list(self.layers)} if self.layers else {}

    @property
    def named_head(self) -> dict[str, Any]:
        """The options `layers` and `unembed`."""
        return self.named | ({"unembed": list(self.unembed)} if self.unembed else {})

    def data(self, rows: int = 6) -> dict[str, torch.Tensor]:
        """Rows that the model takes, without labels; two rows of tokens are padded."""
        noise = torch.Generator().manual_seed(0)
        if self.model == "Mlp":
            return {"x": torch.randn(rows, 6, generator=noise)}
        if self.side:
            return {"pixel_values": torch.randn(rows, 3, self.side, self.side, generator=noise)}
        tokens = torch.randint(3, WORDS, (rows, LENGTH), generator=noise)
        mask = torch.ones(rows, LENGTH, dtype=torch.int64)
        if "CLIPText" in self.model:
            # The end of a text, which its vector is read at.
            tokens[:, -1] = WORDS - 1
        if self.decodes:
            return {"input_ids": tokens, "decoder_input_ids": tokens.flip(0)}
        if "CLIPText" not in self.model:
            tokens[:2, -2:], mask[:2, -2:] = 0, 0
        if self.labels == "tokens":
            # What the labels name is hidden by the mask's id.
            tokens[:, 1:3] = MASK
        return {"input_ids": tokens, "attention_mask": mask}

    def targets(self, rows: int = 6) -> torch.Tensor | None:
        """Classes of the rows, or tokens at two positions of each; None for a model without a head."""
        if self.labels == "classes":
            return torch.arange(rows) % CLASSES
        if self.labels != "tokens":
            return None
        labels = torch.full((rows, LENGTH), NO_LABEL)
        labels[:, 1:3] = torch.randint(4, WORDS - 1, (rows, 2), generator=torch.Generator().manual_seed(1))
        return labels


class Mlp(torch.nn.Module):
    """Blocks on one vector for each row, with or without skip connections."""

    def __init__(self, skip: bool) -> None:
        super().__init__()
        self.skip = skip
        self.embed = torch.nn.Linear(6, 16)
        self.steps = torch.nn.ModuleList(MlpBlock(skip) for _ in range(2))
        self.classes = torch.nn.Linear(16, CLASSES)

    def forward(self, x):
        x = self.embed(x)
        for step in self.steps:
            x = step(x)
        return self.classes(x)


class MlpBlock(torch.nn.Module):
    def __init__(self, skip: bool) -> None:
        super().__init__()
        self.skip, self.map = skip, torch.nn.Linear(16, 16)

    def forward(self, x):
        return x + self.map(x).tanh() if self.skip else self.map(x).tanh()


@cache
def model_of(key: str, seed: int = 0) -> Any:
    """The model of a case; it is shared, so that it must not be changed."""
    case = CASES[key]
    torch.manual_seed(seed)
    if case.model == "Mlp":
        model = Mlp(**case.settings).eval()
    else:
        cls = getattr(transformers, case.model)
        model = cls(cls.config_class(**case.settings)).eval()
    # Larger weights than the default, so that blocks change the stream by more than rounding.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model


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
    **texts("distilbert", DISTIL, "DistilBert"),
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
    "t5": Case("T5ForConditionalGeneration", T5, "tokens", decodes=True),
    "t5 encoder": Case("T5EncoderModel", T5),
    "bart": Case("BartForConditionalGeneration", BART, "tokens", decodes=True),
    "mlp": Case("Mlp", {"skip": True}, "classes", layers=("steps.0", "steps.1"), unembed=("classes",)),
    "mlp plain": Case("Mlp", {"skip": False}, "classes", layers=("steps.0", "steps.1"), unembed=("classes",)),
    "resnet": Case(
        "ResNetForImageClassification",
        {"embedding_size": 6, "hidden_sizes": [6, 10], "depths": [1, 1], "layer_type": "basic", "num_labels": CLASSES},
        "classes",
        16,
        layers=("resnet.encoder.stages.0", "resnet.encoder.stages.1"),
        pooled=True,
    ),
    "convnext": Case(
        "ConvNextForImageClassification",
        {"num_stages": 2, "hidden_sizes": [6, 10], "depths": [1, 1], "num_labels": CLASSES},
        "classes",
        16,
        layers=("convnext.encoder.stages.0", "convnext.encoder.stages.1"),
        pooled=True,
    ),
}
