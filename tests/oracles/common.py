"""What several oracles use."""

from __future__ import annotations

from typing import Any

import numpy as np

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
# A head for views that no model made: a layer norm without weights, and an unembedding `vocabulary d_model`.
WORDS = 300
HEAD = np.random.default_rng(7).normal(size=(WORDS, 8))


def layer_norm(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def tokens_of(count: int) -> np.ndarray:
    """The tokens of a batch that says nothing of its tokens."""
    return np.arange(count) % 12


def cosine_of(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / (np.sqrt(a @ a) * np.sqrt(b @ b)))


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return e / e.sum()


def say(x: np.ndarray, last: bool, norm: bool, head: np.ndarray) -> np.ndarray:
    """Logits of one token at one layer; the last layer always has the norm."""
    return head @ (layer_norm(x) if norm or last else x)


def next_of(batches: list[np.ndarray]) -> list[int | None]:
    """The right answers: each batch is one row of tokens, whose last has none."""
    out: list[int | None] = []
    for batch in batches:
        out += [int(t) for t in tokens_of(batch.shape[1])[1:]] + [None]
    return out


def lens_by_token(
    batches: list[np.ndarray],
    targets: list[int | None],
    norm: bool = True,
    head: np.ndarray = HEAD,
    heads: list[tuple[np.ndarray, np.ndarray]] | None = None,
) -> list[list[dict[str, Any]]]:
    """`token layer`: everything that a layer says at a token, from its logits, one by one.

    With `heads`, every layer below the last has a weight and a bias of its own.
    """
    x = np.concatenate(batches, axis=1)
    table = []
    for t in range(x.shape[1]):
        logits = [say(x[layer, t], layer == len(x) - 1, norm, head) for layer in range(1, len(x))]
        for layer, (weight, bias) in enumerate(heads or []):
            logits[layer] = say(x[layer + 1, t], False, norm, weight) + bias
        p_last = softmax(logits[-1])
        row = []
        for z in logits:
            p = softmax(z)
            said = int(np.argmax(z))
            one = {
                "logits": z,
                "said": said,
                "top": p[said],
                "entropy": -sum(q * np.log(q) for q in p if q > 0),
                "kl": sum(a * (np.log(a) - np.log(b)) for a, b in zip(p_last, p, strict=True) if a > 0),
            }
            y = targets[t]
            if y is not None:
                # Sorted by logit downwards, and by id among equals.
                order = sorted(range(len(z)), key=lambda v, z=z: (-z[v], v))
                one |= {"p": p[y], "place": order.index(y)}
            row.append(one)
        table.append(row)
    return table


def no_null(rows: int, columns: int | None = None) -> dict[str, np.ndarray]:
    """The fields of the null of a similarity between layers, of a run without permutations."""
    shape = (rows, rows if columns is None else columns)
    pairs = ("observed", "calibrated", "p_values", "null_mean", "null_threshold")
    maxima = ("max_value", "max_p_value", "max_calibrated", "split_half", "noise_ceiling")
    return {name: np.full(shape, np.nan) for name in pairs} | {name: np.array(np.nan) for name in maxima}
