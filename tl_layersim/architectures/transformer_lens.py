"""TransformerLens models: their sites, the basis of their residual stream, and their head.

A site is the same tensor as in the Hugging Face model. If the hook point with its name reads another tensor, another hook point
or the module itself is used: `hook_normalized` of a norm with weights is before the weights, and `hook_resid_mid` of a BERT
bridge is the input of the last layer norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..core.errors import LayersimError
from .anatomy import Anatomy
from .blocks import POST_NORM, PRE_NORM, head_counts, is_transformer_lens, layout_of
from .hook_points import SITE_NAMES, HookPoint, Site, SiteMap, site_name
from .layouts import NO_MID, PARALLEL, SEQUENTIAL, SUBLAYER_NORM_LACKS, BlockLayout, BlockSum, ModuleTensor, input_of, output_of
from .module_sites import UNKNOWN_LAYOUT, point_at, stack_sites
from .output_heads import logit_scaling
from .unembed import Head

ABSENT = "this model has no such hook point"
TWO_STACKS = "a bridge of an encoder-decoder has other names: pass the Hugging Face model itself, before it is bridged"
# Norms of a HookedTransformer whose hook point `hook_normalized` is before the weights.
WITH_WEIGHTS = ("LN", "RMS")
# TransformerLens' architectures with norms after the sublayers alone, in both majors.
NORMS_AFTER_ALONE = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")


def transformer_lens_site_map(model: Any) -> SiteMap:
    """The sites of a HookedTransformer or a TransformerBridge."""
    hooks: dict[str, torch.nn.Module] = dict(model.hook_dict)
    paths = {id(module): path for path, module in model.named_modules()}
    wrapped = getattr(model, "original_model", None)
    cfg = model.cfg
    # A bridge of an encoder-decoder has two lists of blocks under other names.
    blocks = [f"blocks.{number}" for number in range(len(getattr(model, "blocks", ())))]
    if not blocks:
        layout = BlockLayout((), {}, sums=(), final=(), lacks=dict.fromkeys(SITE_NAMES, TWO_STACKS))
    elif wrapped is None:
        layout = _hooked_transformer_layout(cfg, hooks)
    else:
        layout = _bridge_layout(model, hooks, paths)
    if wrapped is not None:
        heads = head_counts(wrapped.config, layout.head_count)
    else:
        key_value_heads: int = getattr(cfg, "n_key_value_heads", None) or cfg.n_heads
        if getattr(cfg, "ungroup_grouped_query_attention", False):
            key_value_heads = cfg.n_heads
        heads = (cfg.n_heads, key_value_heads)
    sites, sums = stack_sites("", blocks, [layout] * len(blocks), heads, "")
    for path in layout.final:
        sites.append(Site(HookPoint(SITE_NAMES["ln_final"], path), "ln_final"))
    present = {site.family for site in sites}
    has_plain_norms = wrapped is None and cfg.normalization_type not in WITH_WEIGHTS

    def by_name(name: str) -> HookPoint | None:
        """The TransformerLens hook point or module called `name`; None if there is none."""
        if name in hooks and name.endswith(("hook_pattern", "hook_attn_scores")):
            raise LayersimError(
                f"`at` is {name!r}, which has a number for each pair of positions; it must have a vector for each position. "
                "Use model.run_with_cache to read attention patterns and scores."
            )
        if has_plain_norms and name in hooks and name.endswith(SITE_NAMES["ln1"]):
            return next((site.point for site in sites if site.point.name == name), None)
        if name in hooks:
            return HookPoint(name, paths[id(hooks[name])])
        return point_at(model, name)

    lacks = {family: layout.lacks.get(family, ABSENT) for family in SITE_NAMES if family not in present}
    return SiteMap(type(model).__name__, tuple(sites), lacks, tuple(sums), by_name, tuple(hooks))


def _hooked_transformer_layout(cfg: Any, hooks: Mapping[str, torch.nn.Module]) -> BlockLayout:
    """The layout of a HookedTransformer's blocks; `final` is the path of the final norm.

    Args:
        cfg: its configuration.
        hooks: its hook points by name, which is their path.
    """
    lacks = dict(SUBLAYER_NORM_LACKS) if getattr(cfg, "original_architecture", None) in NORMS_AFTER_ALONE else {}
    is_attention_only = getattr(cfg, "attn_only", False)
    if is_attention_only:
        lacks |= dict.fromkeys(("resid_mid", "ln2", "mlp_post", "mlp_out"), "its blocks have no MLP")
    elif getattr(cfg, "parallel_attn_mlp", False):
        lacks["resid_mid"] = NO_MID
    names: dict[str, str] = {}
    for family, name in SITE_NAMES.items():
        if site_name(family, 0) in hooks and family not in lacks:
            names[family] = name
    if cfg.normalization_type in WITH_WEIGHTS:
        for norm in ("ln2", "ln_final"):
            if norm in names:
                # The module, because the hook point is before the weights of the norm.
                names[norm] = norm
    final_norm = names.pop("ln_final", None)
    tensors = {family: output_of(name) for family, name in names.items()}
    if "ln1" in tensors:
        # The norm runs once for each of queries, keys and values.
        tensors["ln1"] = input_of("attn")
    sums = SEQUENTIAL if "resid_mid" in tensors else PARALLEL
    if is_attention_only:
        sums = (("resid_post", ("resid_pre", "attn_out")),)
    return BlockLayout((), tensors, sums=sums, final=() if final_norm is None else (final_norm,), lacks=lacks)


def _bridge_layout(model: Any, hooks: Mapping[str, torch.nn.Module], paths: Mapping[int, str]) -> BlockLayout:
    """The layout of a bridge's blocks, from the layout of the Hugging Face blocks inside.

    `final` is the path of the final norm.

    A bridge computes attention itself and calls only those attention modules that it names.

    Args:
        model: the bridge.
        hooks: its hook points by name.
        paths: paths of its modules by `id`.
    """
    block = model.blocks[0]

    def at_hook(name: str) -> ModuleTensor | None:
        """The tensor at a hook point of the block; None if there is none of this name."""
        hook = hooks.get(f"blocks.0.{name}")
        return None if hook is None else output_of(paths[id(hook)].removeprefix("blocks.0."))

    def in_bridge(term: ModuleTensor, family: str = "") -> ModuleTensor | None:
        """The tensor of the bridge that equals `term` of the Hugging Face block; None if there is none."""
        if family in ("q", "k", "v"):
            return at_hook(f"attn.{family}.hook_out")
        side = "hook_in" if term.incoming else "hook_out"
        # The output projections of attention and MLP, by the family that is their input.
        for component, input_family in (("attn.o", "z"), ("mlp.out", "mlp_post")):
            projection_input = tensors.get(input_family)
            if projection_input is not None and projection_input.path == term.path:
                at_projection = at_hook(f"{component}.{side}")
                if at_projection is not None:
                    return at_projection
        module: torch.nn.Module = block
        for name in term.path.split("."):
            if not hasattr(_original(module), name):
                return None
            module = getattr(_original(module), name)
        hook = getattr(module, side, None)
        path = paths[id(module if hook is None else hook)].removeprefix("blocks.0.")
        return ModuleTensor(path, term.incoming and hook is None)

    layout = layout_of(_original(block), model.original_model.config) or UNKNOWN_LAYOUT
    tensors = layout.tensors
    possible_tensors = {family: at_hook(SITE_NAMES[family]) for family in ("resid_pre", "resid_post")}
    for family, term in tensors.items():
        if family not in layout.lacks:
            possible_tensors[family] = in_bridge(term, family)
    bridge_tensors = {family: tensor for family, tensor in possible_tensors.items() if tensor is not None}
    final: list[str] = []
    if "ln_final" not in layout.lacks and "ln_final.hook_out" in hooks:
        final.append(paths[id(hooks["ln_final.hook_out"])])
    sums: list[BlockSum] = []
    for total, terms in layout.sums:
        possible_terms = [term if isinstance(term, str) else in_bridge(term) for term in (total, *terms)]
        bridge_terms = [term for term in possible_terms if term is not None]
        # Without one of its terms a sum does not hold.
        if len(bridge_terms) == len(possible_terms):
            sums.append((bridge_terms[0], tuple(bridge_terms[1:])))
    return replace(layout, tensors=bridge_tensors, sums=tuple(sums), final=tuple(final))


def _original(module: torch.nn.Module) -> torch.nn.Module:
    """The Hugging Face module inside a bridge component; other modules are unchanged."""
    original = module._modules.get("_original_component")
    return module if original is None else original


def right_padding(model: Any) -> int | None:
    """Padding id of a causal TransformerLens model with right padding; else None.

    TransformerLens builds no mask for such padding, and needs none: later tokens do not reach earlier positions.
    """
    if not is_transformer_lens(model) or getattr(model.cfg, "attention_dir", "") != "causal":
        return None
    # Bridges of encoders, encoder-decoders and models of diffusion may be called causal too.
    wrapped = getattr(model, "original_model", None)
    adapter = getattr(model, "adapter", None)
    generates = getattr(wrapped, "can_generate", lambda: True)() and getattr(adapter, "supports_causal_loss", True)
    if not generates or getattr(getattr(wrapped, "config", None), "is_encoder_decoder", False):
        return None
    if getattr(model.tokenizer, "padding_side", "") != "right":
        return None
    pad: int | None = model.tokenizer.pad_token_id
    return pad


def head_of(model: Any) -> Head | None:
    """The head of a TransformerLens model; None if it has no unembedding.

    Scale and soft-cap of a bridge are those of its Hugging Face model.
    """
    names = {name for name, _ in model.named_children()}
    if "unembed" not in names:
        return None
    wrapped = getattr(model, "original_model", None)
    scale, soft_cap = logit_scaling(getattr(wrapped, "config", None))
    if not soft_cap:
        cfg_soft_cap = getattr(model.cfg, "output_logits_soft_cap", None)
        # HookedTransformer writes -1 for none.
        soft_cap = cfg_soft_cap if cfg_soft_cap and cfg_soft_cap > 0 else None
    return Head("ln_final" if "ln_final" in names else "", ("unembed",), "every", scale, soft_cap)


def stream_processing(model: Any) -> tuple[str, str] | None:
    """How weight processing changed the residual stream, and a call that loads without processing, as texts.

    None if the residual stream is unchanged. Folded norms leave the residual stream as it is.
    """
    if type(model).__name__ == "TransformerBridge":
        if not model.compatibility_mode:
            return None
        return "in compatibility mode", "TransformerBridge.boot_transformers(name), without enable_compatibility_mode()"
    if not _is_centred(model):
        return None
    return "with centred writing weights", "HookedTransformer.from_pretrained_no_processing(name)"


def norms_are_folded(model: Any) -> bool:
    """Whether the weights of all norms were folded into later weights."""
    return str(model.cfg.normalization_type).endswith("Pre")


def _is_centred(model: Any) -> bool:
    """Whether a HookedTransformer's writing weights were centred over `d_model`."""
    size = model.W_E.abs().mean()
    return bool(model.W_E.mean(-1).abs().max() < 1e-4 * size)


def basis_of(model: Any, wrapped: Anatomy | None) -> str:
    """Description of the residual stream's basis; weight processing changes this basis.

    Args:
        model: the model.
        wrapped: anatomy of the Hugging Face model inside a bridge; None for a HookedTransformer.
    """
    if wrapped is not None:
        if wrapped.post_norm:
            return POST_NORM
        return "TransformerBridge, compatibility mode" if model.compatibility_mode else PRE_NORM
    folded = "folded" if norms_are_folded(model) else "not folded"
    centred = "centred" if _is_centred(model) else "not centred"
    return f"HookedTransformer, layer norms {folded}, writing weights {centred}"
