"""Naive float64 NumPy, written from the formulas and from nothing else. `oracle_<name>` gives every field of an analyzer.

`batches` is a list of `layer token d_model`; loops are meant.
"""

from __future__ import annotations

import numpy as np

from .common import next_of

ROWS_OF = 3


def held_out_rows(count: int, fraction: float = 0.2, seed: int = 0) -> list[bool]:
    """Whether each row is held out: the fractional part of a multiple of the golden ratio, in whole numbers."""
    return [(row * 2654435769 + seed * 1779033703) % 2**32 < round(fraction * 2**32) for row in range(count)]


def ridge_scores(x: np.ndarray, y: np.ndarray, new: np.ndarray, classes: list[int], ridge: float) -> np.ndarray:
    """Scores `sample class` of new samples by ridge regression on one-hot labels of standardised samples."""
    onehot = np.array([[float(label == c) for c in classes] for label in y])
    away, spread = x - x.mean(0), x.std(0)
    spread = np.where(spread > 0, spread, 1)
    away, new = away / spread, (new - x.mean(0)) / spread
    weight = np.linalg.solve(away.T @ away / len(x) + ridge * np.eye(x.shape[1]), away.T @ (onehot - onehot.mean(0)) / len(x))
    return new @ weight + onehot.mean(0)


def oracle_linear_probe(
    batches: list[np.ndarray],
    labels: list[int | None] | None = None,
    rows: list[int] | None = None,
    ridge: float = 0.1,
) -> dict[str, np.ndarray]:
    x = np.concatenate(batches, axis=1)
    labels = labels or next_of(batches)
    # The rows of a batch that no data has: as many tokens in each.
    rows = rows or [t // ROWS_OF for batch in batches for t in range(batch.shape[1])]
    out = held_out_rows(max(rows) + 1)
    train = [t for t, y in enumerate(labels) if y is not None and not out[rows[t]]]
    test = [t for t, y in enumerate(labels) if y is not None and out[rows[t]]]
    y_train, y_test = ([labels[t] for t in part] for part in (train, test))
    classes = sorted({*y_train, *y_test})
    trained = sorted(set(y_train))
    accuracy, train_accuracy, confusion = [], [], []
    for layer in x:
        scores = ridge_scores(layer[train], np.array(y_train), layer, trained, ridge)
        predicted = [trained[int(np.argmax(row))] for row in scores]
        accuracy.append(np.mean([predicted[t] == labels[t] for t in test]))
        train_accuracy.append(np.mean([predicted[t] == labels[t] for t in train]))
        confusion.append([[sum(labels[t] == a and predicted[t] == b for t in test) for b in classes] for a in classes])
    most = max(trained, key=lambda c: (y_train.count(c), -c))
    return {
        "values": np.array(accuracy),
        "train_accuracy": np.array(train_accuracy),
        "control_accuracy": np.full(len(x), np.nan),
        "selectivity": np.full(len(x), np.nan),
        "majority": np.array(np.mean([y == most for y in y_test])),
        "confusion": np.array(confusion, dtype=float),
        "samples": np.array([y_train.count(c) for c in classes], dtype=float),
        "test_samples": np.array([y_test.count(c) for c in classes], dtype=float),
    }
