"""The parts of every tiny model of `site_cases`, written by hand from the code of transformers."""

from __future__ import annotations

from .site_cases import HEADS, KEY_HEADS, Parts, qkvo

NORMS = {"ln1", "ln2"}
FINAL = {"ln_final"}
MID = {"resid_mid"}
ATTENTION = {"q", "k", "v", "z"}
BERT = {
    "attention": (*(f"attention.self.{name}" for name in ("query", "key", "value")), "attention.output.dense"),
    "mlp": "output.dense",
    "norms": None,
    "without": NORMS | FINAL,
}
NO_Q_V = {"without": NORMS | FINAL | {"q", "v"}}
DEBERTA_V2 = (*(f"attention.self.{name}_proj" for name in ("query", "key", "value")), "attention.output.dense")
LLAMA = {"blocks": "model.layers", "key_heads": KEY_HEADS, "final": "model.norm"}
NEOX = {
    "blocks": "gpt_neox.layers",
    "attention": qkvo("attention", "query_key_value query_key_value query_key_value dense"),
    "mlp": "mlp.dense_4h_to_h",
    "fused": "heads qkv",
    "final": "gpt_neox.final_layer_norm",
}
OPT = {
    "blocks": "model.decoder.layers",
    "attention": qkvo("self_attn", "q_proj k_proj v_proj out_proj"),
    "mlp": "fc2",
    "norms": ("self_attn_layer_norm", "final_layer_norm"),
    "final": "model.decoder.final_layer_norm",
}
BLOOM = {
    "blocks": "transformer.h",
    "attention": qkvo("self_attention", "query_key_value query_key_value query_key_value dense"),
    "mlp": "mlp.dense_4h_to_h",
    "fused": "heads qkv",
    "final": "transformer.ln_f",
}
ONE_NORM = ("input_layernorm", "input_layernorm")
GEMMA2 = LLAMA | {
    "norms": ("input_layernorm", "pre_feedforward_layernorm"),
    "after": ("post_attention_layernorm", "post_feedforward_layernorm"),
}
VIT = {
    "attention": qkvo("attention", "q_proj k_proj v_proj o_proj"),
    "mlp": "mlp.fc2",
    "norms": ("layernorm_before", "layernorm_after"),
}
DINO = VIT | {"norms": ("norm1", "norm2"), "after": ("layer_scale1", "layer_scale2"), "final": "dinov2.layernorm"}
CLIP = {
    "attention": qkvo("self_attn", "q_proj k_proj v_proj out_proj"),
    "mlp": "mlp.fc2",
    "norms": ("layer_norm1", "layer_norm2"),
}
T5 = {
    "attention": qkvo("layer.0.SelfAttention", "q k v o"),
    "final": "encoder.final_layer_norm",
    "prefix": "encoder.",
    "blocks": "encoder.block",
    "mlp": "layer.1.DenseReluDense.wo",
    "norms": ("layer.0.layer_norm", "layer.1.layer_norm"),
}
T5_DECODER = T5 | {
    "final": "decoder.final_layer_norm",
    "prefix": "decoder.",
    "blocks": "decoder.block",
    "mlp": "layer.2.DenseReluDense.wo",
    "norms": ("layer.0.layer_norm", "layer.2.layer_norm"),
}
BART = {"attention": CLIP["attention"], "mlp": "fc2", "norms": None, "without": NORMS | FINAL}
DETR = {"mlp": "mlp.fc2", "norms": None, "without": NORMS | FINAL}

STACKS = (
    *(Parts(name, **LLAMA) for name in ("llama", "mistral", "qwen2", "qwen3", "gemma", "olmo")),
    Parts("mixtral", **LLAMA | {"mlp": None, "without": {"mlp_post"}}),
    Parts("gemma2", **GEMMA2),
    Parts("gemma3", **GEMMA2),
    Parts("phi3", **LLAMA | {"attention": qkvo("self_attn", "qkv_proj qkv_proj qkv_proj o_proj"), "fused": "rows"}),
    Parts(
        "olmo2",
        **LLAMA | {"norms": None, "after": ("post_attention_layernorm", "post_feedforward_layernorm"), "without": NORMS},
    ),
    Parts(
        "phi",
        "model.layers",
        attention=qkvo("self_attn", "q_proj k_proj v_proj dense"),
        mlp="mlp.fc2",
        norms=ONE_NORM,
        parallel=True,
        final="model.final_layernorm",
        without=MID,
    ),
    Parts(
        "gpt2",
        "transformer.h",
        attention=qkvo("attn", "c_attn c_attn c_attn c_proj"),
        mlp="mlp.c_proj",
        norms=("ln_1", "ln_2"),
        fused="qkv heads",
        final="transformer.ln_f",
    ),
    Parts(
        "gptj",
        "transformer.h",
        attention=qkvo("attn", "q_proj k_proj v_proj out_proj"),
        mlp="mlp.fc_out",
        norms=("ln_1", "ln_1"),
        parallel=True,
        final="transformer.ln_f",
        without=MID,
    ),
    Parts("neox", **NEOX | {"parallel": True, "without": MID}),
    Parts("neox sequential", **NEOX),
    Parts("opt", **OPT),
    Parts("opt post-norm", **OPT | {"norms": None, "final": "", "without": NORMS | FINAL}),
    Parts("bloom", **BLOOM),
    Parts("bloom from norms", **BLOOM),
    Parts(
        "falcon",
        **BLOOM | {"fused": "groups", "key_heads": KEY_HEADS, "norms": ("ln_attn", "ln_mlp"), "parallel": True, "without": MID},
    ),
    Parts(
        "falcon one norm",
        **BLOOM | {"fused": "groups", "key_heads": KEY_HEADS, "norms": ONE_NORM, "parallel": True, "without": MID},
    ),
    Parts(
        "falcon multi-query",
        **BLOOM | {"fused": "rows", "key_heads": 1, "norms": ONE_NORM, "parallel": True, "without": MID},
    ),
    Parts("falcon sequential", **BLOOM),
    Parts(
        "mpt",
        "transformer.blocks",
        attention=qkvo("attn", "Wqkv Wqkv Wqkv out_proj"),
        mlp="ffn.down_proj",
        norms=("norm_1", "norm_2"),
        fused="qkv heads",
        final="transformer.norm_f",
    ),
    *(Parts(name, f"{name}.encoder.layer", **BERT) for name in ("bert", "roberta", "electra")),
    Parts("mpnet", "mpnet.encoder.layer", **BERT | {"attention": qkvo("attention.attn", "q k v o")}),
    Parts(
        "distilbert",
        "distilbert.transformer.layer",
        **BERT | {"attention": qkvo("attention", "q_lin k_lin v_lin out_lin"), "mlp": "ffn.lin2"},
    ),
    Parts(
        "deberta",
        "deberta.encoder.layer",
        **BERT | {"attention": (*["attention.self.in_proj"] * 3, "attention.output.dense"), "fused": "heads qkv"} | NO_Q_V,
    ),
    Parts("deberta-v2", "deberta.encoder.layer", **BERT | {"attention": DEBERTA_V2}),
    Parts(
        "deberta-v3",
        "deberta.encoder.layer",
        **BERT | {"attention": DEBERTA_V2, "without": NORMS | FINAL | {"q", "k"}},
    ),
    Parts(
        "modernbert",
        "model.layers",
        attention=qkvo("attn", "Wqkv Wqkv Wqkv Wo"),
        mlp="mlp.Wo",
        norms=("attn_norm", "mlp_norm"),
        fused="qkv heads",
        final="model.final_norm",
    ),
    Parts("beit", "beit.layers", **VIT | {"without": {"attn_out", "mlp_out"} | FINAL}),
    Parts("beit unscaled", "beit.layers", final="beit.layernorm", **VIT),
    Parts("swin", "swin.encoder.layers.0.blocks", prefix="stages.0.", **VIT | {"without": ATTENTION | FINAL}),
    Parts("swin", "swin.encoder.layers.1.blocks", prefix="stages.1.", final="swin.layernorm", **VIT | {"without": ATTENTION}),
    Parts("vit", "vit.layers", final="vit.layernorm", **VIT),
    Parts("deit", "deit.layers", final="deit.layernorm", **VIT),
    Parts("dinov2", "dinov2.encoder.layer", **DINO),
    Parts("dinov2 gated", "dinov2.encoder.layer", **DINO | {"mlp": "mlp.down_proj"}),
    Parts("clip", "text_model.encoder.layers", prefix="text.", final="text_model.final_layer_norm", **CLIP),
    Parts("clip", "vision_model.encoder.layers", prefix="vision.", without=FINAL, **CLIP),
    Parts("siglip", "text_model.encoder.layers", prefix="text.", final="text_model.final_layer_norm", **CLIP),
    Parts("siglip", "vision_model.encoder.layers", prefix="vision.", final="vision_model.post_layernorm", **CLIP),
    Parts("t5", **T5),
    Parts("t5", **T5_DECODER),
    Parts("t5 gated", **T5),
    Parts("t5 gated", **T5_DECODER),
    Parts("bart", "model.encoder.layers", prefix="encoder.", heads=2, key_heads=2, **BART),
    Parts("bart", "model.decoder.layers", prefix="decoder.", heads=HEADS, **BART),
    Parts("detr", "model.encoder.layers", prefix="encoder.", heads=2, key_heads=2, **DETR),
    Parts("detr", "model.decoder.layers", prefix="decoder.", **DETR | {"final": "model.decoder.layernorm", "without": NORMS}),
)
