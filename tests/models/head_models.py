"""Tiny classifiers of every kind of head in float64, and their logits at every layer by the model's own forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers

from .tiny_models import random_tokens

WORDS, CLASSES = 60, 3
TEXT = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": WORDS,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DISTIL = {"dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 24, "vocab_size": WORDS, "max_position_embeddings": 32}
DISENTANGLED = TEXT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
MODERN = TEXT | {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 8}
IMAGE = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
}


@dataclass(frozen=True)
class HeadCase:
    """A tiny model with a head.

    Attributes:
        model: name of its class in transformers.
        settings: of its configuration.
        head: the map from the residual to logits, as a result writes it.
        reads: positions of a row that the head reads.
        list: path of the list of blocks.
        named: whether the package does not find the blocks.
        side: height and width of its images; 0 for a model of tokens.
    """

    model: str
    settings: dict[str, Any]
    head: str
    reads: str = "first"
    list: str = ""
    named: bool = False
    side: int = 0

    def build(self, seed: int = 0) -> Any:
        """The model in float64, with weights so large that its layers disagree."""
        torch.manual_seed(seed)
        cls = getattr(transformers, self.model)
        model = cls(cls.config_class(**self.settings, num_labels=CLASSES)).double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * (0.4 if parameter.dim() > 1 else 0.2) + (parameter == 1))
        return model

    @property
    def options(self) -> dict[str, Any]:
        """Options of `analyze` for the model."""
        return {"layers": self.paths} if self.named else {}

    @property
    def paths(self) -> list[str]:
        """Paths of the blocks."""
        return [f"{self.list}.{number}" for number in range(3)]

    def rows(self, count: int = 5) -> list[dict[str, torch.Tensor]]:
        """The inputs of each row alone, rows of tokens of unequal length."""
        if self.side:
            noise = torch.Generator().manual_seed(7)
            shape = (1, 3, self.side, self.side)
            return [{"pixel_values": torch.randn(shape, generator=noise, dtype=torch.float64)} for _ in range(count)]
        lengths = [9, 5, 7, 9, 1][:count]
        # No token is a padding id.
        return [{"input_ids": random_tokens(1, length, seed=number) % (WORDS - 5) + 5} for number, length in enumerate(lengths)]

    def data(self, count: int = 5, labels: Any = None) -> dict[str, Any]:
        """All rows, tokens padded on the right with a mask."""
        rows = self.rows(count)
        more = {} if labels is None else {"labels": labels}
        if self.side:
            return {"pixel_values": torch.cat([row["pixel_values"] for row in rows])} | more
        width = max(row["input_ids"].shape[1] for row in rows)
        ids, mask = torch.zeros(count, width, dtype=torch.int64), torch.zeros(count, width, dtype=torch.int64)
        for number, row in enumerate(rows):
            ids[number, : row["input_ids"].shape[1]] = row["input_ids"][0]
            mask[number, : row["input_ids"].shape[1]] = 1
        return {"input_ids": ids, "attention_mask": mask} | more


def replaced(output: Any, x: torch.Tensor) -> Any:
    return (x, *output[1:]) if isinstance(output, tuple) else x


def block_outputs(model: Any, paths: list[str], inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The output of each block, `row pos width`, first to last."""
    seen: list[torch.Tensor] = []

    def note(_module: Any, _args: Any, output: Any) -> None:
        seen.append((output[0] if isinstance(output, tuple) else output).detach())

    handles = [model.get_submodule(path).register_forward_hook(note) for path in paths]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return seen


def layer_logits(model: Any, paths: list[str], inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The model's logits with the output of the last block replaced by that of each block, first to last."""
    last = model.get_submodule(paths[-1])
    logits = []
    for x in block_outputs(model, paths, inputs):
        handle = last.register_forward_hook(lambda _m, _a, output, x=x: replaced(output, x))
        logits.append(model(**inputs).logits.detach())
        handle.remove()
    return logits


CASES: dict[str, HeadCase] = {
    "bert": HeadCase("BertForSequenceClassification", TEXT, "classifier(bert.pooler(x))", list="bert.encoder.layer"),
    "roberta": HeadCase("RobertaForSequenceClassification", TEXT, "classifier(x)", list="roberta.encoder.layer"),
    "distilbert": HeadCase(
        "DistilBertForSequenceClassification",
        DISTIL,
        "classifier(torch.relu(pre_classifier(x)))",
        list="distilbert.transformer.layer",
    ),
    "electra": HeadCase("ElectraForSequenceClassification", TEXT, "classifier(x)", list="electra.encoder.layer"),
    "deberta": HeadCase(
        "DebertaForSequenceClassification", DISENTANGLED, "classifier(pooler(x))", list="deberta.encoder.layer"
    ),
    "deberta-v2": HeadCase(
        "DebertaV2ForSequenceClassification",
        DISENTANGLED | {"norm_rel_ebd": "layer_norm"},
        "classifier(pooler(x))",
        list="deberta.encoder.layer",
    ),
    "mpnet": HeadCase("MPNetForSequenceClassification", TEXT, "classifier(x)", list="mpnet.encoder.layer"),
    "modernbert": HeadCase(
        "ModernBertForSequenceClassification", MODERN, "classifier(head(model.final_norm(x)))", list="model.layers"
    ),
    "modernbert mean": HeadCase(
        "ModernBertForSequenceClassification",
        MODERN | {"classifier_pooling": "mean"},
        "classifier(head(mean(model.final_norm(x))))",
        "rows",
        list="model.layers",
    ),
    "llama": HeadCase("LlamaForSequenceClassification", TEXT, "score(model.norm(x))", "last", list="model.layers"),
    "vit": HeadCase("ViTForImageClassification", IMAGE, "classifier(vit.layernorm(x))", list="vit.layers", side=8),
    "deit": HeadCase("DeiTForImageClassification", IMAGE, "classifier(deit.layernorm(x))", list="deit.layers", side=8),
    "deit with teacher": HeadCase(
        "DeiTForImageClassificationWithTeacher",
        IMAGE,
        "mean of cls_classifier and distillation_classifier (cat(deit.layernorm(x)[0], deit.layernorm(x)[1]))",
        "rows",
        list="deit.layers",
        side=8,
    ),
    "dinov2": HeadCase(
        "Dinov2ForImageClassification",
        IMAGE,
        "classifier(cat(dinov2.layernorm(x)[0], mean(dinov2.layernorm(x)[1:])))",
        "rows",
        list="dinov2.encoder.layer",
        side=8,
    ),
    "dinov2 with registers": HeadCase(
        "Dinov2WithRegistersForImageClassification",
        IMAGE | {"num_register_tokens": 2},
        "classifier(cat(dinov2_with_registers.layernorm(x)[0], mean(dinov2_with_registers.layernorm(x)[3:])))",
        "rows",
        list="dinov2_with_registers.encoder.layer",
        side=8,
    ),
    "siglip": HeadCase(
        "SiglipForImageClassification",
        {"vision_config": IMAGE},
        "classifier(mean(vision_model.post_layernorm(x)))",
        "rows",
        list="vision_model.encoder.layers",
        named=True,
        side=8,
    ),
    "clip": HeadCase(
        "CLIPForImageClassification",
        {"vision_config": IMAGE},
        "classifier(mean(x[1:]))",
        "rows",
        list="vision_model.encoder.layers",
        named=True,
        side=8,
    ),
    "ijepa": HeadCase(
        "IJepaForImageClassification",
        IMAGE,
        "classifier(mean(ijepa.layernorm(x)))",
        "rows",
        list="ijepa.layers",
        side=8,
    ),
    "vit-msn": HeadCase("ViTMSNForImageClassification", IMAGE, "classifier(vit.layernorm(x))", list="vit.layers", side=8),
    "beit": HeadCase(
        "BeitForImageClassification",
        IMAGE | {"use_mean_pooling": True},
        "classifier(beit.pooler.layernorm(mean(x[1:])))",
        "rows",
        list="beit.layers",
        side=8,
    ),
    "beit of [CLS]": HeadCase(
        "BeitForImageClassification",
        IMAGE | {"use_mean_pooling": False},
        "classifier(beit.pooler(beit.layernorm(x)))",
        list="beit.layers",
        side=8,
    ),
}
