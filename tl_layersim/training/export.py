"""Export of trained Hugging Face models and TransformerBridges to a folder that `from_pretrained` loads."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..architectures.unembed import rounding
from ..core.errors import LayersimError, warn
from ..core.storage import replacing_model
from ..lens.exit_heads import ExitHeads
from ..sources.hooks import eval_mode
from ..sources.split_model import logits_of
from .residual_stream import TrainingBatch

ORIGINAL = "_original_component"


def check_savable(model: Any) -> None:
    """Raise an error if a model cannot be written as a Hugging Face folder.

    Raises:
        LayersimError: the model is neither a Hugging Face model nor a TransformerBridge, or has adapters.
    """
    if hasattr(model, "peft_config"):
        raise LayersimError(
            "`save_to` would write the adapters of this model without its weights. Merge them first: model.merge_and_unload()."
        )
    if any(bool(parameter.detach().any()) for parameter in additions(model)):
        raise LayersimError(
            "`save_to` cannot merge the split weights of this TransformerBridge. Fine-tune the Hugging Face model."
        )
    if _hugging_face(model) is None:
        raise LayersimError(
            f"`model` is {type(model).__name__}; `save_to` writes only Hugging Face models and TransformerBridges. Leave "
            "`save_to` out, and save model.state_dict()."
        )


def _hugging_face(model: Any) -> nn.Module | None:
    """The Hugging Face model, or the one inside a TransformerBridge."""
    inner = getattr(model, "original_model", model)
    return inner if hasattr(inner, "save_pretrained") else None


def save_model(
    model: Any, folder: str | os.PathLike[str], tokenizer: Any, heads: ExitHeads | None, batch: TrainingBatch
) -> None:
    """Write model and tokenizer. A failed write gives a warning, because the trained model is still in memory.

    Args:
        model: the trained model.
        folder: folder to write to; it is created if it does not exist.
        tokenizer: tokenizer of the model; None if it has none.
        heads: heads of the layers below the last, written to `heads.safetensors`.
        batch: a batch on which the written model must give the trained model's logits.

    Raises:
        LayersimError: the logits differ.
    """
    plain: Any = model if _hugging_face(model) is model else export_bridge(model, batch)
    try:
        with replacing_model(folder) as temporary:
            plain.save_pretrained(temporary)
            if tokenizer is not None:
                tokenizer.save_pretrained(temporary)
            if heads is not None:
                heads.save(temporary / "heads.safetensors")
    except OSError as error:
        also = ", and result.heads.save(path)" if heads is not None else ""
        warn(
            f"The trained model could not be written to {folder}: {error}. It is still in memory: free some space and "
            f"call model.save_pretrained(folder){also}, with a folder on another disk if need be."
        )


@contextmanager
def without_additions(model: Any) -> Iterator[None]:
    """A context that freezes the parameters that TransformerBridge adds, such as a zero bias of the unembedding.

    The wrapped Hugging Face model has no such parameters.
    """
    held = [parameter for parameter in additions(model) if not bool(parameter.detach().any())]
    try:
        for parameter in held:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in held:
            parameter.requires_grad_(True)


def additions(model: Any) -> list[nn.Parameter]:
    """Trainable parameters of a TransformerBridge that the wrapped model does not have."""
    inner = getattr(model, "original_model", None)
    if inner is not None and hasattr(inner, "save_pretrained"):
        with torch.device("meta"):
            own = {name for name, _ in type(inner)(copy.deepcopy(inner.config)).named_parameters(remove_duplicate=False)}
        split = {
            id(parameter)
            for part in inner.modules()
            if hasattr(part, "split_qkv_matrix")
            for copies in (part.q, part.k, part.v)
            for parameter in copies.parameters()
        }
        names: dict[nn.Parameter, set[str]] = {}
        for name, parameter in inner.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, set()).add(plain_name(name))
        return [p for p, known in names.items() if not known & own and id(p) not in split and p.requires_grad]
    return []


def plain_name(name: str) -> str:
    """The name of a bridge's parameter in the plain Hugging Face model."""
    return name.replace(f".{ORIGINAL}", "")


def export_bridge(bridge: Any, batch: TrainingBatch) -> nn.Module:
    """A plain Hugging Face model with the weights of a TransformerBridge.

    A bridge trains split copies of fused query-key-value weights, not the fused weights. The export joins the copies.

    Raises:
        LayersimError: the plain model and the bridge give different logits.
    """
    inner = bridge.original_model
    config = copy.deepcopy(inner.config)
    fresh: nn.Module = type(inner)(config).to(dtype=next(inner.parameters()).dtype)
    found: dict[str, Tensor] = {}
    expected = fresh.state_dict()
    for name, value in inner.state_dict().items():
        plain = plain_name(name)
        if plain in expected and value.shape == expected[plain].shape:
            found[plain] = value.detach()
    paths = dict(fresh.named_modules())
    for name, part in inner.named_modules(remove_duplicate=False):
        path = plain_name(name)
        if hasattr(part, "split_qkv_matrix") and path in paths:
            found |= {f"{path}.{key}": value for key, value in _joined_weights(part, paths[path]).items()}
    missing, _ = fresh.load_state_dict(found, strict=False)
    device = next(inner.parameters()).device
    fresh = fresh.to(device).eval()
    one = batch.first_row.to(device)
    with torch.no_grad(), eval_mode(bridge):
        theirs = logits_of(bridge(one.main)).double()
        ours = logits_of(fresh(one.main)).double()
    off = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-3))
    if missing or not off <= rounding(next(inner.parameters()).dtype):
        raise LayersimError(
            "`save_to` cannot write the model inside this TransformerBridge: the saved model's logits would differ by "
            f"{off:.2g} of their size"
            + (f", without weights for {missing[:3]}" if missing else "")
            + ". Bridge it without enable_compatibility_mode(), or fine-tune the Hugging Face model."
        )
    return fresh


def _joined_weights(part: Any, fresh: nn.Module) -> dict[str, Tensor]:
    """Fused weights joined from their split copies, by parameter name of the new attention module.

    The order of the entries is found by splitting 0, 1, 2, ... in place of the weights.
    """
    marked = copy.deepcopy(fresh).double()
    places: dict[str, tuple[int, int]] = {}
    start = 0
    with torch.no_grad():
        for name, parameter in marked.named_parameters():
            count = parameter.numel()
            parameter.copy_(torch.arange(start, start + count, dtype=torch.float64).view(parameter.shape))
            places[name] = (start, start + count)
            start += count
        flat = torch.full((start,), torch.nan, dtype=torch.float64)
        for marks, trained in zip(part.split_qkv_matrix(marked), (part.q, part.k, part.v), strict=True):
            for name, values in marks.named_parameters():
                own = getattr(getattr(trained, ORIGINAL, trained), name)
                flat[values.detach().flatten().long()] = own.detach().double().cpu().flatten()
    out = {}
    for name, (begin, end) in places.items():
        values = flat[begin:end]
        if bool(values.isfinite().any()):
            out[name] = values.view(dict(marked.named_parameters())[name].shape)
    return out
