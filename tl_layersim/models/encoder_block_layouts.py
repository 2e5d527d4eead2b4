"""Layouts of the blocks of encoders, vision models and encoder-decoders, the second part of the table of layouts.

A new layout is one entry in `ENCODER_LAYOUTS`. Module paths are those of transformers 5, relative to the block.
"""

from __future__ import annotations

from typing import Any

import torch

from .block_layout import (
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
    post_norm_sums,
)

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
_BART = attention_tensors("self_attn", "q_proj k_proj v_proj", "out_proj") | {"mlp_post": into("fc2"), "mlp_out": out_of("fc2")}
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
_DETR = {
    **attention_tensors("self_attn", "q_proj k_proj v_proj", "o_proj"),
    **mlp_tensors("mlp", "fc2"),
    "resid_mid": out_of("self_attn_layer_norm"),
}
_SCALED = "what is added to the stream is multiplied by a parameter of the block, outside any module"
_WINDOWS = "its attention runs in windows, so that this activation has the positions of windows and not those of the stream"
_BIASES = "their biases are parameters of the attention, added outside any module"
_SHARED = "its projection also runs on the embeddings of relative positions"


def _shares_projections(block: Any) -> bool:
    """Whether queries and keys of relative positions are computed by the modules of those of tokens."""
    attention = block.attention.self
    return bool(attention.share_att_key and attention.relative_attention)


def _deberta_v2(shared: bool) -> BlockLayout:
    """DeBERTa v2 and v3, whose relative positions may share the projections of queries and keys."""
    attention = attention_tensors("attention.self", "query_proj key_proj value_proj", "")
    return BlockLayout(
        ("DebertaV2Layer",),
        {family: tensor for family, tensor in attention.items() if not (shared and family in "qk")}
        | {
            "z": into("attention.output.dense"),
            "attn_out": out_of("attention.output.dense"),
            "resid_mid": out_of("attention.output.LayerNorm"),
        }
        | _BERT_MLP,
        sums=post_norm_sums("attention.output.LayerNorm", "output.LayerNorm"),
        lacks=POST_NORM_LACKS | (dict.fromkeys(("q", "k"), _SHARED) if shared else {}),
        when=lambda block, config: _shares_projections(block) == shared,
    )


def _beit(scaled: bool) -> BlockLayout:
    """BEiT, with or without layer scale."""
    outputs = mlp_tensors("mlp", "fc2")
    tensors = _VIT | norm_tensors("layernorm_before", "layernorm_after") | outputs
    return BlockLayout(
        ("BeitLayer",),
        {family: tensor for family, tensor in tensors.items() if not (scaled and family in ("attn_out", "mlp_out"))},
        sums=() if scaled else SEQUENTIAL,
        final=("layernorm",),
        lacks=dict.fromkeys(("attn_out", "mlp_out"), _SCALED) if scaled else {},
        when=lambda block, config: isinstance(block.lambda_1, torch.Tensor) == scaled,
    )


ENCODER_LAYOUTS: tuple[BlockLayout, ...] = (
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
        lacks=POST_NORM_LACKS,
    ),
    BlockLayout(
        ("DebertaLayer",),
        {
            "k": out_of("attention.self.in_proj"),
            "z": into("attention.output.dense"),
            "attn_out": out_of("attention.output.dense"),
            "resid_mid": out_of("attention.output.LayerNorm"),
            **_BERT_MLP,
        },
        fused="heads qkv",
        sums=post_norm_sums("attention.output.LayerNorm", "output.LayerNorm"),
        lacks=POST_NORM_LACKS
        | dict.fromkeys(("q", "v"), "their biases are parameters of the attention, added outside any module"),
    ),
    *(_deberta_v2(shared) for shared in (False, True)),
    BlockLayout(
        ("ModernBertEncoderLayer",),
        {
            **attention_tensors("attn", "Wqkv", "Wo"),
            **norm_tensors("attn_norm", "mlp_norm"),
            **mlp_tensors("mlp", "Wo"),
        },
        fused="qkv heads",
        final=("final_norm",),
    ),
    BlockLayout(
        ("MPNetLayer",),
        {
            **attention_tensors("attention.attn", "q k v", "o"),
            "resid_mid": out_of("attention.LayerNorm"),
            **_BERT_MLP,
        },
        sums=post_norm_sums("attention.LayerNorm", "output.LayerNorm"),
        lacks=POST_NORM_LACKS,
    ),
    BlockLayout(
        ("TransformerBlock",),  # DistilBERT
        {
            **attention_tensors("attention", "q_lin k_lin v_lin", "out_lin"),
            "resid_mid": out_of("sa_layer_norm"),
            **mlp_tensors("ffn", "lin2"),
        },
        sums=post_norm_sums("sa_layer_norm", "output_layer_norm"),
        lacks=POST_NORM_LACKS,
    ),
    BlockLayout(
        ("ViTLayer", "DeiTLayer"),
        _VIT | norm_tensors("layernorm_before", "layernorm_after") | mlp_tensors("mlp", "fc2"),
        final=("layernorm",),
    ),
    *(_beit(scaled) for scaled in (True, False)),
    BlockLayout(
        ("SwinLayer",),
        {
            **norm_tensors("layernorm_before", "layernorm_after"),
            # Behind the attention, windows are joined and shifted back.
            "attn_out": out_of("drop_path"),
            **mlp_tensors("mlp", "fc2"),
        },
        final=("layernorm",),
        lacks=dict.fromkeys(("q", "k", "v", "z"), _WINDOWS),
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
        _BART | {"resid_mid": out_of("self_attn_layer_norm")},
        sums=post_norm_sums("self_attn_layer_norm", "final_layer_norm"),
        lacks=POST_NORM_LACKS,
    ),
    BlockLayout(
        ("BartDecoderLayer",),
        {
            **_BART,
            "resid_mid": out_of("self_attn_layer_norm"),
            "cross_attn_out": out_of("encoder_attn"),
            "resid_mid_cross": out_of("encoder_attn_layer_norm"),
        },
        sums=_POST_CROSS,
        lacks=POST_NORM_LACKS,
        head_count="decoder_attention_heads",
    ),
    BlockLayout(
        ("DetrEncoderLayer",),
        _DETR,
        sums=post_norm_sums("self_attn_layer_norm", "final_layer_norm"),
        lacks=POST_NORM_LACKS,
    ),
    # A norm follows the last block of the decoder, although its blocks end in one.
    BlockLayout(
        ("DetrDecoderLayer",),
        _DETR | {"cross_attn_out": out_of("encoder_attn"), "resid_mid_cross": out_of("encoder_attn_layer_norm")},
        sums=_POST_CROSS,
        final=("layernorm",),
        lacks=SUBLAYER_NORM_LACKS,
        head_count="decoder_attention_heads",
    ),
)
