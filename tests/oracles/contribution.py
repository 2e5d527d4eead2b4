"""Naive float64 NumPy, written from the formulas and from nothing else. `oracle_<name>` gives every field of an analyzer.

`batches` is a list of `layer token d_model`; loops are meant.
"""

from __future__ import annotations

import numpy as np

from .common import cosine_of


def sublayer_outputs(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of attention and MLP, each `block token d_model`, that add up to the updates of given residuals."""
    attention = 0.3 * (x[1:] - x[:-1]) + 0.2 * np.roll(x[:-1], 1, axis=-1)
    return attention, x[1:] - x[:-1] - attention


def oracle_contribution(batches: list[np.ndarray], parallel: bool = False) -> dict[str, np.ndarray]:
    x = np.concatenate(batches, axis=1)
    attention, mlp = sublayer_outputs(x)
    ratio, cosine, final = [], [], []
    for block in range(len(x) - 1):
        for output, stream in ((attention[block], x[block]), (mlp[block], x[block] + (0 if parallel else attention[block]))):
            pairs = list(zip(output, stream, x[-1], strict=True))
            ratio.append([np.sqrt((a**2).sum()) / np.sqrt((h**2).sum()) for a, h, _ in pairs])
            cosine.append([cosine_of(a, h) for a, h, _ in pairs])
            final.append([cosine_of(a, end) for a, _, end in pairs])
    quantities = {"values": ratio, "cosine": cosine, "cosine_to_final": final}
    return {name: np.mean(values, axis=1) for name, values in quantities.items()}
