"""Kernels of `Cosine`: the mean of each layer, and sums over tokens of the cosines between all layers.

Plain functions of torch: they are serialised by value and also run on a server.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..activations.norms import beyond_rounding, norms, unit_vectors
from ..activations.view import View
from ..core.errors import LayersimError
from ._trajectory_kernel import log_histogram


def mean_kernel(view: View) -> dict[str, Tensor]:
    """Sum of the residual over tokens, and the number of tokens."""
    refuse_unequal_widths(view)
    return {
        # Layer by layer, because a sum in another dtype first copies all its terms.
        "total": torch.stack([layer.sum(0, dtype=torch.float64) for layer in view.activations]),
        "count": torch.tensor(view.activations.shape[1]),
    }


def refuse_unequal_widths(view: View) -> None:
    """Raise an error if sites differ in width. A view pads narrower sites with zeros."""
    odd = [number for number, width in enumerate(view.widths) if width != view.widths[0]]
    if odd:
        raise LayersimError(
            f"Cosine needs sites of equal width; {view.sites[0]} has width {view.widths[0]} and {view.sites[odd[0]]} "
            f"{view.widths[odd[0]]}."
        )


def cosine_kernel(view: View, *, mean: Tensor | None, bins: int) -> dict[str, Tensor]:
    """For all pairs of layers, sums over tokens of the cosine, its square and its sign, with histograms and ordered layers.

    Tokens are processed in chunks, so that intermediate tensors are small beside the residual.

    Args:
        view: activations of one batch.
        mean: `residual d_model` to subtract, None for no centring.
        bins: number of bins of each histogram.
    """
    refuse_unequal_widths(view)
    x = view.activations
    layers, tokens, _ = x.shape
    device = x.device
    out = {
        "count": torch.tensor(tokens),
        "whole": torch.tensor(0, device=device),
        "pairs": torch.zeros(layers, layers, dtype=torch.int64, device=device),
        "sum": torch.zeros(layers, layers, dtype=torch.float64, device=device),
        "square": torch.zeros(layers, layers, dtype=torch.float64, device=device),
        "negative": torch.zeros(layers, layers, dtype=torch.int64, device=device),
        "to_last": torch.zeros(layers, bins, dtype=torch.int64, device=device),
        "adjacent": torch.zeros(layers - 1, bins, dtype=torch.int64, device=device),
        "norm_ratio": torch.zeros(layers - 1, dtype=torch.float64, device=device),
        "monotone": torch.tensor(0, device=device),
        "steps": torch.zeros(2, layers - 1, dtype=torch.int64, device=device),
        "triples": torch.zeros(2, layers - 1, dtype=torch.int64, device=device),
        "raw_pairs": torch.zeros(layers, layers, dtype=torch.int64, device=device),
        "angle": torch.zeros(layers, layers, dtype=torch.float64, device=device),
        "raw_adjacent": torch.zeros(layers - 1, dtype=torch.float64, device=device),
    }
    offset = None if mean is None else mean.to(x)[:, None]
    ratios = [torch.zeros(layers - 1, 0, dtype=torch.float64, device=device)]
    for start in range(0, tokens, 256):
        chunk = x[:, start : start + 256]
        raw, norm = unit_vectors(chunk)
        ratios.append(norm[:-1] / norms(chunk[1:] - chunk[:-1]))
        out["norm_ratio"] += ratios[-1].sum(1)
        if offset is None:
            known = (norm > 0).T
            cosine = _cosines(raw, known)
        else:
            centred = chunk - offset
            known = beyond_rounding(centred, offset).T
            cosine = _cosines(unit_vectors(centred)[0], known)
        counted = known.double()
        out["pairs"] += (counted.T @ counted).long()
        out["whole"] += known.all(1).sum()
        out["sum"] += cosine.sum(0, dtype=torch.float64)
        # Squared in float64: near 1, rounding of float32 squares would exceed the spread.
        out["square"] += cosine.double().square().sum(0)
        out["negative"] += (cosine < 0).sum(0)
        last = cosine[:, :, -1]
        rises, both = last[:, 1:] > last[:, :-1], known[:, 1:] & known[:, :-1] & known[:, -1:]
        out["monotone"] += (rises.all(1) & known.all(1)).sum()
        out["steps"] += torch.stack([(rises & both).sum(0), both.sum(0)])
        out["triples"] += _ordered_triples(cosine, known)
        out["to_last"] += _histogram(last, known & known[:, -1:], bins)
        out["adjacent"] += _histogram(cosine.diagonal(offset=1, dim1=1, dim2=2), known[:, 1:] & known[:, :-1], bins)
        if mean is not None:
            known = (norm > 0).T
            cosine = _cosines(raw, known)
            counted = known.double()
        out["raw_pairs"] += (counted.T @ counted).long()
        out["raw_adjacent"] += cosine.diagonal(offset=1, dim1=1, dim2=2).sum(0, dtype=torch.float64)
        angle = cosine.arccos()
        if not bool(known.all()):
            angle = angle * (known[:, :, None] & known[:, None, :])
        out["angle"] += angle.sum(0, dtype=torch.float64)
    ratio = torch.cat(ratios, 1)
    return out | {"norm_ratio bins": log_histogram(ratio, ~ratio.isnan())}


def _cosines(unit: Tensor, known: Tensor) -> Tensor:
    """Cosines between the layers of each token, `token layer layer`; 0 if a vector has no direction.

    Args:
        unit: `layer token d_model`, vectors of norm 1.
        known: `token layer`, whether the vector has a direction.
    """
    unit = unit.transpose(0, 1)
    cosine = torch.bmm(unit, unit.transpose(1, 2)).clamp(-1, 1)
    return cosine if bool(known.all()) else cosine * (known[:, :, None] & known[:, None, :])


def _ordered_triples(cosine: Tensor, known: Tensor) -> Tensor:
    """Number of triples l1 < l2 < l3 with COS(l1, l3) < COS(l2, l3), and of all triples, by l3 from 1 on: `2 layer`.

    Args:
        cosine: `token layer layer`.
        known: `token layer`, whether the vector has a direction.
    """
    layers_below = known.long().cumsum(1)[:, :-1]
    pairs = (layers_below * (layers_below - 1) // 2 * known[:, 1:]).sum(0)
    # A cosine that is not known is NaN, which is neither smaller nor larger than another. Tokens last: adjacent in memory.
    c = cosine.where(known[:, :, None] & known[:, None, :], torch.nan).permute(1, 2, 0).contiguous()
    # By l2, l3 and token, the number of l1; one gap l2 - l1 at a time.
    smaller = torch.zeros(c.shape, dtype=torch.int16, device=c.device)
    for gap in range(1, len(c) - 1):
        smaller[gap:-1, gap + 1 :] += c[: -1 - gap, gap + 1 :] < c[gap:-1, gap + 1 :]
    ordered = smaller.sum(-1).triu(1).sum(0)[1:]
    return torch.stack([ordered, pairs])


def _histogram(values: Tensor, known: Tensor, bins: int) -> Tensor:
    """Histogram of the known values in each column of `values` over [-1, 1]: `token series` to `series bin`."""
    index = ((values + 1) * (bins / 2)).long().clamp(0, bins - 1)
    series = values.shape[1]
    index = index + bins * torch.arange(series, device=values.device)
    return torch.bincount(index[known], minlength=series * bins).reshape(series, bins)
