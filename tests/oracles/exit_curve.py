"""Naive float64 NumPy, written from the formulas and from nothing else. `oracle_<name>` gives every field of an analyzer.

`batches` is a list of `layer token d_model`; loops are meant.
"""

from __future__ import annotations

import numpy as np

from .common import HEAD, lens_by_token, next_of
from .linear_probe import ROWS_OF, held_out_rows


def oracle_exit_curve(
    batches: list[np.ndarray],
    targets: list[int | None] | None = None,
    thresholds: tuple[float, ...] | None = None,
    norm: bool = True,
    head: np.ndarray = HEAD,
    heads: list[tuple[np.ndarray, np.ndarray]] | None = None,
    rows: list[int] | None = None,
) -> dict[str, np.ndarray]:
    thresholds = thresholds or (*(i / 20 for i in range(20)), 0.97, 0.98, 0.99, 0.995, 0.999, 0.9995, 0.9999, 0.99999, 1.0)
    table = lens_by_token(batches, targets or next_of(batches), norm, head, heads)
    # The rows of a batch that no data has: as many tokens in each.
    rows = rows or [t // ROWS_OF for batch in batches for t in range(batch.shape[1])]
    out = held_out_rows(max(rows) + 1, 0.5)
    found = curve(table, thresholds)
    for part in (False, True):
        own = curve([one for one, row in zip(table, rows, strict=True) if out[row] == part], thresholds)
        for name in ("values", "accuracy", "agreement", "perplexity"):
            found.setdefault(f"part_{name}".replace("values", "exits"), []).append(own[name])
    return {name: np.array(value, dtype=float) for name, value in found.items()}


def curve(table: list, thresholds: tuple[float, ...]) -> dict[str, list]:
    """The fields of all positions of a table."""
    blocks = len(table[0])
    out: dict[str, list] = {"values": [], "accuracy": [], "agreement": [], "perplexity": [], "speedup": []}
    for threshold in thresholds:
        layers = [next((i for i, one in enumerate(row) if one["top"] > threshold), blocks - 1) for row in table]
        emitted = [row[layer] for row, layer in zip(table, layers, strict=True)]
        right = [one for one in emitted if "p" in one]
        out["values"].append([layers.count(i) for i in range(blocks)])
        out["accuracy"].append(np.mean([one["place"] == 0 for one in right]))
        out["agreement"].append(np.mean([one["said"] == row[-1]["said"] for one, row in zip(emitted, table, strict=True)]))
        out["perplexity"].append(np.exp(np.mean([-np.log(one["p"]) for one in right])))
        out["speedup"].append(blocks * len(table) / sum(layer + 1 for layer in layers))
    return out
