"""Tiny models of sentence pairs, images and vectors, their data, and their residual streams read by hooks of the tests' own."""

from __future__ import annotations

import numpy as np
import torch

from .tiny_models import random_tokens

SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "initializer_range": 0.2}


def pair_bert(seed: int = 0, labels: int = 3):
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**SMALL, **still, vocab_size=100, max_position_embeddings=64, num_labels=labels)
    return BertForSequenceClassification(config).eval().double()


def image_vit(seed: int = 0, labels: int = 3, patch: int = 4):
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(seed)
    config = ViTConfig(**SMALL, image_size=8, patch_size=patch, num_labels=labels)
    return ViTForImageClassification(config).eval().double()


class VectorModel(torch.nn.Module):
    """Residual blocks on one vector for each row; the second argument shifts it."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Linear(6, 8)
        self.steps = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3))
        self.double().eval()

    def forward(self, x, shift=None):
        x = self.embed(x) if shift is None else self.embed(x) + shift
        for step in self.steps:
            x = step(x)
        return x


def bert_blocks(model):
    return list(model.bert.encoder.layer)


def vit_blocks(model):
    return list(model.vit.layers if hasattr(model.vit, "layers") else model.vit.encoder.layer)


def pair_data(rows: int = 6, left: bool = False) -> dict[str, torch.Tensor]:
    """Pairs of unequal length, padded on either side with a segment that would change the numbers."""
    tokens, mask, segments = random_tokens(rows, 12), torch.ones(rows, 12, dtype=torch.long), torch.zeros(rows, 12).long()
    segments[:, 7:] = 1
    for row in range(rows):
        padding = slice(0, row % 4) if left else slice(12 - row % 4, 12)
        tokens[row, padding], mask[row, padding], segments[row, padding] = 0, 0, 1
    return {"input_ids": tokens, "attention_mask": mask, "token_type_ids": segments}


def pixels(rows: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def alone(data: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    """One row of padded tokens, without its padding."""
    kept = data["attention_mask"][row].bool() if "attention_mask" in data else slice(None)
    return {name: values[row][kept][None] for name, values in data.items() if name != "attention_mask"}


def states(model, blocks, **inputs) -> np.ndarray:
    """`layer token width` in float64 of one forward pass, by hooks of the test's own."""
    seen: list[torch.Tensor] = []

    def first(x):
        return x[0] if isinstance(x, tuple) else x

    handles = [blocks[0].register_forward_pre_hook(lambda _m, a, k: seen.append((*a, *k.values())[0]), with_kwargs=True)]
    handles += [block.register_forward_hook(lambda _m, _a, out: seen.append(first(out))) for block in blocks]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return torch.stack([x.flatten(0, -2) for x in seen]).double().numpy()


class OwnBlocks(torch.nn.Module):
    """Three blocks that each add a linear map of the stream, without a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(100, 8)
        self.parts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, tokens):
        x = self.words(tokens)
        for part in self.parts:
            x = x + part(x)
        return x
