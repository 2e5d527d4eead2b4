"""The most frequent tokens of a data set, as a shortlist for checks."""

from __future__ import annotations

from typing import Any

import torch

from ..analysis.validation import with_tokenizer
from ..core.argument_checks import typed
from ..core.bounds import PositiveInt
from ..core.errors import LayersimError
from ..data.batches import Batches
from ..data.data import Data
from .supported_models import open_for_early_exit


@typed
def frequent_tokens(model: Any, data: Any, size: PositiveInt) -> Any:
    """The most frequent token ids of a data set, as a shortlist for the checks of `EarlyExit`.

    Args:
        model: as in `EarlyExit`; its vocabulary applies, and its tokenizer unless `data` has one.
        data: a `Data`; or raw data, of which the first 100,000 tokens are read.
        size: maximum number of ids.

    Returns:
        Ids, the most frequent first.

    Examples:
        >>> import tl_layersim as lsim
        >>> from tl_layersim.early_exit import frequent_tokens
        >>> len(frequent_tokens(lsim.demo_model(), lsim.demo_text(), 200))
        200
    """
    split_model, _ = open_for_early_exit(model)
    data = Data.of(data, max_tokens=100_000)
    batches = Batches(data, with_tokenizer(split_model.model, data.tokenizer))
    tokens = [batch.tokens[batch.attention] for batch in batches]
    if not tokens:
        raise LayersimError("`data` is empty.")
    counts = torch.cat(tokens).bincount()
    return counts.topk(min(size, int((counts > 0).sum()))).indices
