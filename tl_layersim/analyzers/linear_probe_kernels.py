"""Kernels of `LinearProbe`: sums over training samples, and counts of the predictions of fitted probes.

Plain functions of torch: they are serialised by value and also run on a server.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..activations.row_pools import mixed
from ..activations.view import View, targets
from ..data.labels import NO_LABEL

# Multiples of the golden ratio, as fractions of 2^32: they are evenly spread over 0 to 1, and have no period.
GOLDEN = 2654435769
# The same for seeds: sqrt(2).
SHIFT = 1779033703
# A control label is drawn for each token type or row by a hash, in as many equal parts.
CONTROL_PARTS = 128


def held_out(row: Tensor, fraction: float, seed: int, first_row: int | None) -> Tensor:
    """Whether each sample belongs to a held-out row. The index of its row alone decides.

    Args:
        row: `sample`, index of the row in the data.
        fraction: fraction of the rows to hold out.
        seed: random seed of the choice.
        first_row: index of the first held-out row, which replaces `fraction`; None to use `fraction`.
    """
    if first_row is not None:
        return row >= first_row
    return (row * GOLDEN + seed * SHIFT) % 2**32 < round(fraction * 2**32)


def labelled(view: View, labels: str | Tensor, split: tuple[float, int, int | None]) -> tuple[Tensor, Tensor, Tensor]:
    """The class of each sample, and whether it is a training or a held-out sample; neither if it has no label.

    Args:
        view: activations of one batch.
        labels: the classes.
        split: the arguments of `held_out` after `row`.
    """
    assert view.row is not None
    target = targets(view, labels)
    known, out = target != NO_LABEL, held_out(view.row.to(target.device), *split)
    return target, known & ~out, known & out


def control_part(view: View, control: str, seed: int) -> Tensor:
    """The part of the control labels that each sample belongs to, from a hash of its token type or its row.

    Args:
        view: activations of one batch.
        control: "token" or "row".
        seed: random seed of the hash.
    """
    unit = view.tokens if control == "token" else view.row
    assert unit is not None
    return mixed(unit.long() * GOLDEN + seed * SHIFT + 1) % CONTROL_PARTS


def control_classes(counts: Tensor) -> Tensor:
    """The class of each part of the control labels, with the frequencies of the training samples' classes.

    Args:
        counts: `class`, number of training samples in each class.

    Examples:
        >>> torch.bincount(control_classes(torch.tensor([6, 0, 2]))).tolist()
        [96, 0, 32]
    """
    shares = counts.cumsum(0).double() / counts.sum()
    middles = (torch.arange(CONTROL_PARTS).double() + 0.5) / CONTROL_PARTS
    return torch.searchsorted(shares, middles)


def probe_sums_kernel(
    view: View, *, labels: str | Tensor, classes: int, split: tuple[float, int, int | None], control: str | None = None
) -> dict[str, Tensor]:
    """Second moments, class sums and class sizes of the training samples, and class sizes of the held-out samples. Float64.

    Args:
        view: activations of one batch.
        labels: the classes.
        classes: a number above every class.
        split: the arguments of `held_out` after `row`.
        control: the unit that control labels are drawn for, "token" or "row"; None for no control labels. Their sums
            are `parts` and `part_samples`.
    """
    target, train, test = labelled(view, labels, split)
    device, width = view.activations.device, view.activations.shape[-1]
    groups = {"total": (target[train], classes)}
    if control is not None:
        groups["parts"] = (control_part(view, control, split[1]).to(target.device)[train], CONTROL_PARTS)
    second = []
    sums = {
        name: torch.zeros(len(view.activations), count, width, dtype=torch.float64, device=device)
        for name, (_, count) in groups.items()
    }
    for site, layer in enumerate(view.activations):
        rows = layer[train.to(device)].double()
        second.append(rows.T @ rows)
        for name, (group, _) in groups.items():
            # The groups of this batch alone, of which there are few.
            own: Tensor = torch.unique(group)
            member = (group[:, None] == own).double().to(device)
            sums[name][site, own.to(device)] = member.T @ rows
    if control is not None:
        sums["part_samples"] = torch.bincount(groups["parts"][0], minlength=CONTROL_PARTS)
    return {
        "second": torch.stack(second),
        **sums,
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
    control: tuple[str, Tensor, Tensor, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Counts of predictions on held-out samples by class, and of correct predictions on training samples, with both totals.

    Args:
        view: activations of one batch.
        labels: the class of each sample.
        classes: `class`, ascending.
        weight: `site width class`, weights of the probes.
        offset: `site class`, offsets of the probes; -inf for classes without training samples.
        split: the arguments of `held_out` after `row`.
        control: for control labels: "token" or "row", the index of each part's class, and the weights and offsets of their
            probes. None for no control labels.
    """
    assert view.row is not None
    target, train, test = labelled(view, labels, split)
    out = {"train": train.sum(), "test_rows": torch.tensor(len(torch.unique(view.row.to(test.device)[test])))}
    device = view.activations.device
    number = torch.searchsorted(classes.to(target.device), target).to(device)
    train, test, k = train.to(device), test.to(device), len(classes)
    confusion, correct = [], []
    for layer, w, b in zip(view.activations, weight.to(device), offset.to(device), strict=True):
        # argmax takes the lowest class among equal scores.
        predicted = (layer.double() @ w + b).argmax(1)
        confusion.append(torch.bincount(number[test] * k + predicted[test], minlength=k * k).view(k, k))
        correct.append((predicted == number)[train].sum())
    out |= {"confusion": torch.stack(confusion), "train_correct": torch.stack(correct)}
    if control is not None:
        unit, class_of_part, weight, offset = control
        number = class_of_part[control_part(view, unit, split[1]).cpu()].to(device)
        out["control_correct"] = torch.stack(
            [
                ((layer.double() @ w + b).argmax(1) == number)[test].sum()
                for layer, w, b in zip(view.activations, weight.to(device), offset.to(device), strict=True)
            ]
        )
    return out
