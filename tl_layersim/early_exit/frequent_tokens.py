"""The tokens that are said most often."""

from __future__ import annotations

from typing import Any

import torch

from ..core.errors import LayersimError
from ..core.typed import typed
from ..core.wording import brief
from ..data.batches import Batches
from ..data.options import DataOptions
from .supported_models import opened


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
        raise LayersimError("`size` must be at least 1.", given=f"size={size}", expected="1 or more", do="size=1000")
    half, _ = opened(model, None, None)
    batches = Batches(data, half.model, DataOptions(batch_size=64, max_tokens=max_tokens, column=column))
    found = [batch.tokens[batch.attention] for batch in batches]
    if not found:
        raise LayersimError("`data` is empty.", given=brief(data), expected="texts or tokens", do="one text or more")
    counts = torch.cat(found).bincount()
    return counts.topk(min(size, int((counts > 0).sum()))).indices
