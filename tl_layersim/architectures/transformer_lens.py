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
from .blocks import POST_NORM, PRE_NORM, find_blocks, head_counts, is_post_norm, layout_of
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
    wrapped, cfg = getattr(model, "original_model", None), model.cfg
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
        grouped: int = getattr(cfg, "n_key_value_heads", None) or cfg.n_heads
        heads = (cfg.n_heads, cfg.n_heads if getattr(cfg, "ungroup_grouped_query_attention", False) else grouped)
    sites, sums = stack_sites("", blocks, [layout] * len(blocks), heads, "")
    sites += [Site(HookPoint(SITE_NAMES["ln_final"], path), "ln_final") for path in layout.final]
    have = {site.family for site in sites}
    plain = wrapped is None and cfg.normalization_type not in WITH_WEIGHTS

    def by_name(name: str) -> HookPoint | None:
        """The TransformerLens hook point or module called `name`; None if there is none."""
        if name in hooks and name.endswith(("hook_pattern", "hook_attn_scores")):
            raise LayersimError(
                f"`at` is {name!r}, which has a number for each pair of positions; it must have a vector for each position. "
                "Use model.run_with_cache to read attention patterns and scores."
            )
        if plain and name in hooks and name.endswith(SITE_NAMES["ln1"]):
            return next((site.point for site in sites if site.point.name == name), None)
        return HookPoint(name, paths[id(hooks[name])]) if name in hooks else point_at(model, name)

    lacks = {family: layout.lacks.get(family, ABSENT) for family in SITE_NAMES if family not in have}
    return SiteMap(type(model).__name__, tuple(sites), lacks, tuple(sums), by_name, tuple(hooks))


def _hooked_transformer_layout(cfg: Any, hooks: Mapping[str, torch.nn.Module]) -> BlockLayout:
    """The layout of a HookedTransformer's blocks; `final` is the path of the final norm.

    Args:
        cfg: its configuration.
        hooks: its hook points by name, which is their path.
    """
    lacks = dict(SUBLAYER_NORM_LACKS) if getattr(cfg, "original_architecture", None) in NORMS_AFTER_ALONE else {}
    alone = getattr(cfg, "attn_only", False)
    if alone:
        lacks |= dict.fromkeys(("resid_mid", "ln2", "mlp_post", "mlp_out"), "its blocks have no MLP")
    elif getattr(cfg, "parallel_attn_mlp", False):
        lacks["resid_mid"] = NO_MID
    names = {family: name for family, name in SITE_NAMES.items() if site_name(family, 0) in hooks and family not in lacks}
    if cfg.normalization_type in WITH_WEIGHTS:
        # The hook point is before the weights of the norm.
        names |= {family: family for family in ("ln2", "ln_final") if family in names}
    final = names.pop("ln_final", None)
    tensors = {family: output_of(name) for family, name in names.items()}
    if "ln1" in tensors:
        # The norm runs once for each of queries, keys and values.
        tensors["ln1"] = input_of("attn")
    sums = SEQUENTIAL if "resid_mid" in tensors else PARALLEL
    if alone:
        sums = (("resid_post", ("resid_pre", "attn_out")),)
    return BlockLayout((), tensors, sums=sums, final=() if final is None else (final,), lacks=lacks)


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

    def hook(name: str) -> ModuleTensor | None:
        found = hooks.get(f"blocks.0.{name}")
        return None if found is None else output_of(paths[id(found)].removeprefix("blocks.0."))

    def held(term: ModuleTensor, family: str = "") -> ModuleTensor | None:
        """The tensor of the bridge that equals `term` of the Hugging Face block; None if there is none."""
        if family in ("q", "k", "v"):
            return hook(f"attn.{family}.hook_out")
        side = "hook_in" if term.incoming else "hook_out"
        for component, last in (("attn.o", "z"), ("mlp.out", "mlp_post")):
            port = tensors.get(last)
            if port is not None and port.path == term.path and (found := hook(f"{component}.{side}")) is not None:
                return found
        module: torch.nn.Module = block
        for part in term.path.split("."):
            if not hasattr(_inside(module), part):
                return None
            module = getattr(_inside(module), part)
        at = getattr(module, side, None)
        path = paths[id(module if at is None else at)].removeprefix("blocks.0.")
        return ModuleTensor(path, term.incoming and at is None)

    layout = layout_of(_inside(block), model.original_model.config) or UNKNOWN_LAYOUT
    tensors = layout.tensors
    known = {family: hook(SITE_NAMES[family]) for family in ("resid_pre", "resid_post")}
    known |= {family: held(term, family) for family, term in tensors.items() if family not in layout.lacks}
    final = [] if "ln_final" in layout.lacks else [paths[id(hooks[n])] for n in ("ln_final.hook_out",) if n in hooks]
    sums: list[BlockSum] = []
    for total, terms in layout.sums:
        parts = [term if isinstance(term, str) else held(term) for term in (total, *terms)]
        found = [part for part in parts if part is not None]
        if len(found) == len(parts):
            sums.append((found[0], tuple(found[1:])))
    return replace(
        layout,
        tensors={family: tensor for family, tensor in known.items() if tensor is not None},
        sums=tuple(sums),
        final=tuple(final),
    )


def _inside(module: torch.nn.Module) -> torch.nn.Module:
    """The Hugging Face module inside a bridge component; other modules are unchanged."""
    inner = module._modules.get("_original_component")
    return module if inner is None else inner


def is_transformer_lens(model: Any) -> bool:
    """Whether a model is a HookedTransformer or a TransformerBridge, without importing TransformerLens."""
    return any(
        cls.__module__.split(".")[0] == "transformer_lens" and cls.__name__ in ("HookedTransformer", "TransformerBridge")
        for cls in type(model).__mro__
    )


def right_padding(model: Any) -> int | None:
    """Padding id of a causal TransformerLens model with right padding; else None.

    TransformerLens builds no mask for such padding, and needs none: later tokens do not reach earlier positions.
    """
    if not is_transformer_lens(model) or getattr(model.cfg, "attention_dir", "") != "causal":
        return None
    # Bridges of encoders, encoder-decoders and models of diffusion may be called causal too.
    wrapped, adapter = getattr(model, "original_model", None), getattr(model, "adapter", None)
    generates = getattr(wrapped, "can_generate", lambda: True)() and getattr(adapter, "supports_causal_loss", True)
    if not generates or getattr(getattr(wrapped, "config", None), "is_encoder_decoder", False):
        return None
    pad: int | None = model.tokenizer.pad_token_id if getattr(model.tokenizer, "padding_side", "") == "right" else None
    return pad


def head_of(model: Any) -> Head | None:
    """The head of a TransformerLens model; None if it has no unembedding.

    Scale and soft-cap of a bridge are those of its Hugging Face model.
    """
    names = {name for name, _ in model.named_children()}
    if "unembed" not in names:
        return None
    scale, soft_cap = logit_scaling(getattr(getattr(model, "original_model", None), "config", None))
    own = getattr(model.cfg, "output_logits_soft_cap", None)
    # HookedTransformer writes -1 for none.
    soft_cap = soft_cap or (own if own and own > 0 else None)
    return Head("ln_final" if "ln_final" in names else "", ("unembed",), "every", scale, soft_cap)


def stream_processing(model: Any) -> tuple[str, str] | None:
    """How weight processing changed the residual stream, and a call that loads without processing, as texts.

    None if the residual stream is unchanged. Folded norms leave the residual stream as it is.
    """
    if type(model).__name__ == "TransformerBridge":
        without = "TransformerBridge.boot_transformers(name), without enable_compatibility_mode()"
        return ("in compatibility mode", without) if model.compatibility_mode else None
    return (
        ("with centred writing weights", "HookedTransformer.from_pretrained_no_processing(name)") if _centred(model) else None
    )


def norms_are_folded(model: Any) -> bool:
    """Whether the weights of all norms were folded into later weights."""
    return str(model.cfg.normalization_type).endswith("Pre")


def _centred(model: Any) -> bool:
    """Whether a HookedTransformer's writing weights were centred over `d_model`."""
    scale = model.W_E.abs().mean()
    return bool(model.W_E.mean(-1).abs().max() < 1e-4 * scale)


def basis_of(model: Any) -> str:
    """Description of the residual stream's basis; weight processing changes this basis."""
    if type(model).__name__ == "TransformerBridge":
        wrapped = model.original_model
        if is_post_norm(wrapped, find_blocks(wrapped, None)[0]):
            return POST_NORM
        return "TransformerBridge, compatibility mode" if model.compatibility_mode else PRE_NORM
    folded = "layer norms folded" if norms_are_folded(model) else "layer norms not folded"
    return f"HookedTransformer, {folded}, writing weights {'centred' if _centred(model) else 'not centred'}"
