"""Naive float64 NumPy, written from the formulas and from nothing else. `oracle_<name>` gives every field of an analyzer.

`batches` is a list of `layer token d_model`; loops are meant.
"""

from __future__ import annotations

import numpy as np

from .common import HEAD, lens_by_token, next_of


def classification_metrics(label: list[int], predicted: list[int], classes: int) -> tuple[np.ndarray, float, float]:
    """F1 by class, macro F1 and the Matthews correlation coefficient, from their definitions."""
    by_class = np.full(classes, np.nan)
    pairs = list(zip(label, predicted, strict=True))
    for c in {*label, *predicted}:
        hits = sum(a == b == c for a, b in pairs)
        by_class[c] = 2 * hits / (label.count(c) + predicted.count(c))
    # The correlation of two tables of zeros and ones, one column for each class.
    own, said = (np.array([[float(one == c) for c in range(classes)] for one in ones]) for ones in (label, predicted))
    own, said = own - own.mean(0), said - said.mean(0)
    spread = np.sqrt((own**2).sum() * (said**2).sum())
    return by_class, float(np.nanmean(by_class)), float((own * said).sum() / spread) if spread > 0 else 0.0


def oracle_task_metrics(
    batches: list[np.ndarray], targets: list[int | None] | None = None, norm: bool = True, head: np.ndarray = HEAD
) -> dict[str, np.ndarray]:
    targets = targets or next_of(batches)
    table = lens_by_token(batches, targets, norm, head)
    label = [y for y in targets if y is not None]
    classes = len(head)
    f1, accuracy, mcc, by_class = [], [], [], []
    confusion = np.zeros((len(table[0]), classes, classes))
    for layer in range(len(table[0])):
        predicted = [row[layer]["said"] for row, y in zip(table, targets, strict=True) if y is not None]
        own, macro, matthews = classification_metrics(label, predicted, classes)
        by_class.append(own)
        f1.append(macro)
        mcc.append(matthews)
        accuracy.append(np.mean([a == b for a, b in zip(label, predicted, strict=True)]))
        for a, b in zip(label, predicted, strict=True):
            confusion[layer, a, b] += 1
    return {
        "values": np.array(f1),
        "accuracy": np.array(accuracy),
        "mcc": np.array(mcc),
        "f1_by_class": np.array(by_class).T,
        "confusion": confusion,
    }
