"""Kernels of `TaskMetrics`: confusion matrices of classifiers, and tables of the predictions of regression heads.

Plain functions of torch: they are serialised by value and also run on a server.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..activations.view import View, with_labels
from ..architectures.unembed import LayerHeads
from ..core.errors import LayersimError
from ..core.sums import need_memory
from ..data.labels import NO_LABEL, label_key
from ..lens.statistics import bad_logits, head_input, logits_of_layers, read_lens, read_positions


def need_memory_for_sums(layers: int, size: int, max_memory_gb: float) -> None:
    """Raise an error if the sums need more memory than the limit.

    Args:
        layers: number of layers.
        size: numbers for each layer.
        max_memory_gb: the limit.

    Raises:
        LayersimError: they need more.
    """
    # The batch's table, the running sum, and the new sum while the two are added.
    need_memory("The sums of TaskMetrics", 3 * 8 * layers * size / 1e9, max_memory_gb, "LogitLens takes less.")


def confusion_kernel(
    view: View,
    *,
    labels: str | Tensor,
    normed: bool,
    memory_mb: float,
    max_memory_gb: float,
    heads: LayerHeads | None = None,
) -> dict[str, Tensor]:
    """Confusion matrices `layer class class` of the lens predictions of a classifier.

    Args:
        view: activations of one batch.
        labels: the classes.
        normed: whether the final norm is applied to every layer.
        memory_mb: megabytes for logits.
        max_memory_gb: limit for the sums.
        heads: of the layers below the last; None for the model's own at every layer.

    Raises:
        LayersimError: the head has one output, or so many that the sums exceed the limit.
    """
    assert view.unembed is not None
    target = with_labels(view, labels, read_positions(view))
    layers = len(view.activations) - 1
    last, needs_norm = head_input(view, view.activations[-1:], True)
    classes = view.unembed(last[:, :1], needs_norm).shape[-1]
    if classes == 1:
        raise LayersimError(
            "`labels` are classes, and the head has one output: it is a regression head, which takes labels.float()."
        )
    need_memory_for_sums(layers, classes**2, max_memory_gb)
    lens = read_lens(view, target, normed, memory_mb, 1, label_key(labels), heads)
    known = target != NO_LABEL
    cells = target[known].to(last.device) * classes + lens["best"][:, known]
    counts = [torch.bincount(row, minlength=classes**2).view(classes, classes) for row in cells]
    return {"confusion": torch.stack(counts), "bad": bad_logits(lens)}


def scores_kernel(view: View, *, rows: Tensor, normed: bool, heads: LayerHeads | None = None) -> dict[str, Tensor]:
    """Lens predictions of a regression head as a table `layer row`, zero for rows of other batches.

    Args:
        view: activations of one batch.
        rows: the numbers of all rows of the data.
        normed: whether the final norm is applied to every layer; at the last layer it always is.
        heads: of the layers below the last; None for the model's own at every layer.

    Raises:
        LayersimError: the head has several outputs.
    """
    assert view.unembed is not None
    row = with_labels(view, rows, read_positions(view))
    x, needs_norm = head_input(view, view.activations[1:], normed)
    heads = None if heads is None else heads.fitting(view.unembed, x)
    z = logits_of_layers(view.unembed, x, needs_norm, normed, heads)
    if z.shape[-1] != 1:
        raise LayersimError(
            f"`labels` are floats, and the head has {z.shape[-1]} outputs: it is a classifier, which takes labels.long()."
        )
    z = z[..., 0].T.to(x.device).double()
    scores = torch.zeros(len(x), len(rows), dtype=torch.float64, device=x.device)
    scores.index_add_(1, row.to(x.device), z)
    return {
        "scores": scores,
        "count": torch.bincount(row, minlength=len(rows)),
        "bad": (~z.isfinite()).sum(1),
    }
