"""A model in another basis, parts of models by hand, and losses."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

import tl_layersim as lsim

from ..models.tiny_models import random_tokens, tiny_gpt2, tiny_llama, tiny_tokenizer

QUICK = lsim.stitching.StitchTraining(steps=30, warmup=5)


def rows(count: int = 24, length: int = 16) -> torch.Tensor:
    return random_tokens(count, length)


def rotated(model, seed: int = 5):
    """The same function of tokens with its residual stream in another orthogonal basis, and that basis.

    Norms' weights, which belong to the old coordinates, are folded into what reads the normed stream.
    """
    d = model.config.hidden_size
    q = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))[0]
    turned = copy.deepcopy(model)
    with torch.no_grad():

        def reads(linear, norm) -> None:
            linear.weight.copy_((linear.weight.double() * norm.weight.double()) @ q.T)

        def writes(linear) -> None:
            linear.weight.copy_(q @ linear.weight.double())

        turned.lm_head.weight = torch.nn.Parameter(turned.lm_head.weight.clone())
        turned.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight.double() @ q.T)
        reads(turned.lm_head, turned.model.norm)
        turned.model.norm.weight.fill_(1)
        for block in turned.model.layers:
            for linear in (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj):
                reads(linear, block.input_layernorm)
            for linear in (block.mlp.gate_proj, block.mlp.up_proj):
                reads(linear, block.post_attention_layernorm)
            block.input_layernorm.weight.fill_(1)
            block.post_attention_layernorm.weight.fill_(1)
            writes(block.self_attn.o_proj)
            writes(block.mlp.down_proj)
    return turned, q


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    """Mean cross-entropy by the formula, in NumPy."""
    z = logits.detach().double().numpy()
    total = 0.0
    count = 0
    for row in range(z.shape[0]):
        for pos in range(z.shape[1] - 1):
            shifted = z[row, pos] - z[row, pos].max()
            total -= shifted[int(tokens[row, pos + 1])] - math.log(np.exp(shifted).sum())
            count += 1
    return total / count


def lsim_batches(tokens: torch.Tensor, size: int = 4):
    from tl_layersim.data.batches import Batches
    from tl_layersim.remote.open_model import open_source

    return list(Batches(lsim.Data(tokens, batch_size=size), open_source(tiny_llama()).model))


def gpt2_of_kind(kind: str, seed: int):
    hf = tiny_gpt2(seed)
    if kind == "bridge":
        from transformer_lens.model_bridge.sources import build_bridge_from_module

        return build_bridge_from_module(hf, "GPT2LMHeadModel", hf_config=hf.config)
    if kind == "nnsight":
        import nnsight

        return nnsight.TransformersModel(hf, task="text-generation", tokenizer=tiny_tokenizer())
    if kind == "wrapped":
        import nnsight

        return nnsight.NNsight(hf)
    if kind == "hooked":
        return hooked(hf)
    return hf


def hooked(hf):
    """A HookedTransformer with the same unprocessed weights; only TransformerLens 3 has one."""
    import transformer_lens as tl

    try:
        tl.HookedTransformer  # noqa: B018
    except (AttributeError, ImportError):
        pytest.skip("TransformerLens 4 has no HookedTransformer")
    from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights

    cfg = tl.HookedTransformerConfig(
        n_layers=3,
        d_model=32,
        n_ctx=64,
        d_head=8,
        n_heads=4,
        d_mlp=128,
        d_vocab=100,
        act_fn="gelu_new",
        normalization_type="LN",
    )
    model = tl.HookedTransformer(cfg)
    model.load_state_dict(convert_gpt2_weights(hf, cfg), strict=False)
    return model
