"""Prompts as rows of token ids, padded on the left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.errors import LayersimError, warn
from ..data.batches import Batches, refuse_other_ids
from ..data.data import Data
from ..data.missing_mask import RunsAtEnds, as_mask, mask_of, masked_warning
from ..models.model_info import Model


def prompt_rows(
    prompt: Any, attention_mask: Tensor | None, model: Model, tokenizer: Any, max_new_tokens: int
) -> tuple[Tensor, Tensor | None]:
    """Token ids `row column` padded on the left, and their mask, False at padding; the mask is None where no row is padded.

    Raises:
        LayersimError: `prompt` is neither text nor token ids, or leaves no room for `max_new_tokens`.
    """
    if isinstance(prompt, Tensor):
        tokens, attention = _rows_of_ids(prompt, attention_mask, replace(model, tokenizer=tokenizer))
    else:
        tokens, attention = _rows_of_texts(prompt, attention_mask, model, tokenizer)
    lengths = attention.sum(1)
    if not len(lengths) or int(lengths.min()) == 0:
        raise LayersimError("`prompt` has a row without a token.")
    refuse_other_ids(tokens[attention], model, "prompt")
    longest = int(lengths.max())
    # The model does not run on the last new token.
    if model.context and longest + max_new_tokens - 1 > model.context:
        raise LayersimError(
            f"`prompt` has {longest} tokens and `max_new_tokens` is {max_new_tokens}; the context of {model.name} has room for "
            f"{model.context + 1} in all."
        )
    if int(lengths.min()) == tokens.shape[1]:
        return tokens, None
    left = torch.zeros(len(tokens), longest, dtype=torch.int64, device=tokens.device)
    for row, length in enumerate(lengths.tolist()):
        left[row, longest - length :] = tokens[row, attention[row]]
    attended = torch.arange(longest, device=tokens.device) >= (longest - lengths)[:, None]
    return left, None if bool(attended.all()) else attended


def _rows_of_ids(tokens: Tensor, mask: Tensor | None, model: Model) -> tuple[Tensor, Tensor]:
    """Token ids and mask of a tensor prompt; without a given mask, padding ids at the ends of rows are padding."""
    tokens = tokens[None] if tokens.dim() == 1 else tokens
    if mask is None:
        runs = RunsAtEnds()
        runs.add(tokens, model)
        if warning := runs.warning(model):
            warn(warning)
        if (mask := mask_of(tokens, model)) is not None:
            warn(masked_warning(tokens[~mask].tolist()))
    return tokens.long(), torch.ones_like(tokens, dtype=torch.bool) if mask is None else as_mask(mask).to(tokens.device)


def _rows_of_texts(prompt: Any, mask: Tensor | None, model: Model, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Token ids and attention of texts, tokenized as in `analyze`."""
    texts = [prompt] if isinstance(prompt, str) else prompt
    if mask is not None:
        raise LayersimError("`attention_mask` cannot be given for texts.")
    if not texts:
        raise LayersimError("`prompt` is empty.")
    # Without its head the texts are not cut: one that exceeds the context is refused below.
    described = replace(model, tokenizer=tokenizer or model.tokenizer, head=None)
    length = model.context or 1 << 20
    batches = Batches(Data(texts, batch_size=len(texts) + 1, seq_len=length), described)
    rows = list(batches.rows())
    if len(rows) != len(texts):
        raise LayersimError(
            f"`prompt` has {len(texts)} texts, of which {len(texts) - len(rows)} are empty or have more than {length} tokens."
        )
    batch = batches.batch(rows, 0)
    return batch.tokens, batch.attention
