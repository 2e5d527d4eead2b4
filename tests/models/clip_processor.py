"""A processor of CLIP with a vocabulary of letters, a tiny CLIP for it, and images."""

from __future__ import annotations

import string

import numpy as np
import torch

LETTERS = (*string.ascii_lowercase, ".")


def processor(size: int = 8):
    from transformers import CLIPProcessor, CLIPTokenizer
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    vocabulary = {letter: number for number, letter in enumerate(LETTERS)}
    vocabulary |= {f"{letter}</w>": number + len(LETTERS) for number, letter in enumerate(LETTERS)}
    vocabulary |= {"<|startoftext|>": len(vocabulary), "<|endoftext|>": len(vocabulary) + 1}
    images = CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size={"height": size, "width": size})
    return CLIPProcessor(image_processor=images, tokenizer=CLIPTokenizer(vocab=vocabulary, merges=[]))


def small_clip(made):
    import transformers as hf

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    words = made.tokenizer
    ids = {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    text = sizes | ids | {"vocab_size": len(words), "max_position_embeddings": 24}
    vision = sizes | {"hidden_size": 24, "image_size": 8, "patch_size": 4}
    torch.manual_seed(0)
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).eval()


def image(seed: int):
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (12, 10, 3), dtype=np.uint8))
