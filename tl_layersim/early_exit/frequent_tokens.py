"""The most frequent tokens of a data set, as a shortlist for checks."""

from __future__ import annotations

from typing import Any

import torch

from ..core.argument_checks import typed
from ..core.errors import LayersimError
from ..core.wording import brief
from ..data.batches import Batches
from ..data.options import Column, DataOptions
from .supported_models import open_for_early_exit


@typed
def frequent_tokens(model: Any, data: Any, size: int, *, max_tokens: int | None = 100_000, column: Column | None = None) -> Any:
    """The most frequent token ids of a data set, as a shortlist for the checks of `EarlyExit`.

    Args:
        model: its tokenizer and vocabulary apply.
        data: as in `analyze`.
        size: maximum number of ids.
        max_tokens: stop after this many tokens.
        column: see `analyze`.

    Returns:
        Ids, the most frequent first.

    Examples:
        >>> import tl_layersim as lsim
        >>> len(lsim.frequent_tokens(lsim.demo_model(), lsim.demo_text(), 200))
        200
    """
    if size < 1:
        raise LayersimError("`size` must be at least 1.", given=f"size={size}", expected="1 or more", do="size=1000")
    split_model, _ = open_for_early_exit(model, None, None)
    batches = Batches(data, split_model.model, DataOptions(batch_size=64, max_tokens=max_tokens, column=column))
    tokens = [batch.tokens[batch.attention] for batch in batches]
    if not tokens:
        raise LayersimError("`data` is empty.", given=brief(data), expected="texts or tokens", do="one text or more")
    counts = torch.cat(tokens).bincount()
    return counts.topk(min(size, int((counts > 0).sum()))).indices
