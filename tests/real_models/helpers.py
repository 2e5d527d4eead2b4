"""What several files of tests/real_models use."""

from __future__ import annotations

import torch

from .files import optional_real


def load(name: str):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = optional_real("models", name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.tokenizer = AutoTokenizer.from_pretrained(folder)
    return model
