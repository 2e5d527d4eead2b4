"""Naive float64 NumPy, written from the formulas and from nothing else. `oracle_<name>` gives every field of an analyzer.

`batches` is a list of `layer token d_model`; loops are meant.
"""

from __future__ import annotations

import numpy as np

from .common import HEAD, say, softmax


def own_branch(x: np.ndarray, layer: int) -> np.ndarray:
    """What the blocks in `own_blocks.py` compute from `token d_model`, by hand."""
    from ..inputs.own_blocks import weights

    w0, w1, w2 = (w.numpy() for w in weights(layer, x.shape[-1]))
    return np.array([w2 @ np.tanh(w1 @ x[t] + w0 @ (sum(x[: t + 1]) / (t + 1))) for t in range(len(x))])


def skipped_path(x: np.ndarray, skipped: int, start: int, stop: int) -> np.ndarray:
    """The residuals `layer token d_model` that follow when a block is skipped at the positions from start to before stop."""
    path = x.copy()
    path[skipped + 1, start:stop] = x[skipped, start:stop]
    for layer in range(skipped + 1, len(x) - 1):
        constant = x[layer + 1] - x[layer] - own_branch(x[layer], layer)
        path[layer + 1] = path[layer] + own_branch(path[layer], layer) + constant
    return path


def oracle_skip_effect(batches: list[np.ndarray], keep_first: int = 1, splits: int = 1) -> dict[str, np.ndarray]:
    """Each batch is one row."""
    blocks = len(batches[0]) - 1
    out = {}
    for prefix in ("", "later_"):
        changes = [[[] for _ in range(blocks)] for _ in range(blocks)]
        outputs = [[] for _ in range(blocks)]
        for x in batches:
            n = x.shape[1]
            stops = [n] if not prefix else [n * i // (splits + 1) for i in range(1, splits + 1)]
            stops = [stop for stop in stops if stop > keep_first]
            for skipped in range(blocks):
                row = [[] for _ in range(blocks)]
                output = []
                for stop in stops:
                    path = skipped_path(x, skipped, keep_first, stop)
                    for t in range(stop if prefix else keep_first, n):
                        for layer in range(skipped + 1, blocks):
                            c, changed = (y[layer + 1, t] - y[layer, t] for y in (x, path))
                            row[layer].append(np.sqrt(((c - changed) ** 2).sum()) / np.sqrt((c**2).sum()))
                        p, q = (softmax(say(y[-1, t], True, True, HEAD)) for y in (x, path))
                        output.append(np.sqrt(((p - q) ** 2).sum()))
                if output:
                    outputs[skipped].append(output)
                    for layer in range(skipped + 1, blocks):
                        changes[skipped][layer].append(row[layer])

        def mean(rows: list[list[float]]) -> float:
            return float(np.mean([one for row in rows for one in row])) if rows else np.nan

        def largest(rows: list[list[float]]) -> float:
            return float(np.mean([max(row) for row in rows])) if rows else np.nan

        out |= {
            prefix or "values": np.array([[mean(one) for one in row] for row in changes]),
            f"{prefix}largest": np.array([[largest(one) for one in row] for row in changes]),
            f"{prefix}probability_change": np.array([mean(one) for one in outputs]),
            f"{prefix}probability_change_largest": np.array([largest(one) for one in outputs]),
        }
    out["later"] = out.pop("later_")
    return out
