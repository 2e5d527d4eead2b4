"""The same model with fewer layers."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch

from ..core.errors import LayersimError
from ..core.typed import typed
from ..models.split_model import logits_of
from ..models.unembed import rounding
from .full_sequence import FullSequence, Rows
from .supported_models import opened, synthetic
from .verification import read_position


@typed
def truncate(model: Any, n_layers: int, *, save_to: str | os.PathLike[str] | None = None) -> Any:
    """A copy of a model with its first blocks alone, below the same final norm and head.

    What it says is what `LogitLens` reads after that block. It is an ordinary Hugging Face model: it generates, trains and is
    saved like any other.

    Args:
        model: a Hugging Face model, in this process.
        n_layers: how many blocks are kept.
        save_to: a folder, which `from_pretrained` loads; the tokenizer goes there too, where the model has one as `.tokenizer`.

    Returns:
        A model of the same class, dtype and device. The given one is not changed and shares no weights with it.

    Raises:
        LayersimError: the model has no such part, or the copy does not say what the lens says.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), section 3; nostalgebraist 2020 for the lens.

    Example:
        >>> import tl_layersim as lsim
        >>> lsim.truncate(lsim.demo_model(), 5).config.num_hidden_layers
        5
    """
    half, unembed = opened(model, None, None)
    blocks = len(half.blocks)
    if isinstance(n_layers, bool) or not 1 <= n_layers <= blocks:
        raise LayersimError(
            "The model has no such part.",
            given=f"n_layers={n_layers}",
            expected=f"1 to {blocks}",
            do=f"n_layers={max(1, blocks // 2)}",
        )
    if save_to is not None and Path(save_to).is_file():
        raise LayersimError(
            "`save_to` is a file.", given=f"save_to={save_to}", expected="a folder, there already or new", do="another name"
        )
    if not hasattr(type(model), "_from_config") or not hasattr(model, "config"):
        raise LayersimError(
            "Only Hugging Face models are built from a configuration.",
            given=type(model).__name__,
            expected="a PreTrainedModel",
            do="the model that it was made from",
        )
    # Weights that are made under torch.inference_mode() could never be trained.
    with torch.inference_mode(False):
        short = _cut(model, half, unembed, n_layers)
    if save_to is not None:
        short.save_pretrained(save_to)
        if (tokenizer := getattr(short, "tokenizer", None)) is not None:
            tokenizer.save_pretrained(save_to)
    return short


def _cut(model: Any, half: Any, unembed: Any, n_layers: int) -> Any:
    """The copy."""
    config = shortened(model.config, len(half.blocks), n_layers)
    # Building draws random weights, which are then replaced.
    with torch.random.fork_rng(devices=[]):
        short = type(model)._from_config(config, dtype=model.dtype, attn_implementation=model.config._attn_implementation)
    _copy(model, short)
    short.to(half.device).train(model.training)
    if getattr(model, "generation_config", None) is not None:
        short.generation_config = copy.deepcopy(model.generation_config)
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is not None:
        short.tokenizer = tokenizer
    _check(half, unembed, short, n_layers)
    return short


def shortened(config: Any, blocks: int, n_layers: int) -> Any:
    """A configuration of fewer blocks; lists that have an entry for each block are cut with them."""
    config = copy.deepcopy(config)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    lists = [name for name, value in vars(text).items() if isinstance(value, list) and len(value) == blocks]
    for name in lists:
        # These belong to no block, or name blocks by number.
        if name not in ("architectures", "id2label") and not name.endswith(("_token_id", "_ids", "_only_layers", "_indices")):
            setattr(text, name, getattr(text, name)[:n_layers])
    text.num_hidden_layers = n_layers
    return config


def _copy(model: Any, short: Any) -> None:
    """Every weight and buffer that both have."""
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    mine = dict(short.named_parameters(remove_duplicate=False)) | dict(short.named_buffers(remove_duplicate=False))
    missing = [name for name in mine if name not in own or own[name].shape != mine[name].shape]
    if missing:
        raise LayersimError(
            "A model with fewer layers has other weights.",
            given=f"no {missing[0]} of this shape in {type(model).__name__}",
            expected="every weight of the copy in the model",
            do="a model as from_pretrained gives it, without adapters or quantisation",
        )
    with torch.no_grad():
        for name, x in mine.items():
            x.data = own[name].detach().clone().to(x.device)
            x.requires_grad_(own[name].requires_grad)


def _check(half: Any, unembed: Any, short: Any, n_layers: int) -> None:
    """See that the copy says what the lens says of the model after that block."""
    given = synthetic(half, 2, 6)
    every = unembed.reads == "every"
    asked = torch.ones(2, 6, dtype=torch.bool, device=half.device) if every else read_position(half, unembed.reads, given)
    small, _ = opened(short, None, None)
    with half.evaluating(), small.evaluating(), torch.no_grad():
        found = logits_of(short(**given))
        lens, _ = FullSequence(half, unembed, (n_layers,), None)(Rows(given, asked, False))
        lens = lens if every else lens[asked]
    gap = float((found.double() - lens.double()).norm() / lens.double().norm().clamp(min=1e-30))
    if not gap <= rounding(lens.dtype):
        raise LayersimError(
            "The copy does not say what the model's own norm and head make of that layer.",
            given=f"logits that differ by {gap:.3g} of their norm",
            expected="the same up to rounding",
            do="a model whose blocks do not know how many there are",
        )
