"""Naive float64 NumPy, written from the formulas and from nothing else. `oracle_<name>` gives every field of an analyzer.

`batches` is a list of `layer token d_model`; loops are meant.
"""

from __future__ import annotations

import numpy as np

from .common import HEAD, next_of
from .contribution import sublayer_outputs


def oracle_logit_attribution(
    batches: list[np.ndarray], ids: list[int | None] | None = None, against: list[int] | None = None
) -> dict[str, np.ndarray]:
    """Of the layer norm without weights and the head without bias of views that no model made."""
    x = np.concatenate(batches, axis=1)
    attention, mlp = sublayer_outputs(x)
    by_token, by_block, logits = [], [], []
    for token, target in enumerate(ids or next_of(batches)):
        if target is None:
            continue
        row = HEAD[target] - (HEAD[against[token]] if against else 0)
        final = x[-1, token]
        sigma = np.sqrt(final.var() + 1e-5)

        def share(vector, row=row, sigma=sigma) -> float:
            return float(row @ (vector - vector.mean()) / sigma)

        terms = [share(x[0, token])]
        for block in range(len(x) - 1):
            terms += [share(attention[block, token]), share(mlp[block, token])]
        by_token.append([*terms, 0.0])
        by_block.append([share(x[block + 1, token] - x[block, token]) for block in range(len(x) - 1)])
        logits.append(share(final))
    return {"values": np.mean(by_token, 0), "by_block": np.mean(by_block, 0), "logit": np.array(np.mean(logits))}
