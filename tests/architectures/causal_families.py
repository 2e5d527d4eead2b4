"""Small random models of the causal language models of transformers, one for each family that can be built small.

A family is a `model_type` of `MODEL_FOR_CAUSAL_LM_MAPPING`. Sizes that many configurations share stand in `SIZES`; a row of
`OPTIONS` has what one family needs beside them, or in place of them.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 97
LAYERS = 4
WIDTH = 32
HEADS = 4
# Weights of a model that is built small by mistake, such as one with a tower of its own.
LARGEST = 5_000_000

_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
_WIDTHS = ("hidden_size", "d_model", "n_embd", "lru_width")
_HEAD_COUNTS = ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "encoder_attention_heads")
_INNER = ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner")
_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(_COUNTS, LAYERS),
    **dict.fromkeys(_WIDTHS, WIDTH),
    **dict.fromkeys(_HEAD_COUNTS, HEADS),
    **dict.fromkeys(_INNER, 2 * WIDTH),
    **dict.fromkeys(_LENGTHS, 128),
    **dict.fromkeys(_EXPERTS, 4),
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    # Windows are shorter than the rows, so that sliding and full attention differ.
    "sliding_window": 4,
    "attention_window": 4,
    "attention_window_size": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "state_size": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}
_GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0, "attention_multiplier": 0.2}
# Latent attention whose heads have other widths than the stream divided by their number.
_LATENT = {"head_dim": None, "num_key_value_heads": HEADS}
_ZAMBA = {
    "num_hidden_layers": 6,
    "layers_block_type": ["mamba", "hybrid", "mamba", "mamba", "hybrid", "mamba"],
    "attention_head_dim": 16,
}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "granite_swa": _GRANITE,
    "granitemoe_swa": _GRANITE,
    "granitemoeshared": _GRANITE | {"shared_intermediate_size": 32},
    "granitemoehybrid": _GRANITE
    | {"shared_intermediate_size": 32, "layer_types": ["mamba", "attention"] * 2, "mamba_chunk_size": 8},
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "axk1", "axk2", "youtu"), _LATENT
    ),
    "minicpm3": _LATENT | {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 8},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25},
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _CONVOLUTIONS | {"num_dense_layers": 1},
    "zamba": _ZAMBA | {"n_mamba_heads": 2, "mamba_dt_rank": 4},
    "zamba2": _ZAMBA
    | {"n_mamba_heads": 4, "mamba_headdim": 16, "mamba_ngroups": 1, "chunk_size": 8, "adapter_rank": 4, "num_mem_blocks": 1}
    | {"hybrid_layer_ids": [1, 4]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2, "chunk_size": 8},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "head_dim": None},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_chunk_size": 8, "lm_head_multiplier": 0.5},
    "bamba": {"mamba_chunk_size": 8, "attn_layer_indices": [1, 3]},
    "jamba": {
        **dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2),
        **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
        "mamba_dt_rank": 4,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*-M",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "chunk_size": 8,
    }
    | {"ssm_state_size": 8},
    "recurrent_gemma": {"num_hidden_layers": 6, "block_types": ["recurrent", "recurrent", "attention"]},
    "qwen3_next": {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "gemma3n_text": {
        "altup_num_inputs": 4,
        "num_kv_shared_layers": 2,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {
        "num_kv_shared_layers": 2,
        "global_head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_heads": HEADS, "window_size": 4},
    "mpt": {"expansion_ratio": 2, "max_seq_len": 128},
    "rwkv": {"attention_hidden_size": WIDTH, "context_length": 128},
    "ctrl": {"dff": 64},
    "xlm": {"emb_dim": WIDTH, "is_decoder": True},
    "xlnet": {"d_inner": 64},
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "phi": {"partial_rotary_factor": 0.5},
    "persimmon": {"partial_rotary_factor": 0.5},
    "stablelm": {"partial_rotary_factor": 0.5},
}


def configuration(family: str, sizes: dict[str, Any] = SIZES) -> Any:
    """The small configuration of a family.

    Args:
        family: the `model_type`.
        sizes: values of settings that many configurations share.
    """
    kind = CONFIG_MAPPING[family]
    default = kind()
    aliases = getattr(kind, "attribute_map", None) or {}
    options: dict[str, Any] = {}
    for name, value in sizes.items():
        # Of two names for one setting, the configuration's own.
        if name in aliases and aliases[name] in sizes:
            continue
        with contextlib.suppress(Exception):
            # Some attributes cannot be read, as they differ by layer.
            is_setting = hasattr(default, name) or name.endswith("_token_id")
            if is_setting:
                options[name] = value
    options |= OPTIONS.get(family, {})
    config = kind(**{name: value for name, value in options.items() if value is not None})
    config._experts_implementation = "eager"
    config._attn_implementation = "eager"
    return config


def causal_model(family: str, seed: int = 0) -> Any:
    """A small random causal language model of a family, in evaluation mode.

    Args:
        family: the `model_type`.
        seed: seed of the weights.

    Raises:
        Exception: transformers cannot build the family small.
    """
    config = configuration(family)
    return random_model(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, 4.0, seed)


def random_model(kind: Any, config: Any, factor: float, seed: int) -> Any:
    """A random model in evaluation mode.

    Args:
        kind: its class.
        config: its configuration.
        factor: factor of the matrices as they are initialised, because a fresh model is nearly the identity.
        seed: seed of the weights.

    Raises:
        ValueError: the model is not small.
    """
    with torch.device("meta"):
        size = sum(weight.numel() for weight in kind(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{kind.__name__} has {size} weights")
    torch.manual_seed(seed)
    model = kind(config)
    # Waves of fixed lengths are computed anew where a model is loaded.
    waves = [module.weight for module in model.modules() if "Sinusoidal" in type(module).__name__ and hasattr(module, "weight")]
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if any(weight is wave for wave in waves):
            continue
        if weight.dim() >= 2:
            weight.data.mul_(factor)
        elif weight.is_floating_point():
            weight.data.add_(0.1 * torch.randn(weight.shape, generator=generator))
    model.tie_weights()
    return model.eval().requires_grad_(False)


FAMILIES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
