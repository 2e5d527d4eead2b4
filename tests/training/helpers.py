"""Models with heads of every kind, and the aligned loss in plain torch."""

from __future__ import annotations

from contextlib import contextmanager

import torch

import tl_layersim as lsim
from tl_layersim.data.labels import NO_LABEL
from tl_layersim.training import train_adapters
from tl_layersim.training.adapter_training import AdapterSteps, AlignedAdapters

from ..models.tiny_models import tiny_llama, tiny_tokenizer
from ..ndif.client import rows
from ..running.options import called

CE = torch.nn.functional.cross_entropy


def naive(model, tokens, targets, weights, norm="final"):
    """Equation 5 in float64, with all logits of all layers, from the model's own hidden states."""
    out = model(tokens, output_hidden_states=True, use_cache=False)
    base = model.base_model
    final = getattr(base, "norm", None) or getattr(base, "ln_f", None) or base.final_layer_norm
    total = 0
    for layer, weight in enumerate(weights, 1):
        x = out.hidden_states[layer]
        if layer < len(weights):
            # Hugging Face's last hidden state has its norm already.
            x = final(x) if norm == "final" else x
        logits = model.get_output_embeddings()(x)
        total = total + weight * CE(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_LABEL)
    return total


def next_of(tokens):
    return torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], NO_LABEL)], 1)


def neox():
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(3)
    config = GPTNeoXConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=100,
        max_position_embeddings=64,
    )
    return GPTNeoXForCausalLM(config).eval()


def gemma2():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(4)
    config = Gemma2Config(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        head_dim=8,
        vocab_size=100,
        max_position_embeddings=64,
        final_logit_softcapping=5.0,
    )
    return Gemma2ForCausalLM(config).eval()


def bert(labels=3):
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(5)
    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=100,
        max_position_embeddings=64,
        initializer_range=0.15,
        num_labels=labels,
    )
    return BertForSequenceClassification(config).eval()


def vit(labels=4):
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(6)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=8,
        patch_size=4,
        num_channels=3,
        initializer_range=0.15,
        num_labels=labels,
    )
    return ViTForImageClassification(config).eval()


def traced(module=None):
    from nnsight import TransformersModel

    return TransformersModel(tiny_llama() if module is None else module, task="text-generation", tokenizer=tiny_tokenizer())


def train(model, data=None, **options):
    options = {"steps": 4, "rank": 3, "batch_size": 4, "eval_data": rows(4, 16, seed=9)} | options
    return called(train_adapters, model, rows(8, 16) if data is None else data, **options)


def equal(a: AlignedAdapters, b: AlignedAdapters) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in a.tensor_fields())


@contextmanager
def hooked(module, at, down, up):
    """H + (h A') B' by torch hooks, and what left each block."""
    blocks = module.model.layers if hasattr(module, "model") else module.transformer.h
    captured = []

    def hook(number):
        def change(_module, _args, output):
            h = output[0] if isinstance(output, tuple) else output
            if number in at:
                a = down[at.index(number)]
                b = up[at.index(number)]
                h = h + (h @ a.T) @ b.T
            captured.append(h)
            return (h, *output[1:]) if isinstance(output, tuple) else h

        return change

    handles = [block.register_forward_hook(hook(number)) for number, block in enumerate(blocks)]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()


class Stop(Exception):
    pass


def cut_after(count, monkeypatch, then=lambda: None):
    """Ends a training after so many steps."""
    plain = AdapterSteps.requests

    def run(self, total, item_of, parts, *args, **kwargs):
        for finished, item in enumerate(plain(self, total, item_of, parts, *args, **kwargs)):
            if "up mean" in parts and finished == count and item_of(0)["rate"] is not None:
                then()
                raise Stop
            yield item

    monkeypatch.setattr(AdapterSteps, "requests", run)


SHORT = lsim.AlignedTraining(steps=6, lr=1e-2, warmup=2, schedule="always")


def weights_of(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def dropping(model, rate=0.1):
    """With dropout, which has to come back after an interrupt."""
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = rate
    return model


def with_words(model):
    model.tokenizer = tiny_tokenizer()
    return model
