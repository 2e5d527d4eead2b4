"""The table of layouts of transformer blocks, by which hook points of Hugging Face models are found.

A new layout is one entry in `LAYOUTS`. Module paths are those of transformers 5, relative to the block.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from .block_layout import (
    NO_FINAL,
    NO_MID,
    NORMS_AFTER,
    PARALLEL,
    SEQUENTIAL,
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

_LLAMA = attention_tensors("self_attn", "q_proj k_proj v_proj", "o_proj") | norm_tensors(
    "input_layernorm", "post_attention_layernorm"
)
_LLAMA_MLP = mlp_tensors("mlp", "down_proj")
_NEOX = attention_tensors("attention", "query_key_value", "dense") | mlp_tensors("mlp", "dense_4h_to_h")
_FALCON = attention_tensors("self_attention", "query_key_value", "dense") | mlp_tensors("mlp", "dense_4h_to_h")
_OPT = attention_tensors("self_attn", "q_proj k_proj v_proj", "out_proj") | {"mlp_post": into("fc2"), "mlp_out": out_of("fc2")}
_VIT = attention_tensors("attention", "q_proj k_proj v_proj", "o_proj")
_CLIP = {
    **attention_tensors("self_attn", "q_proj k_proj v_proj", "out_proj"),
    **norm_tensors("layer_norm1", "layer_norm2"),
    **mlp_tensors("mlp", "fc2"),
}
_BERT_MLP = {"mlp_post": into("output.dense"), "mlp_out": out_of("output.dense")}
_T5 = {
    **attention_tensors("layer.0.SelfAttention", "q k v", "o"),
    **norm_tensors("layer.0.layer_norm", "layer.1.layer_norm"),
}
_AFTER = {"ln1": NORMS_AFTER, "ln2": NORMS_AFTER}
_POST = _AFTER | {"ln_final": NO_FINAL}
_DETR = {
    **attention_tensors("self_attn", "q_proj k_proj v_proj", "o_proj"),
    **mlp_tensors("mlp", "fc2"),
    "resid_mid": out_of("self_attn_layer_norm"),
}
_CROSS: tuple[BlockSum, ...] = (
    ("resid_mid", ("resid_pre", "attn_out")),
    ("resid_mid_cross", ("resid_mid", "cross_attn_out")),
    ("resid_post", ("resid_mid_cross", "mlp_out")),
)
_POST_CROSS: tuple[BlockSum, ...] = (
    (into("self_attn_layer_norm"), ("resid_pre", "attn_out")),
    (into("encoder_attn_layer_norm"), ("resid_mid", "cross_attn_out")),
    (into("final_layer_norm"), ("resid_mid_cross", "mlp_out")),
)
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
        lacks=_AFTER,
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
        lacks=_POST,
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
    BlockLayout(
        ("BertLayer", "RobertaLayer", "XLMRobertaLayer", "ElectraLayer"),
        {
            **attention_tensors("attention.self", "query key value", ""),
            "z": into("attention.output.dense"),
            "attn_out": out_of("attention.output.dense"),
            "resid_mid": out_of("attention.output.LayerNorm"),
            **_BERT_MLP,
        },
        sums=post_norm_sums("attention.output.LayerNorm", "output.LayerNorm"),
        lacks=_POST,
    ),
    BlockLayout(
        ("MPNetLayer",),
        {
            **attention_tensors("attention.attn", "q k v", "o"),
            "resid_mid": out_of("attention.LayerNorm"),
            **_BERT_MLP,
        },
        sums=post_norm_sums("attention.LayerNorm", "output.LayerNorm"),
        lacks=_POST,
    ),
    BlockLayout(
        ("TransformerBlock",),  # DistilBERT
        {
            **attention_tensors("attention", "q_lin k_lin v_lin", "out_lin"),
            "resid_mid": out_of("sa_layer_norm"),
            **mlp_tensors("ffn", "lin2"),
        },
        sums=post_norm_sums("sa_layer_norm", "output_layer_norm"),
        lacks=_POST,
    ),
    BlockLayout(
        ("ViTLayer", "DeiTLayer"),
        _VIT | norm_tensors("layernorm_before", "layernorm_after") | mlp_tensors("mlp", "fc2"),
        final=("layernorm",),
    ),
    *(
        BlockLayout(
            ("Dinov2Layer", "Dinov2WithRegistersLayer"),
            {
                **_VIT,
                **norm_tensors("norm1", "norm2"),
                "attn_out": out_of("layer_scale1"),
                "mlp_post": into(f"mlp.{projection}"),
                "mlp_out": out_of("layer_scale2"),
            },
            final=("layernorm",),
        )
        for projection in ("fc2", "down_proj")  # the second in the giant model
    ),
    # The last norm of CLIP's vision tower reads the pooled [CLS] alone; SigLIP's reads every position.
    BlockLayout(("CLIPEncoderLayer",), _CLIP, final=("final_layer_norm",)),
    BlockLayout(("SiglipEncoderLayer",), _CLIP, final=("final_layer_norm", "post_layernorm")),
    BlockLayout(
        ("T5Block",),
        {
            **_T5,
            "cross_attn_out": out_of("layer.1.EncDecAttention"),
            "resid_mid_cross": into("layer.2.layer_norm"),
            "ln2": out_of("layer.2.layer_norm"),
            **mlp_tensors("layer.2.DenseReluDense", "wo"),
        },
        sums=_CROSS,
        final=("final_layer_norm",),
        when=lambda block, config: bool(block.is_decoder),
    ),
    BlockLayout(
        ("T5Block",),
        _T5 | mlp_tensors("layer.1.DenseReluDense", "wo"),
        final=("final_layer_norm",),
    ),
    BlockLayout(
        ("BartEncoderLayer",),
        _OPT | {"resid_mid": out_of("self_attn_layer_norm")},
        sums=post_norm_sums("self_attn_layer_norm", "final_layer_norm"),
        lacks=_POST,
    ),
    BlockLayout(
        ("BartDecoderLayer",),
        {
            **_OPT,
            "resid_mid": out_of("self_attn_layer_norm"),
            "cross_attn_out": out_of("encoder_attn"),
            "resid_mid_cross": out_of("encoder_attn_layer_norm"),
        },
        sums=_POST_CROSS,
        lacks=_POST,
        head_count="decoder_attention_heads",
    ),
    BlockLayout(
        ("DetrEncoderLayer",),
        _DETR,
        sums=post_norm_sums("self_attn_layer_norm", "final_layer_norm"),
        lacks=_POST,
    ),
    # A norm follows the last block of the decoder, although its blocks end in one.
    BlockLayout(
        ("DetrDecoderLayer",),
        _DETR | {"cross_attn_out": out_of("encoder_attn"), "resid_mid_cross": out_of("encoder_attn_layer_norm")},
        sums=_POST_CROSS,
        final=("layernorm",),
        lacks=_AFTER,
        head_count="decoder_attention_heads",
    ),
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
