"""Tiny TransformerLens models with the weights of a Hugging Face model, unprocessed."""

from __future__ import annotations

import copy
import tempfile

import pytest
import torch


def bridge_of(model):
    """A TransformerBridge of a copy of the model, which building the bridge changes."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    twin = copy.deepcopy(model)
    return build_bridge_from_module(twin, type(twin).__name__, hf_config=twin.config).eval()


def has_hooked_transformer() -> bool:
    import transformer_lens as tl

    try:
        tl.HookedTransformer  # noqa: B018 (TransformerLens 4 raises ImportError, which hasattr lets through)
    except ImportError:
        return False
    return True


def hooked_transformer_of(model):
    """A HookedTransformer of TransformerLens 3, in float64, without any processing of weights."""
    if not has_hooked_transformer():
        pytest.skip("TransformerLens 4 has no HookedTransformer; make test-tl3 runs this")
    import transformer_lens as tl
    from transformer_lens import loading_from_pretrained as loading

    model = copy.deepcopy(model)
    # An attribute of older transformers.
    model.config.n_ctx = 64
    # The name of the folder decides for some architectures: the test's own folder would.
    with tempfile.TemporaryDirectory(prefix="tiny") as folder:
        model.save_pretrained(folder)
        if type(model).__name__ == "Gemma2ForCausalLM":
            config, state = _gemma2(model)
        else:
            config = loading.get_pretrained_model_config(folder, dtype=torch.float64, device="cpu")
            config.tokenizer_name = None
            state = loading.get_pretrained_state_dict(folder, config, hf_model=model, dtype=torch.float64)
    hooked = tl.HookedTransformer(config, move_to_device=False)
    hooked.load_and_process_state_dict(
        state, fold_ln=False, center_writing_weights=False, center_unembed=False, fold_value_biases=False
    )
    return hooked.double().eval()


def _gemma2(model):
    """Configuration and weights of a Gemma 2, whose configuration TransformerLens knows by name alone."""
    import transformer_lens as tl
    from transformer_lens import loading_from_pretrained as loading
    from transformer_lens.pretrained.weight_conversions import convert_gemma_weights

    c = model.config
    settings = loading.convert_hf_model_config("google/gemma-2-2b") | {
        "d_model": c.hidden_size,
        "d_head": c.head_dim,
        "n_heads": c.num_attention_heads,
        "n_key_value_heads": c.num_key_value_heads,
        "d_mlp": c.intermediate_size,
        "n_layers": c.num_hidden_layers,
        "n_ctx": 64,
        "d_vocab": c.vocab_size,
        "rotary_dim": c.head_dim,
        "eps": c.rms_norm_eps,
        "attn_scale": c.query_pre_attn_scalar**0.5,
        "attn_types": ["local", "global"],
        "original_architecture": "Gemma2ForCausalLM",
        "tokenizer_name": None,
        "dtype": torch.float64,
        "device": "cpu",
    }
    config = tl.HookedTransformerConfig.from_dict(settings)
    return config, convert_gemma_weights(model, config)
