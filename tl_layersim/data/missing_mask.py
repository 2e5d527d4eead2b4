"""Padding of token tensors without an attention mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.errors import LayersimError
from .model_properties import ModelInputs
from .row import misfit
from .tensors import number_tensor


def mask_of(rows: Tensor, model: ModelInputs) -> Tensor | None:
    """A mask `row pos`, False at padding at the ends of rows, from the padding ids of tokenizer and configuration.

    Returns:
        The mask, or None where rows have no padding.

    Raises:
        LayersimError: a padding id stands where it may be a token too.
    """
    tokenizer = model.tokenizer
    pads = dict.fromkeys((getattr(tokenizer, "pad_token_id", None), *model.pads))
    edges = {getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id")} | set(model.ends)
    mask = torch.ones_like(rows, dtype=torch.bool)
    named = [pad for pad in pads if pad is not None]
    # Where no padding id is named, rows are often padded with EOS.
    for pad in named or sorted(edge for edge in edges if edge is not None):
        is_pad = rows == pad if rows.shape[1] > 1 else torch.zeros_like(mask)
        if not bool(is_pad.any()):
            continue
        ends = is_pad.cumprod(1).bool() | is_pad.flip(1).cumprod(1).flip(1).bool()
        # A single BOS or EOS at an end may be a token, and so may an unknown token elsewhere.
        least = 2 if pad in edges else 1
        shared = pad in edges or pad == getattr(tokenizer, "unk_token_id", None)
        unsure = ends[:, :least].all(1) | ends[:, -least:].all(1) if shared else (is_pad & ~ends).any(1)
        if bool(unsure.any()):
            raise LayersimError(
                "`attention_mask` is missing, but rows of tokens start or end with padding."
                if shared
                else "`attention_mask` is missing, but rows of tokens contain padding ids between other tokens.",
                given=f"{int(unsure.sum())} of {len(rows)} rows with "
                + (f"token {pad} twice or more at an end" if not named else f"pad token {pad} ")
                + ("" if not named else "at an end, which is another special token too" if shared else "between tokens"),
                expected="an attention mask beside the tokens",
                do=f"{{'{model.token_input}': tokens, '{model.mask_input}': mask}}, or probe.mask = mask in attach; ones "
                "count the pads",
            )
        if not shared:
            mask &= ~ends
    return None if bool(mask.all()) else mask


def masked_warning(pads: Sequence[int]) -> str:
    """The warning that a mask was derived from padding ids."""
    ids = " and ".join(map(str, sorted(set(pads))))
    return (
        f"Tokens came without an attention mask: the padding, id {ids} at the ends of rows, is left out as if masked. Pass "
        "{'input_ids': tokens, 'attention_mask': mask} to set it yourself."
    )


def as_mask(mask: Any) -> Tensor:
    """Convert a mask of ones and zeros to bool; refuse an additive mask (0 keeps, -inf drops), which means the opposite."""
    try:
        values = number_tensor(mask)
    except ValueError as error:
        raise misfit(f"a mask of {error}", "ones and zeros of the tokens' shape") from error
    if values.dtype != torch.bool and not bool(((values == 0) | (values == 1)).all()):
        raise LayersimError(
            "`attention_mask` must be 1 for tokens and 0 for padding.",
            given=f"values from {float(values.min()):g} to {float(values.max()):g}",
            expected="bool, or ones and zeros",
            do="mask = additive_mask == 0, if 0 stands for what is kept",
        )
    return values.bool()
