"""Tiny models with a vision and a text tower, pairs of images and texts, and features of layers by the models' own code."""

from __future__ import annotations

import copy
import functools

import numpy as np
import torch

SIZES = {"num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
END, PAD = 98, 0
KINDS = ("clip", "old clip", "metaclip", "chinese", "alt")


@functools.cache
def clip_of(kind: str = "clip", vision_layers: int = 4):
    """A float64 model with random norms and biases; "old clip" has the wrong end-of-text id of OpenAI's configurations."""
    import transformers as hf

    text = SIZES | {"hidden_size": 16, "vocab_size": 100, "max_position_embeddings": 24, "pad_token_id": PAD}
    text |= {"bos_token_id": 1, "eos_token_id": 2 if kind == "old clip" else END, "project_dim": 20}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} if kind in ("chinese", "alt") else {}
    vision = SIZES | {"hidden_size": 24, "image_size": 8, "patch_size": 4, "num_hidden_layers": vision_layers}
    name = {"metaclip": "MetaClip2", "chinese": "ChineseCLIP", "alt": "AltCLIP"}.get(kind, "CLIP")
    torch.manual_seed(0)
    config = getattr(hf, f"{name}Config")(text_config=text | still, vision_config=vision, projection_dim=12)
    model = getattr(hf, f"{name}Model")(config).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def pairs(rows: int = 9, kind: str = "clip", seed: int = 0) -> dict[str, torch.Tensor]:
    """Texts of different lengths whose end of text is followed by a token more in some rows, padded; and images."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 90, (rows, 10), generator=generator)
    mask = torch.ones_like(tokens)
    for row in range(rows):
        end = 4 + row % 5
        tokens[row, end] = END
        # In every third row, tokens follow the end of the text that are not masked.
        stop = end + 1 + (2 if row % 3 == 0 else 0)
        tokens[row, stop:], mask[row, stop:] = PAD, 0
    pixels = torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {"input_ids": tokens, "attention_mask": mask, "pixel_values": pixels}


def without_last_blocks(model: torch.nn.Module, tower: str, blocks: int) -> torch.nn.Module:
    """A copy of the model whose tower ends after some blocks."""
    short = copy.deepcopy(model)
    inner = getattr(short, f"{tower}_model")
    encoder = getattr(inner, "roberta", inner).encoder
    name = "layers" if hasattr(encoder, "layers") else "layer"
    setattr(encoder, name, getattr(encoder, name)[:blocks])
    return short


def features(model: torch.nn.Module, tower: str, data: dict[str, torch.Tensor], blocks: int) -> np.ndarray:
    """`row width`, the model's own features of images or texts after some blocks."""
    short = without_last_blocks(model, tower, blocks)
    with torch.no_grad():
        if tower == "vision":
            return short.get_image_features(pixel_values=data["pixel_values"]).pooler_output.numpy()
        texts = {"input_ids": data["input_ids"], "attention_mask": data["attention_mask"]}
        return short.get_text_features(**texts).pooler_output.numpy()
