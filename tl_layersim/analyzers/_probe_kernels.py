"""Kernels of `LinearProbe`: sums over training samples, and counts of the predictions of fitted probes.

Plain functions of torch: they are serialised by value and also run on a server.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..data.labels import NO_LABEL
from ..models.targets import targets
from ..models.view import View

# Multiples of the golden ratio, as fractions of 2^32: they are evenly spread over 0 to 1, and have no period.
GOLDEN = 2654435769
# The same for seeds: sqrt(2).
SHIFT = 1779033703


def held_out(row: Tensor, fraction: float, seed: int, first_row: int | None) -> Tensor:
    """Whether each sample belongs to a held-out row, by the number of its row alone.

    Args:
        row: `sample`, number of the row in the data.
        fraction: of the rows that are held out.
        seed: of the choice.
        first_row: the number from which on rows are held out, in place of a fraction; None for the fraction.
    """
    if first_row is not None:
        return row >= first_row
    return (row * GOLDEN + seed * SHIFT) % 2**32 < round(fraction * 2**32)


def labelled(view: View, labels: str | Tensor, split: tuple[float, int, int | None]) -> tuple[Tensor, Tensor, Tensor]:
    """The class of each sample, and whether it is a training sample and a held-out one: both False without a label.

    Args:
        view: activations of one batch.
        labels: the classes.
        split: the arguments of `held_out` after the rows.
    """
    assert view.row is not None
    target = targets(view, labels)
    known, out = target != NO_LABEL, held_out(view.row.to(target.device), *split)
    return target, known & ~out, known & out


def probe_sums_kernel(
    view: View, *, labels: str | Tensor, classes: int, split: tuple[float, int, int | None]
) -> dict[str, Tensor]:
    """Second moments, class sums and class sizes of the training samples, float64; and class sizes of the held-out ones.

    Args:
        view: activations of one batch.
        labels: the classes.
        classes: a number above every class.
        split: the arguments of `held_out` after the rows.
    """
    target, train, test = labelled(view, labels, split)
    device, width = view.activations.device, view.activations.shape[-1]
    # The classes of this batch alone, of which there are few.
    own: Tensor = torch.unique(target[train])
    member = (target[train][:, None] == own).double().to(device)
    total = torch.zeros(len(view.activations), classes, width, dtype=torch.float64, device=device)
    second = []
    for site, layer in enumerate(view.activations):
        rows = layer[train.to(device)].double()
        second.append(rows.T @ rows)
        total[site, own.to(device)] = member.T @ rows
    return {
        "second": torch.stack(second),
        "total": total,
        "train": torch.bincount(target[train], minlength=classes),
        "test": torch.bincount(target[test], minlength=classes),
    }


def probe_counts_kernel(
    view: View,
    *,
    labels: str | Tensor,
    classes: Tensor,
    weight: Tensor,
    offset: Tensor,
    split: tuple[float, int, int | None],
) -> dict[str, Tensor]:
    """Predictions on held-out samples by class, and correct predictions on training samples.

    Args:
        view: activations of one batch.
        labels: the class of each sample.
        classes: `class`, ascending.
        weight: `site width class`.
        offset: `site class`, -inf for classes without training samples.
        split: the arguments of `held_out` after the rows.
    """
    target, train, test = labelled(view, labels, split)
    device = view.activations.device
    number = torch.searchsorted(classes.to(target.device), target).to(device)
    train, test, k = train.to(device), test.to(device), len(classes)
    confusion, correct = [], []
    for layer, w, b in zip(view.activations, weight.to(device), offset.to(device), strict=True):
        # argmax takes the lowest class among equal scores.
        predicted = (layer.double() @ w + b).argmax(1)
        confusion.append(torch.bincount(number[test] * k + predicted[test], minlength=k * k).view(k, k))
        correct.append((predicted == number)[train].sum())
    return {"confusion": torch.stack(confusion), "train_correct": torch.stack(correct)}
