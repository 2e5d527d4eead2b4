"""Ridge regression of one-hot labels on the activations of a site, from sums over samples."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.errors import LayersimError

# A spread below this multiple of the rounding error of its sums is none.
ROUNDING = 1e4 * torch.finfo(torch.float64).eps


def ridge_probe(second: Tensor, total: Tensor, counts: Tensor, width: int, ridge: float) -> tuple[Tensor, Tensor]:
    """Weights `width class` and offsets `class` of the ridge regression of one-hot labels on the activations of a site.

    Args:
        second: `width width`, sum of x x' over training samples.
        total: `class width`, sums of x over the training samples of each class.
        counts: `class`, number of training samples.
        width: of the site; further columns are padding.
        ridge: penalty relative to the mean eigenvalue of the covariance.

    Raises:
        LayersimError: the penalty is within the rounding error of the sums.
    """
    # Whole numbers divide to float32.
    n = counts.sum().double()
    mean, share = total.sum(0) / n, counts / n
    weight = torch.zeros(total.shape[1], len(counts), dtype=torch.float64)
    if samples_differ(second / n, mean):
        covariance = second / n - torch.outer(mean, mean)
        cross = (total / n - torch.outer(share, mean)).T
        penalty = ridge * covariance.diagonal().sum() / width
        least = 100 * torch.finfo(torch.float64).eps * second.diagonal().sum() / n
        if not penalty >= least:
            raise LayersimError(
                "`ridge` is within the rounding error of the sums, because the mean of the activations is large.",
                given=f"ridge={ridge:g}",
                expected=f"at least {float(ridge * least / penalty):.1g}",
                do=f"ridge={float(2 * ridge * least / penalty):.1g}",
            )
        factor = torch.linalg.cholesky(covariance + penalty * torch.eye(len(covariance), dtype=torch.float64))
        weight = torch.cholesky_solve(cross, factor)
    # A class without training samples is never predicted.
    offset = (share - mean @ weight).masked_fill(counts == 0, -torch.inf)
    return weight, offset


def samples_differ(second: Tensor, mean: Tensor) -> bool:
    """Whether samples differ by more than the rounding error of their sums.

    Args:
        second: `width width`, mean of x x' over the samples.
        mean: `width`, of the samples.
    """
    power = second.diagonal().sum()
    return bool(power - mean @ mean > ROUNDING * power)
