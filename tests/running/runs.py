"""Runs, models and data that several folders of tests use."""

from __future__ import annotations

import copy

import pytest
import torch

import tl_layersim as lsim

from ..models.tiny_models import tiny_gpt2, tiny_llama
from ..models.wrapped_models import bridge

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


def without_mlp(model: torch.nn.Module, scale: float = 0.0) -> torch.nn.Module:
    """A copy of a Hugging Face Llama in which the output of the MLP of block 1 is scaled by a hook."""
    edited = copy.deepcopy(model)
    edited.model.layers[1].mlp.register_forward_hook(lambda _module, _args, output: output * scale)
    return edited


def measured(model, data, analyzer, **options) -> lsim.Result:
    """The result of an analyzer; of one that needs two models, on the model and on an edited copy."""
    if analyzer.needs.models == "two":
        return lsim.compare(model, without_mlp(model, 0.5), data, analyzer, **options)
    return lsim.analyze(model, data, analyzer, **options)[analyzer.name]


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
