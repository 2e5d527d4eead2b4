"""The tables of architectures: paths of blocks, layouts of blocks, heads and towers.

A new architecture is one row of each table that it needs:

- `BLOCKS`: the path of the list of blocks;
- `LAYOUTS`: which module's input or output holds each family of hook points in a block, and the final norm;
- `HEADS_BY_CLASS`: a head that is not one module, or does not read one position of a row; `NO_HEAD`: why a class has none;
- `TOWERS_BY_TYPE`: the towers of a model of images and texts.

Paths are those of transformers 5; those of `LAYOUTS` are relative to the block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from .unembed import Head, HeadPart, Pool

# Paths of the list of blocks, from the base model (`model.model`, `model.transformer`, `model.gpt_neox`, `model.bert`, ...).
BLOCKS = (
    "layers",  # Llama, Qwen2, Mistral, Mixtral, Gemma 1 to 3, Phi, OLMo, GPT-NeoX, Mamba, ModernBERT, ViT, DeiT, BEiT
    "h",  # GPT-2, GPT-J, Falcon, Bloom
    "language_model.layers",  # Gemma 3 and others with a vision tower
    "decoder.layers",  # OPT
    "encoder.layer",  # BERT, RoBERTa, ELECTRA, DeBERTa, MPNet, DINOv2
    "encoder.layers",  # CLIP and SigLIP towers; the stages of a Swin
    "encoder.block",  # the encoder of a T5 alone
    "block",  # one stack of a T5
    "transformer.layer",  # DistilBERT
    "blocks",  # MPT, and TransformerLens models as plain modules
)
# Keys and values of attention to the encoder have the encoder's positions, although they are computed in the decoder.
CROSS_ATTENTION = ("EncDecAttention", "encoder_attn", "crossattention", "cross_attn")
OF_ENCODER = ("k", "v", "key", "value", "k_proj", "v_proj")
# Children that hold the towers of a model of images and texts, by the name of the tower.
TOWER_MODULES = {"text": "text_model", "vision": "vision_model"}

# Values of `model_type`: of models without a row in `LAYOUTS` whose blocks end in a layer norm; of models whose heads read
# scaled inputs if they share the weights of the embedding; of models that number positions from the padding index on; and of
# models whose blocks pass on `pos batch width`.
OTHER_POST_NORM = ("openai-gpt",)
SCALED_IF_TIED = ("umt5", "switch_transformers")
NUMBERED_FROM_PAD = ("roberta", "mpnet", "xlm-roberta")
POSITIONS_FIRST = ("xlnet", "fsmt")
# Names of the unembedding in models without get_output_embeddings.
HEADS = ("lm_head", "embed_out", "unembed", "output")


class ModuleTensor(NamedTuple):
    """The input or the output of a module in a block.

    Attributes:
        path: path of the module, relative to the block; "" for the block itself.
        incoming: True for the module's input, False for its output.
        multiplier: factor of the tensor, such as Granite's `residual_multiplier` of what is added to the stream.
    """

    path: str
    incoming: bool
    multiplier: float = 1.0


def input_of(path: str) -> ModuleTensor:
    """The input of a module in a block."""
    return ModuleTensor(path, True)


def output_of(path: str) -> ModuleTensor:
    """The output of a module in a block."""
    return ModuleTensor(path, False)


# A family of the block, or a tensor that belongs to no family, such as the input of BERT's layer norms.
Term = str | ModuleTensor
# A sum in a block: the total, and its terms. It holds to rounding in evaluation mode.
BlockSum = tuple[Term, tuple[Term, ...]]
Fused = Literal["", "qkv heads", "heads qkv", "groups", "rows"]

SEQUENTIAL: tuple[BlockSum, ...] = (("resid_mid", ("resid_pre", "attn_out")), ("resid_post", ("resid_mid", "mlp_out")))
PARALLEL: tuple[BlockSum, ...] = (("resid_post", ("resid_pre", "attn_out", "mlp_out")),)
NO_MID = "attention and MLP run in parallel on one stream, so that there is no stream between them"
NORMS_AFTER = "its norms stand after attention and MLP, which read the stream itself (hook_resid_pre and hook_resid_mid)"
NO_FINAL = "the last block ends in a layer norm, so that no norm follows it"
# What layouts lack whose norms stand after the sublayers, inside the branch; and those whose norms stand on the stream.
SUBLAYER_NORM_LACKS = {"ln1": NORMS_AFTER, "ln2": NORMS_AFTER}
POST_NORM_LACKS = SUBLAYER_NORM_LACKS | {"ln_final": NO_FINAL}


@dataclass(frozen=True)
class BlockLayout:
    """Layout of a block: the module input or output of each site family, and the stream sums.

    Attributes:
        classes: class names of blocks with this layout.
        tensors: for each family, the tensor that holds it.
        fused: order of heads in the output of a fused query-key-value projection: "qkv heads" for `(3, heads, d_head)`, "heads
            qkv" for `(heads, 3, d_head)`, "groups" for `(key-value heads, queries of the group + 2, d_head)`, "rows" for
            `(heads + 2 key-value heads, d_head)`; "" for separate projections; or a function of the configuration that returns
            one of these.
        sums: the stream sums of a block.
        final: possible names of the final norm, beside the list of blocks or above it.
        lacks: for each family that the layout lacks, the reason.
        when: function of the block and its configuration that tells whether the block has this layout.
        head_count: configuration attribute with the number of heads.
    """

    classes: tuple[str, ...]
    tensors: Mapping[str, ModuleTensor]
    fused: Fused | Callable[[Any], Fused] = ""
    sums: tuple[BlockSum, ...] = SEQUENTIAL
    final: tuple[str, ...] = ("norm",)
    lacks: Mapping[str, str] = field(default_factory=dict)
    when: Callable[[Any, Any], bool] = lambda block, config: True
    head_count: str = "num_attention_heads"


def attention_tensors(path: str, names: str, output: str) -> dict[str, ModuleTensor]:
    """A dict from site families, such as "q", to the tensors of an attention module.

    Args:
        path: path of the module.
        names: names of its query, key and value projections, or of the one fused projection, separated by spaces.
        output: name of its output projection.
    """
    projections = names.split()
    if len(projections) == 1:
        # The fused projection holds all three.
        projections *= 3
    tensors: dict[str, ModuleTensor] = {}
    for family, projection in zip("qkv", projections, strict=True):
        tensors[family] = output_of(f"{path}.{projection}")
    tensors["z"] = input_of(f"{path}.{output}")
    tensors["attn_out"] = output_of(path)
    return tensors


def mlp_tensors(path: str, output: str) -> dict[str, ModuleTensor]:
    """A dict from site families, such as "mlp_out", to the tensors of an MLP. `output` names its output projection."""
    return {"mlp_post": input_of(f"{path}.{output}"), "mlp_out": output_of(path)}


def norm_tensors(first: str, second: str) -> dict[str, ModuleTensor]:
    """The tensors of the two norms in a sequential pre-norm block."""
    return {"ln1": output_of(first), "resid_mid": input_of(second), "ln2": output_of(second)}


def parallel_norm_tensors(first: str, second: str) -> dict[str, ModuleTensor]:
    """The outputs of the norms before attention and MLP in a parallel block. Both may be the same norm."""
    return {"ln1": output_of(first), "ln2": output_of(second)}


def post_norm_sums(mid: str, end: str) -> tuple[BlockSum, ...]:
    """The additions to the residual stream in a post-norm block, whose norms follow the additions."""
    return ((input_of(mid), ("resid_pre", "attn_out")), (input_of(end), ("resid_mid", "mlp_out")))


_LLAMA = attention_tensors("self_attn", "q_proj k_proj v_proj", "o_proj") | norm_tensors(
    "input_layernorm", "post_attention_layernorm"
)
_LLAMA_MLP = mlp_tensors("mlp", "down_proj")
_NEOX = attention_tensors("attention", "query_key_value", "dense") | mlp_tensors("mlp", "dense_4h_to_h")
_FALCON = attention_tensors("self_attention", "query_key_value", "dense") | mlp_tensors("mlp", "dense_4h_to_h")
_OPT = {
    **attention_tensors("self_attn", "q_proj k_proj v_proj", "out_proj"),
    "mlp_post": input_of("fc2"),
    "mlp_out": output_of("fc2"),
}
_BLOOM = {
    **attention_tensors("self_attention", "query_key_value", "dense"),
    **norm_tensors("input_layernorm", "post_attention_layernorm"),
    # The modules of attention and MLP add the stream to what they compute.
    "attn_out": output_of("self_attention.dense"),
    "mlp_post": input_of("mlp.dense_4h_to_h"),
    "mlp_out": output_of("mlp.dense_4h_to_h"),
}
# The stream of these Blooms continues from the output of each norm.
_BLOOM_POST: tuple[BlockSum, ...] = (("resid_mid", ("ln1", "attn_out")), ("resid_post", ("ln2", "mlp_out")))
_MIXER = "its blocks have a state-space mixer in place of attention and MLP, and no heads"
# Of encoders, vision models and encoder-decoders.
_VIT_ATTENTION = attention_tensors("attention", "q_proj k_proj v_proj", "o_proj")
_VIT = _VIT_ATTENTION | norm_tensors("layernorm_before", "layernorm_after") | mlp_tensors("mlp", "fc2")
_DINO = {
    **_VIT_ATTENTION,
    **norm_tensors("norm1", "norm2"),
    "attn_out": output_of("layer_scale1"),
    "mlp_out": output_of("layer_scale2"),
}
_CLIP = {
    **attention_tensors("self_attn", "q_proj k_proj v_proj", "out_proj"),
    **norm_tensors("layer_norm1", "layer_norm2"),
    **mlp_tensors("mlp", "fc2"),
}
_BERT_MLP = {"mlp_post": input_of("output.dense"), "mlp_out": output_of("output.dense")}
_BERT = {
    "z": input_of("attention.output.dense"),
    "attn_out": output_of("attention.output.dense"),
    "resid_mid": output_of("attention.output.LayerNorm"),
    **_BERT_MLP,
}
_BERT_SUMS = post_norm_sums("attention.output.LayerNorm", "output.LayerNorm")
_T5 = {
    **attention_tensors("layer.0.SelfAttention", "q k v", "o"),
    **norm_tensors("layer.0.layer_norm", "layer.1.layer_norm"),
}
_CROSS: tuple[BlockSum, ...] = (
    ("resid_mid", ("resid_pre", "attn_out")),
    ("resid_mid_cross", ("resid_mid", "cross_attn_out")),
    ("resid_post", ("resid_mid_cross", "mlp_out")),
)
_POST_CROSS: tuple[BlockSum, ...] = (
    (input_of("self_attn_layer_norm"), ("resid_pre", "attn_out")),
    (input_of("encoder_attn_layer_norm"), ("resid_mid", "cross_attn_out")),
    (input_of("final_layer_norm"), ("resid_mid_cross", "mlp_out")),
)
_DETR = {
    **attention_tensors("self_attn", "q_proj k_proj v_proj", "o_proj"),
    **mlp_tensors("mlp", "fc2"),
    "resid_mid": output_of("self_attn_layer_norm"),
}
_SCALED = "what is added to the stream is multiplied by a parameter of the block, outside any module"
_WINDOWS = "its attention runs in windows, so that this activation has the positions of windows and not those of the stream"
_BIASES = "their biases are parameters of the attention, added outside any module"
_SHARED = "its projection also runs on the embeddings of relative positions"


def _falcon_fused(config: Any) -> Fused:
    if config.new_decoder_architecture:
        return "groups"
    return "rows" if config.multi_query else "heads qkv"


def _is_sliced(config: Any) -> Any:
    """Whether a Bloom model multiplies by slices of its output projections instead of calling these modules."""
    return config.slow_but_exact and config.pretraining_tp > 1


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
        _LLAMA | {"mlp_out": output_of("mlp")},
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
            "attn_out": output_of("post_attention_layernorm"),
            "mlp_out": output_of("post_feedforward_layernorm"),
        },
    ),
    BlockLayout(
        ("Olmo2DecoderLayer", "Olmo3DecoderLayer"),
        {
            **attention_tensors("self_attn", "q_proj k_proj v_proj", "o_proj"),
            **_LLAMA_MLP,
            "attn_out": output_of("post_attention_layernorm"),
            "resid_mid": input_of("mlp"),
            "mlp_out": output_of("post_feedforward_layernorm"),
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
        when=lambda block, config: config.use_parallel_residual,
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
        when=lambda block, config: config.do_layer_norm_before,
    ),
    BlockLayout(
        ("OPTDecoderLayer", "BartEncoderLayer"),
        _OPT | {"resid_mid": output_of("self_attn_layer_norm")},
        sums=post_norm_sums("self_attn_layer_norm", "final_layer_norm"),
        lacks=POST_NORM_LACKS,
    ),
    BlockLayout(
        ("BloomBlock",),
        _BLOOM,
        fused="heads qkv",
        sums=_BLOOM_POST,
        final=("ln_f",),
        when=lambda block, config: config.apply_residual_connection_post_layernorm and not _is_sliced(config),
    ),
    BlockLayout(
        ("BloomBlock",),
        _BLOOM,
        fused="heads qkv",
        final=("ln_f",),
        when=lambda block, config: not (config.apply_residual_connection_post_layernorm or _is_sliced(config)),
    ),
    BlockLayout(
        ("FalconDecoderLayer",),
        _FALCON | parallel_norm_tensors("ln_attn", "ln_mlp"),
        fused=_falcon_fused,
        sums=PARALLEL,
        final=("ln_f",),
        lacks={"resid_mid": NO_MID},
    ),
    BlockLayout(
        ("FalconDecoderLayer",),
        _FALCON | parallel_norm_tensors("input_layernorm", "input_layernorm"),
        fused=_falcon_fused,
        sums=PARALLEL,
        final=("ln_f",),
        lacks={"resid_mid": NO_MID},
        when=lambda block, config: config.parallel_attn or config.new_decoder_architecture,
    ),
    BlockLayout(
        ("FalconDecoderLayer",),
        _FALCON | norm_tensors("input_layernorm", "post_attention_layernorm"),
        fused=_falcon_fused,
        final=("ln_f",),
    ),
    BlockLayout(
        ("MptBlock",),
        {
            **attention_tensors("attn", "Wqkv", "out_proj"),
            **norm_tensors("norm_1", "norm_2"),
            # The module of the MLP adds the stream to what it computes.
            "mlp_post": input_of("ffn.down_proj"),
            "mlp_out": output_of("ffn.down_proj"),
        },
        fused="qkv heads",
        final=("norm_f",),
    ),
    BlockLayout(
        ("MambaBlock",),
        {"mixer_out": output_of("mixer")},
        # It adds in float32, whatever the dtype of the model.
        sums=(),
        final=("norm_f",),
        lacks=dict.fromkeys(("resid_mid", "attn_out", "mlp_out", "z", "q", "k", "v", "mlp_post", "ln1", "ln2"), _MIXER),
    ),
    # Encoders, vision models and encoder-decoders.
    BlockLayout(
        ("BertLayer", "RobertaLayer", "XLMRobertaLayer", "ElectraLayer"),
        attention_tensors("attention.self", "query key value", "") | _BERT,
        sums=_BERT_SUMS,
        lacks=POST_NORM_LACKS,
    ),
    BlockLayout(
        ("DebertaLayer",),
        {"k": output_of("attention.self.in_proj"), **_BERT},
        fused="heads qkv",
        sums=_BERT_SUMS,
        lacks=POST_NORM_LACKS | dict.fromkeys(("q", "v"), _BIASES),
    ),
    BlockLayout(
        ("DebertaV2Layer",),
        {"v": output_of("attention.self.value_proj"), **_BERT},
        sums=_BERT_SUMS,
        lacks=POST_NORM_LACKS | dict.fromkeys(("q", "k"), _SHARED),
        when=lambda block, config: block.attention.self.share_att_key and block.attention.self.relative_attention,
    ),
    BlockLayout(
        ("DebertaV2Layer",),
        attention_tensors("attention.self", "query_proj key_proj value_proj", "") | _BERT,
        sums=_BERT_SUMS,
        lacks=POST_NORM_LACKS,
    ),
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
            "resid_mid": output_of("attention.LayerNorm"),
            **_BERT_MLP,
        },
        sums=post_norm_sums("attention.LayerNorm", "output.LayerNorm"),
        lacks=POST_NORM_LACKS,
    ),
    BlockLayout(
        ("TransformerBlock",),  # DistilBERT
        {
            **attention_tensors("attention", "q_lin k_lin v_lin", "out_lin"),
            "resid_mid": output_of("sa_layer_norm"),
            **mlp_tensors("ffn", "lin2"),
        },
        sums=post_norm_sums("sa_layer_norm", "output_layer_norm"),
        lacks=POST_NORM_LACKS,
    ),
    BlockLayout(
        ("BeitLayer",),
        {family: tensor for family, tensor in _VIT.items() if family not in ("attn_out", "mlp_out")},
        sums=(),
        final=("layernorm",),
        lacks=dict.fromkeys(("attn_out", "mlp_out"), _SCALED),
        when=lambda block, config: isinstance(block.lambda_1, torch.Tensor),
    ),
    BlockLayout(("ViTLayer", "DeiTLayer", "BeitLayer"), _VIT, final=("layernorm",)),
    BlockLayout(
        ("SwinLayer",),
        {
            **norm_tensors("layernorm_before", "layernorm_after"),
            # Behind the attention, windows are joined and shifted back.
            "attn_out": output_of("drop_path"),
            **mlp_tensors("mlp", "fc2"),
        },
        final=("layernorm",),
        lacks=dict.fromkeys(("q", "k", "v", "z"), _WINDOWS),
    ),
    BlockLayout(
        ("Dinov2Layer", "Dinov2WithRegistersLayer"),
        _DINO | {"mlp_post": input_of("mlp.fc2")},
        final=("layernorm",),
    ),
    BlockLayout(  # the giant model
        ("Dinov2Layer", "Dinov2WithRegistersLayer"),
        _DINO | {"mlp_post": input_of("mlp.down_proj")},
        final=("layernorm",),
    ),
    # The last norm of CLIP's vision tower reads the pooled [CLS] alone; SigLIP's reads every position.
    BlockLayout(("CLIPEncoderLayer",), _CLIP, final=("final_layer_norm",)),
    BlockLayout(("SiglipEncoderLayer",), _CLIP, final=("final_layer_norm", "post_layernorm")),
    BlockLayout(
        ("T5Block",),
        {
            **_T5,
            "cross_attn_out": output_of("layer.1.EncDecAttention"),
            "resid_mid_cross": input_of("layer.2.layer_norm"),
            "ln2": output_of("layer.2.layer_norm"),
            **mlp_tensors("layer.2.DenseReluDense", "wo"),
        },
        sums=_CROSS,
        final=("final_layer_norm",),
        when=lambda block, config: block.is_decoder,
    ),
    BlockLayout(
        ("T5Block",),
        _T5 | mlp_tensors("layer.1.DenseReluDense", "wo"),
        final=("final_layer_norm",),
    ),
    BlockLayout(
        ("BartDecoderLayer",),
        {
            **_OPT,
            "resid_mid": output_of("self_attn_layer_norm"),
            "cross_attn_out": output_of("encoder_attn"),
            "resid_mid_cross": output_of("encoder_attn_layer_norm"),
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
        _DETR | {"cross_attn_out": output_of("encoder_attn"), "resid_mid_cross": output_of("encoder_attn_layer_norm")},
        sums=_POST_CROSS,
        final=("layernorm",),
        lacks=SUBLAYER_NORM_LACKS,
        head_count="decoder_attention_heads",
    ),
)


@dataclass(frozen=True)
class HeadLayout:
    """Layout of an output head: its modules, and the positions that it reads.

    Attributes:
        classes: class names of models with this head.
        parts: see `Head`; `{norm}` stands for the final norm.
        reads: see `Head`.
        norm: path of the final norm, with `{base}` for the base model; "" if there is none, None to find it beside the list of
            blocks.
        pool: function of the configuration that returns the pooling; None for a head that does not read rows.
        when: function of the configuration that tells whether a model has this head.
    """

    classes: tuple[str, ...]
    parts: tuple[HeadPart, ...]
    reads: str = "every"
    norm: str | None = None
    pool: Callable[[Any], Pool] | None = None
    when: Callable[[Any], bool] = lambda config: True


HEADS_BY_CLASS = (
    # Detectors. With auxiliary losses, the norm is applied to the output of each layer, and once more to that of the last.
    HeadLayout(("DetrForObjectDetection",), ("{norm}", "class_labels_classifier"), when=lambda config: config.auxiliary_loss),
    HeadLayout(("DetrForObjectDetection",), ("class_labels_classifier",)),
    # Masked language models whose head is more than one module of the model.
    HeadLayout(("DistilBertForMaskedLM",), ("vocab_transform", "activation", "vocab_layer_norm", "vocab_projector")),
    HeadLayout(("ElectraForMaskedLM", "ElectraForCausalLM"), ("generator_predictions", "generator_lm_head")),
    HeadLayout(("ModernBertForMaskedLM",), ("head", "decoder")),
    # Classifiers of text.
    HeadLayout(("ModernBertForTokenClassification",), ("head", "classifier")),
    HeadLayout(
        ("ModernBertForSequenceClassification",),
        ("head", "classifier"),
        "rows",
        pool=lambda config: Pool(mean_from=0),
        when=lambda config: config.classifier_pooling == "mean",
    ),
    HeadLayout(("ModernBertForSequenceClassification",), ("head", "classifier"), "first"),
    HeadLayout(("DistilBertForSequenceClassification",), ("pre_classifier", "torch.relu", "classifier"), "first"),
    HeadLayout(("DebertaForSequenceClassification", "DebertaV2ForSequenceClassification"), ("pooler", "classifier"), "first"),
    # Classifiers of images.
    HeadLayout(
        ("DeiTForImageClassificationWithTeacher",),
        (("cls_classifier", "distillation_classifier"),),
        "rows",
        pool=lambda config: Pool((0, 1)),
    ),
    HeadLayout(("Dinov2ForImageClassification",), ("classifier",), "rows", pool=lambda config: Pool((0,), 1)),
    HeadLayout(
        ("Dinov2WithRegistersForImageClassification",),
        ("classifier",),
        "rows",
        pool=lambda config: Pool((0,), 1 + config.num_register_tokens),
    ),
    HeadLayout(
        (
            "SiglipForImageClassification",
            "SwinForImageClassification",
            "Swinv2ForImageClassification",
            "IJepaForImageClassification",
        ),
        ("classifier",),
        "rows",
        pool=lambda config: Pool(mean_from=0),
    ),
    # The norm after the encoder of CLIP applies to the vector that is compared with texts, which its classifier does not read.
    HeadLayout(("CLIPForImageClassification",), ("classifier",), "rows", "", lambda config: Pool(mean_from=1)),
    HeadLayout(
        ("BeitForImageClassification", "Data2VecVisionForImageClassification"),
        ("classifier",),
        "rows",
        "{base}.pooler.layernorm",
        lambda config: Pool(mean_from=1, before_norm=True),
        lambda config: config.use_mean_pooling,
    ),
)
# Why models of a class have no head that could be applied to every layer.
NO_HEAD = {
    **dict.fromkeys(
        (
            "BartForSequenceClassification",
            "MBartForSequenceClassification",
            "PLBartForSequenceClassification",
            "MvpForSequenceClassification",
            "BigBirdPegasusForSequenceClassification",
            "T5ForSequenceClassification",
            "MT5ForSequenceClassification",
            "UMT5ForSequenceClassification",
        ),
        "its head reads the decoder at the place where the encoder's input has its last end-of-text token, which the decoder's "
        "own inputs do not give",
    ),
    "VectorSource": "vectors have no model; pass the model itself",
    "ElectraForPreTraining": "its head gives one number for each token, the logit of a replaced token, and no classes",
}


@dataclass(frozen=True)
class Tower:
    """Module paths of the vision or the text tower of a CLIP.

    Attributes:
        name: "vision" or "text".
        path: path of the tower in the model.
        blocks: path of the list of blocks in the tower.
        head: paths of final norm and projection in the model; the norm is "" if the blocks end in a norm.
        end_of_text: whether the head reads a text at its end-of-text token; otherwise it reads the first position, [CLS].
    """

    name: Literal["vision", "text"]
    path: str
    blocks: str
    head: Head
    end_of_text: bool = False


def _text_tower(blocks: str, norm: str, *parts: str, end_of_text: bool = False) -> Tower:
    """A text tower, whose head ends in `text_projection`. The paths of its norm and `parts` are those in the model."""
    head = Head(norm, (*parts, "text_projection"), reads="first")
    return Tower("text", "text_model", blocks, head, end_of_text)


_VISION_HEAD = Head("vision_model.post_layernorm", ("visual_projection",), reads="first")
_VISION = Tower("vision", "vision_model", "encoder.layers", _VISION_HEAD)
_CLIP_TOWERS = (_VISION, _text_tower("encoder.layers", "text_model.final_layer_norm", end_of_text=True))
# Vision and text tower, by the `model_type` of the configuration.
TOWERS_BY_TYPE = {
    "clip": _CLIP_TOWERS,
    "metaclip_2": _CLIP_TOWERS,
    # A BERT, whose blocks end in a norm.
    "chinese_clip": (_VISION, _text_tower("encoder.layer", "")),
    "altclip": (_VISION, _text_tower("roberta.encoder.layers", "text_model.pre_LN", "text_model.transformation")),
}
CLASSES = "CLIPModel, MetaClip2Model, ChineseCLIPModel or AltCLIPModel of transformers"
