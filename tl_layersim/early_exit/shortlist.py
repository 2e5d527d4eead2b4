"""The tokens that are said most often."""

from __future__ import annotations

from typing import Any

import torch

from ..data import Batches
from ..errors import LayersimError
from ..typed import typed
from .open import opened


@typed
def frequent_tokens(model: Any, data: Any, size: int, *, max_tokens: int | None = 100_000, column: str | None = None) -> Any:
    """The most frequent token ids of data, as a shortlist for checks.

    Args:
        model: whose tokenizer and vocabulary apply.
        data: as in `analyze`.
        size: how many ids at most.
        max_tokens: stop after so many tokens.
        column: see `analyze`.

    Returns:
        Ids, the most frequent first.

    Example:
        >>> import tl_layersim as lsim
        >>> len(lsim.frequent_tokens(lsim.demo_model(), lsim.demo_text(), 200))
        200
    """
    if size < 1:
        raise LayersimError("A shortlist has tokens in it.", given=f"size={size}", expected="1 or more", do="size=1000")
    half, _ = opened(model, None, None)
    batches = Batches(data, half.model, 64, None, False, max_tokens, 0, True, column)
    counts = torch.cat([batch.tokens[batch.attention] for batch in batches]).bincount()
    return counts.topk(min(size, int((counts > 0).sum()))).indices
