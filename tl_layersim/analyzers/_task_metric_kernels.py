"""Kernels of `TaskMetrics`: confusion matrices of classifiers, and predictions of regression heads.

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
        size: number of float64 values for each layer.
        max_memory_gb: limit for the sums, in GB.

    Raises:
        LayersimError: the sums need more.
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
    """Confusion matrices of a classifier's lens predictions, `layer class class`.

    Args:
        view: activations of one batch.
        labels: the classes.
        normed: whether the final norm is applied to every layer, not only to the last one.
        memory_mb: limit for the logits, in MB.
        max_memory_gb: limit for the sums, in GB.
        heads: heads for the layers below the last; None to use the model's own head at every layer.

    Raises:
        LayersimError: the head has one output, or so many outputs that the sums exceed the limit.
    """
    assert view.unembed is not None
    target = with_labels(view, labels, read_positions(view))
    layers = len(view.activations) - 1
    last, needs_norm = head_input(view, view.activations[-1:], True)
    classes = view.unembed(last[:, :1], needs_norm).shape[-1]
    if classes == 1:
        raise LayersimError(
            "`labels` are classes, but the head has one output. A regression head needs scores: labels.float()."
        )
    need_memory_for_sums(layers, classes**2, max_memory_gb)
    lens = read_lens(view, target, normed, memory_mb, 1, label_key(labels), heads)
    known = target != NO_LABEL
    cells = target[known].to(last.device) * classes + lens["best"][:, known]
    counts = [torch.bincount(row, minlength=classes**2).view(classes, classes) for row in cells]
    return {"confusion": torch.stack(counts), "bad": bad_logits(lens)}


def scores_kernel(view: View, *, rows: Tensor, normed: bool, heads: LayerHeads | None = None) -> dict[str, Tensor]:
    """Lens predictions of a regression head, `layer row`; zero for rows of other batches.

    Args:
        view: activations of one batch.
        rows: indices of all rows of the data.
        normed: whether the final norm is applied to every layer; at the last layer it always is.
        heads: heads for the layers below the last; None to use the model's own head at every layer.

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
            f"`labels` are floats, but the head has {z.shape[-1]} outputs. A classifier needs classes: labels.long()."
        )
    z = z[..., 0].T.to(x.device).double()
    scores = torch.zeros(len(x), len(rows), dtype=torch.float64, device=x.device)
    scores.index_add_(1, row.to(x.device), z)
    return {
        "scores": scores,
        "count": torch.bincount(row, minlength=len(rows)),
        "bad": (~z.isfinite()).sum(1),
    }
