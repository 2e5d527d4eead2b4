"""TransformerLens models: hook points of their residual stream, its basis, and their head."""

from __future__ import annotations

from typing import Any

import torch

from ..core.errors import LayersimError
from .head_layout import logit_scaling
from .layout import POST_NORM, PRE_NORM, find_blocks, is_post_norm
from .model_changes import hooks_on
from .model_description import data_fields, hash_config
from .model_info import Model, layer_names
from .unembed import Head
from .weights_hash import StoredWeights


def is_transformer_lens(model: Any) -> bool:
    """Whether a model is a HookedTransformer or a TransformerBridge, without importing TransformerLens."""
    return any(
        cls.__module__.split(".")[0] == "transformer_lens" and cls.__name__ in ("HookedTransformer", "TransformerBridge")
        for cls in type(model).__mro__
    )


def right_padding(model: Any) -> int | None:
    """The id with which a TransformerLens model pads texts on the right, and to which no token before it attends.

    TransformerLens builds no mask for such padding. None for other models, among them those that pad on the left, which build
    one, and those that attend to later tokens.
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


def open_transformer_lens(model: Any) -> tuple[torch.nn.Module, Model]:
    """The embedding of a model, and its description.

    Raises:
        LayersimError: hook points of the residual stream are missing.
    """
    cfg = model.cfg
    names = layer_names(cfg.n_layers)
    missing = [name for name in names if name not in model.hook_dict]
    if missing:
        raise LayersimError(
            f"{cfg.model_name} lacks the hook point {missing[0]} of the residual stream. Pass the Hugging Face model itself."
        )
    plain = {
        key: value for key, value in cfg.to_dict().items() if key not in ("model_name", "device", "dtype", "tokenizer_name")
    }
    described = Model(
        name=str(cfg.model_name),
        config_hash=hash_config(plain),
        weights=StoredWeights(model),
        changes=hooks_on(model),
        source=type(model).__name__,
        basis=_transformer_lens_basis(model),
        dtype=str(cfg.dtype),
        layers=names,
        d_model=cfg.d_model,
        vocabulary=cfg.d_vocab,
        context=cfg.n_ctx,
        tokenizer=model.tokenizer,
        head=_transformer_lens_head(model),
        calls="gradients",
        **_transformer_lens_data(model),
    )
    return model.embed, described


def _transformer_lens_data(model: Any) -> dict[str, Any]:
    """Fields of `Model` for reading data: a TransformerBridge takes the inputs of its Hugging Face model, others tokens."""
    if type(model).__name__ != "TransformerBridge":
        return {}
    wrapped = model.original_model
    return data_fields(wrapped, find_blocks(wrapped, None)[0])


def _transformer_lens_head(model: Any) -> Head | None:
    """The final norm and the unembedding; scale and soft-cap of a bridge are those of its Hugging Face model."""
    names = {name for name, _ in model.named_children()}
    if "unembed" not in names:
        return None
    scale, soft_cap = logit_scaling(getattr(getattr(model, "original_model", None), "config", None))
    own = getattr(model.cfg, "output_logits_soft_cap", None)
    # HookedTransformer writes -1 for none.
    soft_cap = soft_cap or (own if own and own > 0 else None)
    return Head("ln_final" if "ln_final" in names else "", ("unembed",), "every", scale, soft_cap)


def stream_processing(model: Any) -> tuple[str, str] | None:
    """How weight processing has changed the residual stream, and the call that loads the model without; None where it has not.

    Folded norms leave the residual stream as it is.
    """
    if type(model).__name__ == "TransformerBridge":
        without = "TransformerBridge.boot_transformers(name), without enable_compatibility_mode()"
        return ("in compatibility mode", without) if model.compatibility_mode else None
    return (
        ("with centred writing weights", "HookedTransformer.from_pretrained_no_processing(name)") if _centred(model) else None
    )


def norms_are_folded(model: Any) -> bool:
    """Whether the weights of the norms, the final one too, were folded into the weights after them."""
    return str(model.cfg.normalization_type).endswith("Pre")


def _centred(model: Any) -> bool:
    """Whether what a HookedTransformer writes to the residual stream has mean zero over `d_model`."""
    scale = model.W_E.abs().mean()
    return bool(model.W_E.mean(-1).abs().max() < 1e-4 * scale)


def _transformer_lens_basis(model: Any) -> str:
    """The basis of the residual stream, which weight processing changes."""
    if type(model).__name__ == "TransformerBridge":
        wrapped = model.original_model
        if is_post_norm(wrapped, find_blocks(wrapped, None)[0]):
            return POST_NORM
        return "TransformerBridge, compatibility mode" if model.compatibility_mode else PRE_NORM
    folded = "layer norms folded" if norms_are_folded(model) else "layer norms not folded"
    return f"HookedTransformer, {folded}, writing weights {'centred' if _centred(model) else 'not centred'}"
