"""Tiny random models of every layout of blocks, and what their parts are called, written by hand."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
import transformers

from tl_layersim.architectures.blocks import anatomy_of, choose_stacks
from tl_layersim.architectures.hook_points import HookPoint, at_point
from tl_layersim.architectures.site_selection import site_map

HEADS = 4
KEY_HEADS = 2
D_HEAD = 8
TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = TEXT | {"num_key_value_heads": KEY_HEADS, "head_dim": D_HEAD}
SHORT = {"vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2}
GPT = SHORT | {"n_embd": 32, "n_layer": 2, "n_head": HEADS, "n_positions": 64}
FALCON = SHORT | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": HEADS}
VISION = {key: TEXT[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")} | {
    "image_size": 16,
    "patch_size": 8,
}
DINO = VISION | {"mlp_ratio": 2}
# Two stages of 32 and 64 channels; windows of 2 x 2 patches, which are shifted in every second block.
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2}
DISENTANGLED = TEXT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
T5 = SHORT | {"d_model": 32, "num_layers": 2, "num_heads": HEADS, "d_ff": 48, "d_kv": D_HEAD, "decoder_start_token_id": 0}
BART = SHORT | {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8], "depths": [1], "layer_type": "basic"}
DETR = {
    "backbone_config": RESNET | {"out_features": ["stage1"]},
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "num_queries": 5,
}
MODELS = {
    "llama": ("LlamaForCausalLM", GROUPED),
    "mistral": ("MistralForCausalLM", GROUPED),
    "mixtral": ("MixtralForCausalLM", GROUPED | {"num_local_experts": 4}),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", GROUPED),
    "gemma": ("GemmaForCausalLM", GROUPED),
    "gemma2": ("Gemma2ForCausalLM", GROUPED),
    "gemma3": ("Gemma3ForCausalLM", GROUPED),
    "phi": ("PhiForCausalLM", TEXT),
    "phi3": ("Phi3ForCausalLM", GROUPED),
    "olmo": ("OlmoForCausalLM", TEXT | {"num_key_value_heads": KEY_HEADS}),
    "olmo2": ("Olmo2ForCausalLM", TEXT | {"num_key_value_heads": KEY_HEADS}),
    "gpt2": ("GPT2LMHeadModel", GPT),
    "gptj": ("GPTJForCausalLM", GPT | {"rotary_dim": 4}),
    "neox": ("GPTNeoXForCausalLM", TEXT),
    "neox sequential": ("GPTNeoXForCausalLM", TEXT | {"use_parallel_residual": False}),
    "opt": ("OPTForCausalLM", TEXT | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "opt post-norm": ("OPTForCausalLM", TEXT | {"ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "bloom": ("BloomForCausalLM", SHORT | {"hidden_size": 32, "n_layer": 2, "n_head": HEADS}),
    "bloom from norms": (
        "BloomForCausalLM",
        SHORT | {"hidden_size": 32, "n_layer": 2, "n_head": HEADS, "apply_residual_connection_post_layernorm": True},
    ),
    "falcon": ("FalconForCausalLM", FALCON | {"new_decoder_architecture": True, "num_kv_heads": KEY_HEADS}),
    "falcon one norm": (
        "FalconForCausalLM",
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": KEY_HEADS, "num_ln_in_parallel_attn": 1},
    ),
    "falcon multi-query": ("FalconForCausalLM", FALCON | {"multi_query": True}),
    "falcon sequential": ("FalconForCausalLM", FALCON | {"multi_query": False, "parallel_attn": False, "alibi": True}),
    "mpt": ("MptForCausalLM", SHORT | {"d_model": 32, "n_layers": 2, "n_heads": HEADS, "max_seq_len": 64}),
    "mamba": ("MambaForCausalLM", SHORT | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "bert": ("BertForMaskedLM", TEXT),
    "roberta": ("RobertaForMaskedLM", TEXT),
    "electra": ("ElectraForMaskedLM", TEXT | {"embedding_size": 16}),
    "mpnet": ("MPNetForMaskedLM", TEXT),
    "distilbert": (
        "DistilBertForMaskedLM",
        {"dim": 32, "n_layers": 2, "n_heads": HEADS, "hidden_dim": 48, "vocab_size": 100, "max_position_embeddings": 64},
    ),
    "deberta": ("DebertaForMaskedLM", DISENTANGLED),
    "deberta-v2": ("DebertaV2ForMaskedLM", DISENTANGLED),
    "deberta-v3": ("DebertaV2ForMaskedLM", DISENTANGLED | {"share_att_key": True, "position_buckets": 8}),
    "modernbert": ("ModernBertForMaskedLM", TEXT | {"cls_token_id": 1, "sep_token_id": 2}),
    "vit": ("ViTForImageClassification", VISION),
    "deit": ("DeiTForImageClassification", VISION),
    "dinov2": ("Dinov2ForImageClassification", DINO),
    "dinov2 gated": ("Dinov2ForImageClassification", DINO | {"use_swiglu_ffn": True}),
    "beit": ("BeitForImageClassification", VISION | {"use_relative_position_bias": True}),
    "beit unscaled": (
        "BeitForImageClassification",
        VISION | {"layer_scale_init_value": 0.0, "use_mean_pooling": False, "use_absolute_position_embeddings": True},
    ),
    "swin": ("SwinForImageClassification", SWIN),
    "clip": ("CLIPModel", {"text_config": TEXT, "vision_config": VISION, "projection_dim": 16}),
    "siglip": ("SiglipModel", {"text_config": TEXT, "vision_config": VISION}),
    "t5": ("T5ForConditionalGeneration", T5),
    "t5 gated": ("T5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu"}),
    "bart": ("BartForConditionalGeneration", BART),
    "detr": ("DetrForObjectDetection", DETR),
}


@functools.cache
def model_of(key: str):
    """A float64 model whose norms, biases and layer scales are random, so that no part of it is the identity."""
    name, settings = MODELS[key]
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**settings))
    if hasattr(model.config, "_experts_implementation"):
        # The fused experts do not compute in float64.
        model.config._experts_implementation = "eager"
    model = model.double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def inputs_of(key: str, length: int = 7) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(3, 99, (2, length), generator=generator)
    pixels = torch.randn(2, 3, 16, 16, generator=generator, dtype=torch.float64)
    if key.startswith(("vit", "detr", "deit", "dino", "beit", "swin")):
        return {"pixel_values": pixels}
    extra = {"pixel_values": pixels} if key in ("clip", "siglip") else {}
    extra = {"decoder_input_ids": tokens[:, : max(1, length - 2)]} if key.startswith(("t5", "bart")) else extra
    return {"input_ids": tokens, **extra}


def read(model, points, *args, rows: int = 2, **inputs) -> dict[str, torch.Tensor]:
    """Activations `batch pos width` at hook points, by hooks of the test's own."""
    activations = {}
    handles = []

    def keep(point: HookPoint, tensors):
        hidden = tensors if isinstance(tensors, torch.Tensor) else next(v for v in tensors if isinstance(v, torch.Tensor))
        # OPT flattens batch and positions in its MLP; some models change outputs in place.
        hidden = hidden.detach().clone()
        activations[point.name] = at_point(hidden if hidden.dim() > 2 else hidden.unflatten(0, (rows, -1)), point.part)

    for point in points:
        module = model.get_submodule(point.module)
        if point.incoming:

            def before(_module, args, kwargs, point=point):
                keep(point, (*args, *kwargs.values()))

            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        else:

            def after(_module, _args, output, point=point):
                keep(point, output)

            handles.append(module.register_forward_hook(after))
    try:
        with torch.no_grad():
            model(*args, **inputs)
    finally:
        for handle in handles:
            handle.remove()
    return activations


@functools.cache
def sites_of(key: str):
    model = model_of(key)
    return site_map(model, choose_stacks(model, anatomy_of(model), None))


@functools.cache
def values_of(key: str, length: int = 7) -> dict[str, torch.Tensor]:
    """All sites of a model, and the tensors of its identities."""
    model_sites = sites_of(key)
    points = {site.point.name: site.point for site in model_sites.sites}
    points |= {point.name: point for site_sum in model_sites.sums for point in (site_sum.total, *site_sum.terms)}
    return read(model_of(key), points.values(), **inputs_of(key, length))


@dataclass(frozen=True)
class Parts:
    """Module paths of one stack of blocks; paths of parts are relative to a block."""

    model: str
    blocks: str
    attention: tuple[str, str, str, str] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    mlp: str | None = "mlp.down_proj"
    norms: tuple[str, str] | None = ("input_layernorm", "post_attention_layernorm")
    after: tuple[str, str] | None = None
    fused: str = ""
    prefix: str = ""
    heads: int = HEADS
    key_heads: int = HEADS
    parallel: bool = False
    final: str = ""
    without: set[str] = field(default_factory=set)

    def block(self, number: int) -> torch.nn.Module:
        return model_of(self.model).get_submodule(f"{self.blocks}.{number}")

    def part(self, number: int, path: str) -> torch.nn.Module:
        return self.block(number).get_submodule(path)

    def values(self, family: str, number: int, length: int = 7) -> torch.Tensor:
        """Activations of a family's site."""
        [name] = [s.point.name for s in sites_of(self.model).sites if self.owns(s) and (s.family, s.block) == (family, number)]
        return values_of(self.model, length)[name]

    def owns(self, site) -> bool:
        return site.point.name.startswith(self.prefix or "blocks.")


def fused(name: str) -> tuple[str, str, str]:
    return name, name, name


def qkvo(path: str, names: str) -> tuple[str, str, str, str]:
    q, k, v, o = (f"{path}.{name}" for name in names.split())
    return q, k, v, o
