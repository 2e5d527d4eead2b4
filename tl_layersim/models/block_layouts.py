"""The table of layouts of transformer blocks, by which hook points of Hugging Face models are found.

A new layout is one entry in `LAYOUTS`; those of encoders, vision models and encoder-decoders are in `encoder_block_layouts`.
Module paths are those of transformers 5, relative to the block.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from .block_layout import (
    NO_MID,
    PARALLEL,
    POST_NORM_LACKS,
    SEQUENTIAL,
    SUBLAYER_NORM_LACKS,
    BlockLayout,
    BlockSum,
    attention_tensors,
    into,
    mlp_tensors,
    norm_tensors,
    out_of,
    parallel_norm_tensors,
    post_norm_sums,
)
from .encoder_block_layouts import ENCODER_LAYOUTS

_LLAMA = attention_tensors("self_attn", "q_proj k_proj v_proj", "o_proj") | norm_tensors(
    "input_layernorm", "post_attention_layernorm"
)
_LLAMA_MLP = mlp_tensors("mlp", "down_proj")
_NEOX = attention_tensors("attention", "query_key_value", "dense") | mlp_tensors("mlp", "dense_4h_to_h")
_FALCON = attention_tensors("self_attention", "query_key_value", "dense") | mlp_tensors("mlp", "dense_4h_to_h")
_OPT = attention_tensors("self_attn", "q_proj k_proj v_proj", "out_proj") | {"mlp_post": into("fc2"), "mlp_out": out_of("fc2")}
# The stream of these Blooms continues from the output of each norm.
_BLOOM_POST: tuple[BlockSum, ...] = (("resid_mid", ("ln1", "attn_out")), ("resid_post", ("ln2", "mlp_out")))
_MIXER = "its blocks have a state-space mixer in place of attention and MLP, and no heads"


def _falcon_kind(config: Any) -> str:
    """How a Falcon splits the output of its fused projection."""
    if config.new_decoder_architecture:
        return "groups"
    return "rows" if config.multi_query else "heads qkv"


def _falcon_norms(block: torch.nn.Module, config: Any) -> str:
    """Which norms a Falcon block has: of attention and MLP in parallel ("two" or "one"), or in sequence."""
    if hasattr(block, "ln_attn"):
        return "two"
    return "one" if config.parallel_attn or config.new_decoder_architecture else "sequence"


def _falcon(norms: str, kind: Literal["groups", "rows", "heads qkv"]) -> BlockLayout:
    first, second = {
        "two": ("ln_attn", "ln_mlp"),
        "one": ("input_layernorm", "input_layernorm"),
        "sequence": ("input_layernorm", "post_attention_layernorm"),
    }[norms]
    sequence = norms == "sequence"
    return BlockLayout(
        ("FalconDecoderLayer",),
        _FALCON | (norm_tensors(first, second) if sequence else parallel_norm_tensors(first, second)),
        fused=kind,
        sums=SEQUENTIAL if sequence else PARALLEL,
        final=("ln_f",),
        lacks={} if sequence else {"resid_mid": NO_MID},
        when=lambda block, config: (_falcon_norms(block, config), _falcon_kind(config)) == (norms, kind),
    )


def _bloom(after_norm: bool) -> BlockLayout:
    """Bloom, whose stream continues from the outputs of the norms in some configurations."""
    return BlockLayout(
        ("BloomBlock",),
        {
            **attention_tensors("self_attention", "query_key_value", "dense"),
            **norm_tensors("input_layernorm", "post_attention_layernorm"),
            # The modules of attention and MLP add the stream to what they compute.
            "attn_out": out_of("self_attention.dense"),
            "mlp_post": into("mlp.dense_4h_to_h"),
            "mlp_out": out_of("mlp.dense_4h_to_h"),
        },
        fused="heads qkv",
        sums=_BLOOM_POST if after_norm else SEQUENTIAL,
        final=("ln_f",),
        # Slices of the output projections take the place of its module where `slow_but_exact` is set.
        when=lambda block, config: (
            config.apply_residual_connection_post_layernorm == after_norm
            and not (config.slow_but_exact and config.pretraining_tp > 1)
        ),
    )


LAYOUTS: tuple[BlockLayout, ...] = (
    BlockLayout(
        (
            "LlamaDecoderLayer",
            "MistralDecoderLayer",
            "Qwen2DecoderLayer",
            "Qwen3DecoderLayer",
            "GemmaDecoderLayer",
            "OlmoDecoderLayer",
        ),
        _LLAMA | _LLAMA_MLP,
    ),
    BlockLayout(
        ("MixtralDecoderLayer",),
        _LLAMA | {"mlp_out": out_of("mlp")},
        lacks={"mlp_post": "each expert of its mixture has neurons of its own, for the tokens that are routed to it"},
    ),
    BlockLayout(
        ("Phi3DecoderLayer",),
        _LLAMA | attention_tensors("self_attn", "qkv_proj", "o_proj") | _LLAMA_MLP,
        fused="rows",
    ),
    BlockLayout(
        ("Gemma2DecoderLayer", "Gemma3DecoderLayer"),
        {
            **_LLAMA,
            **_LLAMA_MLP,
            **norm_tensors("input_layernorm", "pre_feedforward_layernorm"),
            "attn_out": out_of("post_attention_layernorm"),
            "mlp_out": out_of("post_feedforward_layernorm"),
        },
    ),
    BlockLayout(
        ("Olmo2DecoderLayer", "Olmo3DecoderLayer"),
        {
            **attention_tensors("self_attn", "q_proj k_proj v_proj", "o_proj"),
            **_LLAMA_MLP,
            "attn_out": out_of("post_attention_layernorm"),
            "resid_mid": into("mlp"),
            "mlp_out": out_of("post_feedforward_layernorm"),
        },
        lacks=SUBLAYER_NORM_LACKS,
    ),
    BlockLayout(
        ("PhiDecoderLayer",),
        {
            **attention_tensors("self_attn", "q_proj k_proj v_proj", "dense"),
            **mlp_tensors("mlp", "fc2"),
            **parallel_norm_tensors("input_layernorm", "input_layernorm"),
        },
        sums=PARALLEL,
        final=("final_layernorm",),
        lacks={"resid_mid": NO_MID},
    ),
    BlockLayout(
        ("GPTJBlock",),
        {
            **attention_tensors("attn", "q_proj k_proj v_proj", "out_proj"),
            **mlp_tensors("mlp", "fc_out"),
            **parallel_norm_tensors("ln_1", "ln_1"),
        },
        sums=PARALLEL,
        final=("ln_f",),
        lacks={"resid_mid": NO_MID},
    ),
    BlockLayout(
        ("GPT2Block",),
        attention_tensors("attn", "c_attn", "c_proj") | norm_tensors("ln_1", "ln_2") | mlp_tensors("mlp", "c_proj"),
        fused="qkv heads",
        final=("ln_f",),
    ),
    BlockLayout(
        ("GPTNeoXLayer",),
        _NEOX | parallel_norm_tensors("input_layernorm", "post_attention_layernorm"),
        fused="heads qkv",
        sums=PARALLEL,
        final=("final_layer_norm",),
        lacks={"resid_mid": NO_MID},
        when=lambda block, config: bool(config.use_parallel_residual),
    ),
    BlockLayout(
        ("GPTNeoXLayer",),
        _NEOX | norm_tensors("input_layernorm", "post_attention_layernorm"),
        fused="heads qkv",
        final=("final_layer_norm",),
    ),
    BlockLayout(
        ("OPTDecoderLayer",),
        _OPT | norm_tensors("self_attn_layer_norm", "final_layer_norm"),
        final=("final_layer_norm",),
        when=lambda block, config: bool(config.do_layer_norm_before),
    ),
    BlockLayout(
        ("OPTDecoderLayer",),
        _OPT | {"resid_mid": out_of("self_attn_layer_norm")},
        sums=post_norm_sums("self_attn_layer_norm", "final_layer_norm"),
        lacks=POST_NORM_LACKS,
    ),
    *(_bloom(after_norm) for after_norm in (False, True)),
    *(_falcon(norms, kind) for norms in ("two", "one", "sequence") for kind in ("groups", "rows", "heads qkv")),
    BlockLayout(
        ("MptBlock",),
        {
            **attention_tensors("attn", "Wqkv", "out_proj"),
            **norm_tensors("norm_1", "norm_2"),
            # The module of the MLP adds the stream to what it computes.
            "mlp_post": into("ffn.down_proj"),
            "mlp_out": out_of("ffn.down_proj"),
        },
        fused="qkv heads",
        final=("norm_f",),
    ),
    BlockLayout(
        ("MambaBlock",),
        {},
        sums=(),
        final=("norm_f",),
        lacks=dict.fromkeys(("resid_mid", "attn_out", "mlp_out", "z", "q", "k", "v", "mlp_post", "ln1", "ln2"), _MIXER),
    ),
    *ENCODER_LAYOUTS,
)


def layout_of(block: torch.nn.Module, config: Any) -> BlockLayout | None:
    """The layout of a block; None where the table has none.

    Args:
        block: the block, of transformers or of a class that inherits from one.
        config: its configuration.
    """
    names = {cls.__name__ for cls in type(block).__mro__}
    for layout in LAYOUTS:
        if names.isdisjoint(layout.classes) or config is None:
            continue
        # Other libraries have blocks of the same name.
        if layout.when(block, config) and all(_has(block, tensor.path) for tensor in layout.tensors.values()):
            return layout
    return None


def _has(block: torch.nn.Module, path: str) -> bool:
    try:
        block.get_submodule(path)
    except AttributeError:
        return False
    return True
