"""Naive float64 NumPy, written from the formulas and from nothing else. `oracle_<name>` gives every field of an analyzer.

`batches` is a list of `layer token d_model`; loops are meant.
"""

from __future__ import annotations

import itertools

import numpy as np

from .common import HEAD, cosine_of, lens_by_token, next_of


def oracle_logit_lens(
    batches: list[np.ndarray],
    targets: list[int | None] | None = None,
    norm: bool = True,
    ks: tuple[int, ...] = (1, 5),
    head: np.ndarray = HEAD,
    heads: list[tuple[np.ndarray, np.ndarray]] | None = None,
    center: bool = False,
    ranks: list[int] | None = None,
) -> dict[str, np.ndarray]:
    table = lens_by_token(batches, targets or next_of(batches), norm, head, heads)
    known = [row for row in table if "p" in row[0]]
    layers = range(len(table[0]))

    def mean(of, rows) -> np.ndarray:
        return np.array([sum(of(row[layer], row) for row in rows) / len(rows) for layer in layers])

    x = np.concatenate(batches, axis=1)[1:]
    x = x - x.mean(1, keepdims=True) if center else x
    cos = [[cosine_of(x[layer, t], x[-1, t]) for layer in layers] for t in range(len(table)) if "p" in table[t][0]]
    steps = [[a["p"] < b["p"] for a, b in itertools.pairwise(row)] for row in known]
    closer = [[a < b for a, b in itertools.pairwise(row)] for row in cos]
    both = np.array(steps) & np.array(closer)
    lost = mean(lambda one, row: one["place"] == 0 and any(r["place"] > 0 for r in row[row.index(one) :]), known)

    # The rank of a token of each position, and its probability.
    place = np.full((len(table), len(table[0])), np.nan)
    probability = np.full((len(table), len(table[0])), np.nan)
    for token, row in enumerate(table if ranks is not None else []):
        for layer, one in enumerate(row):
            logits = one["logits"]
            place[token, layer] = 1 + sum(1 for logit in logits if logit > logits[ranks[token]])
            probability[token, layer] = np.exp(logits[ranks[token]]) / sum(np.exp(logit) for logit in logits)

    cross_entropy = mean(lambda one, row: -np.log(one["p"]), known)
    rises = [all(a["p"] < b["p"] for a, b in itertools.pairwise(row)) for row in known]
    return {
        "step_share": np.array([np.nan, *np.mean(steps, 0)]),
        "step_share_if_closer": np.array([np.nan, *(both.sum(0) / np.sum(closer, 0))]),
        "lost_share": lost,
        "values": cross_entropy,
        "perplexity": np.exp(cross_entropy),
        "accuracy": mean(lambda one, row: one["place"] == 0, known),
        "top_k_accuracy": np.array([mean(lambda one, row, k=k: one["place"] < k, known) for k in ks]),
        "target_probability": mean(lambda one, row: one["p"], known),
        "agreement": mean(lambda one, row: one["said"] == row[-1]["said"], table),
        "kl_to_final": mean(lambda one, row: one["kl"], table),
        "entropy": mean(lambda one, row: one["entropy"], table),
        "rank": place.mean(0),
        "reciprocal_rank": (1 / place).mean(0),
        "ranked_probability": probability.mean(0),
        "monotone_share": np.array(sum(rises) / len(rises)),
    }
