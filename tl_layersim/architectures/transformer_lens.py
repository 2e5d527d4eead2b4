"""TransformerLens models: their sites, the basis of their residual stream, and their head.

A site is the same tensor as in the Hugging Face model. If the hook point with its name reads another tensor, another hook point
or the module itself is used: `hook_normalized` of a norm with weights is before the weights, and `hook_resid_mid` of a BERT
bridge is the input of the last layer norm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..core.errors import LayersimError
from .blocks import POST_NORM, PRE_NORM, find_blocks, head_counts, is_post_norm, layout_of
from .hugging_face import UNKNOWN, point_at
from .layouts import NO_MID, PARALLEL, SEQUENTIAL, SUBLAYER_NORM_LACKS, BlockLayout, BlockSum, ModuleTensor, Term
from .output_heads import logit_scaling
from .points import HEAD_FAMILIES, SITE_NAMES, HookPoint, Site, SiteMap, StreamSum, separate_heads, site_name
from .unembed import Head

ABSENT = "this model has no such hook point"
TWO_STACKS = "a bridge of an encoder-decoder has other names: pass the Hugging Face model itself, before it is bridged"
# Norms of a HookedTransformer whose hook point `hook_normalized` is before the weights.
WITH_WEIGHTS = ("LN", "RMS")
# TransformerLens' architectures with norms after the sublayers alone, in both majors.
NORMS_AFTER_ALONE = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")


def transformer_lens_site_map(model: Any) -> SiteMap:
    """The sites of a HookedTransformer or a TransformerBridge."""
    return _SitesOf(model).site_map()


class _SitesOf:
    """Looks up the sites of one TransformerLens model.

    Args:
        model: HookedTransformer or TransformerBridge.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.hooks: dict[str, torch.nn.Module] = dict(model.hook_dict)
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.wrapped = getattr(model, "original_model", None)
        # A bridge of an encoder-decoder has two lists of blocks under other names.
        self.blocks = list(getattr(model, "blocks", ()))
        self.layout: BlockLayout | None = None
        self.lacks: dict[str, str] = {}
        if self.wrapped is None:
            self.lacks = _reasons(model.cfg)
        elif not self.blocks:
            self.lacks = dict.fromkeys(SITE_NAMES, TWO_STACKS)
        else:
            self.layout = layout_of(_inside(self.blocks[0]), self.wrapped.config)
            self.lacks = dict(self.layout.lacks) if self.layout else dict.fromkeys(SITE_NAMES, UNKNOWN)

    def site_map(self) -> SiteMap:
        heads = self._heads()
        sites: list[Site] = []
        sums: list[StreamSum] = []
        last = None
        for number in range(len(self.blocks)):
            points = {family: point for family in SITE_NAMES if (point := self._point(family, number)) is not None}
            last = points.pop("ln_final", None)
            for family, point in points.items():
                each = separate_heads(heads[family in "kv"]) if family in HEAD_FAMILIES else ()
                sites.append(Site(point, family, number, each, first=family == "resid_pre" and number == 0))
            sums += self._sums(number, points)
        if last is not None:
            sites.append(Site(last, "ln_final"))
        have = {site.family for site in sites}
        lacks = {family: self.lacks.get(family, ABSENT) for family in SITE_NAMES if family not in have}
        return SiteMap(type(self.model).__name__, tuple(sites), lacks, tuple(sums), self._by_name, tuple(self.hooks))

    def _heads(self) -> tuple[int, int]:
        """Number of heads and of key-value heads."""
        cfg = self.model.cfg
        if self.wrapped is not None and self.layout is not None:
            return head_counts(self.wrapped.config, self.layout.head_count)
        grouped = getattr(cfg, "n_key_value_heads", None)
        if grouped is None or getattr(cfg, "ungroup_grouped_query_attention", False):
            grouped = cfg.n_heads
        return cfg.n_heads, grouped

    def _point(self, family: str, number: int) -> HookPoint | None:
        name = site_name(family, number)
        if self.wrapped is not None:
            return self._bridge_point(family, name, number)
        return self._hooked_transformer_point(family, name)

    def _hook(self, name: str, hook: str) -> HookPoint | None:
        """The hook point `hook`, renamed to a site; None if the model lacks it."""
        module = self.hooks.get(hook)
        return None if module is None else HookPoint(name, self.paths[id(module)])

    def _hooked_transformer_point(self, family: str, name: str) -> HookPoint | None:
        cfg = self.model.cfg
        if family in self.lacks:
            return None
        if family == "ln1" and name in self.hooks:
            # The norm runs once for each of queries, keys and values.
            return HookPoint(name, name.replace(SITE_NAMES["ln1"], "attn"), incoming=True)
        if family in ("ln2", "ln_final") and name in self.hooks and cfg.normalization_type in WITH_WEIGHTS:
            # The hook point is before the weights of the norm.
            return HookPoint(name, name.removesuffix(".hook_normalized"))
        return self._hook(name, name)

    def _bridge_point(self, family: str, name: str, number: int) -> HookPoint | None:
        if family in ("resid_pre", "resid_post"):
            return self._hook(name, name)
        if self.layout is None or family in self.layout.lacks:
            return None
        if family == "ln_final":
            return self._hook(name, "ln_final.hook_out")
        tensor = self.layout.tensors.get(family)
        return None if tensor is None else self._tensor_point(name, number, family, tensor)

    def _tensor_point(self, name: str, number: int, family: str, tensor: ModuleTensor) -> HookPoint | None:
        """The hook point of a bridge that holds the same tensor as the Hugging Face block.

        A bridge computes attention itself and calls only those attention modules that it names.
        """
        assert self.layout is not None
        if family in ("q", "k", "v"):
            return self._hook(name, f"blocks.{number}.attn.{family}.hook_out")
        for component, last in (("attn.o", "z"), ("mlp.out", "mlp_post")):
            port = self.layout.tensors.get(last)
            if port is not None and port.path == tensor.path:
                found = self._hook(name, f"blocks.{number}.{component}.{_side(tensor)}")
                if found is not None:
                    return found
        module: torch.nn.Module = self.blocks[number]
        for part in tensor.path.split("."):
            if not hasattr(_inside(module), part):
                return None
            module = getattr(_inside(module), part)
        hook = getattr(module, _side(tensor), None)
        if hook is not None:
            return HookPoint(name, self.paths[id(hook)])
        return HookPoint(name, self.paths[id(module)], tensor.incoming)

    def _sums(self, number: int, points: dict[str, HookPoint]) -> list[StreamSum]:
        def point(term: Term) -> HookPoint | None:
            if isinstance(term, str):
                return points.get(term)
            found = self._tensor_point("", number, "", term)
            return None if found is None else replace(found, name=found.module)

        found = []
        for total, terms in self._identities(points):
            whole, parts = point(total), [point(term) for term in terms]
            if whole is not None and None not in parts:
                found.append(StreamSum(whole, tuple(part for part in parts if part is not None), number))
        return found

    def _identities(self, points: dict[str, HookPoint]) -> tuple[BlockSum, ...]:
        if self.wrapped is not None:
            return self.layout.sums if self.layout is not None else ()
        if getattr(self.model.cfg, "attn_only", False):
            return (("resid_post", ("resid_pre", "attn_out")),)
        return SEQUENTIAL if "resid_mid" in points else PARALLEL

    def _by_name(self, name: str) -> HookPoint | None:
        """The TransformerLens hook point `name`, or the output of the module at this path; None if there is none.

        Raises:
            LayersimError: the hook point has values for pairs of positions.
        """
        if name in self.hooks and name.endswith(("hook_pattern", "hook_attn_scores")):
            raise LayersimError(
                f"`at` is {name!r}, which has one number for each pair of positions; model.run_with_cache gives such patterns."
            )
        plain = self.wrapped is None and self.model.cfg.normalization_type not in WITH_WEIGHTS
        if plain and name in self.hooks and name.endswith(SITE_NAMES["ln1"]):
            return self._hooked_transformer_point("ln1", name)
        return self._hook(name, name) or point_at(self.model, name)


def _reasons(cfg: Any) -> dict[str, str]:
    """The families that a HookedTransformer lacks, each with the reason."""
    reasons: dict[str, str] = {}
    if getattr(cfg, "original_architecture", None) in NORMS_AFTER_ALONE:
        reasons |= SUBLAYER_NORM_LACKS
    if getattr(cfg, "attn_only", False):
        reasons |= dict.fromkeys(("resid_mid", "ln2", "mlp_post", "mlp_out"), "its blocks have no MLP")
    elif getattr(cfg, "parallel_attn_mlp", False):
        reasons["resid_mid"] = NO_MID
    return reasons


def _side(tensor: ModuleTensor) -> str:
    return "hook_in" if tensor.incoming else "hook_out"


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
    """The padding id of a causal TransformerLens model that pads on the right, which needs no mask.

    TransformerLens builds no mask for such padding. None for all other models: those that pad on the left build a mask, and
    bidirectional models attend to later tokens.
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
    """The head: final norm and unembedding. For a bridge, scale and soft-cap come from its Hugging Face model."""
    names = {name for name, _ in model.named_children()}
    if "unembed" not in names:
        return None
    scale, soft_cap = logit_scaling(getattr(getattr(model, "original_model", None), "config", None))
    own = getattr(model.cfg, "output_logits_soft_cap", None)
    # HookedTransformer writes -1 for none.
    soft_cap = soft_cap or (own if own and own > 0 else None)
    return Head("ln_final" if "ln_final" in names else "", ("unembed",), "every", scale, soft_cap)


def stream_processing(model: Any) -> tuple[str, str] | None:
    """How weight processing has changed the residual stream, and the call that loads the model without it; None if unchanged.

    Folded norms leave the residual stream as it is.
    """
    if type(model).__name__ == "TransformerBridge":
        without = "TransformerBridge.boot_transformers(name), without enable_compatibility_mode()"
        return ("in compatibility mode", without) if model.compatibility_mode else None
    return (
        ("with centred writing weights", "HookedTransformer.from_pretrained_no_processing(name)") if _centred(model) else None
    )


def norms_are_folded(model: Any) -> bool:
    """Whether the weights of all norms were folded into the weights after them."""
    return str(model.cfg.normalization_type).endswith("Pre")


def _centred(model: Any) -> bool:
    """Whether a HookedTransformer's writing weights were centred, so that the residual stream has mean zero over `d_model`."""
    scale = model.W_E.abs().mean()
    return bool(model.W_E.mean(-1).abs().max() < 1e-4 * scale)


def basis_of(model: Any) -> str:
    """Description of the basis of the residual stream, which weight processing changes."""
    if type(model).__name__ == "TransformerBridge":
        wrapped = model.original_model
        if is_post_norm(wrapped, find_blocks(wrapped, None)[0]):
            return POST_NORM
        return "TransformerBridge, compatibility mode" if model.compatibility_mode else PRE_NORM
    folded = "layer norms folded" if norms_are_folded(model) else "layer norms not folded"
    return f"HookedTransformer, {folded}, writing weights {'centred' if _centred(model) else 'not centred'}"
