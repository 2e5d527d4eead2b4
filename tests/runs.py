"""Runs, models and data that several folders of tests use."""

from __future__ import annotations

import pytest
import torch

import tl_layersim as lsim

from .tiny_models import tiny_gpt2, tiny_llama
from .wrapped_models import bridge

MODELS = {
    "Hugging Face": tiny_llama,
    "TransformerBridge": lambda: bridge(tiny_llama()),
    "TransformerBridge, GPT-2": lambda: bridge(tiny_gpt2()),
}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def analyzers():
    return [lsim.Cosine(center="none"), lsim.CKA()]


def hooks(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())


def logits(model, tokens):
    out = model(tokens)
    return out.logits if hasattr(out, "logits") else out


def lenses():
    return [lsim.LogitLens(), lsim.Saturation(), lsim.ExitCurve(), lsim.Trajectory()]


def cosine_and_cka():
    return [lsim.Cosine(), lsim.CKA(minibatch=16)]


class Passes:
    """Counts forward passes of models."""

    def __init__(self, models: dict[str, torch.nn.Module]) -> None:
        self.counts = dict.fromkeys(models, 0)
        for name, model in models.items():
            model.register_forward_pre_hook(lambda *_, name=name: self.counts.update({name: self.counts[name] + 1}))
