"""Ridge regression from sums over samples, and warnings of fits to few samples."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.errors import LayersimError, warn
from ..core.wording import amount

# Below this number of held-out rows a warning is given: with 20 rows, the standard error of an accuracy of .7 is .10.
FEW_HELD_OUT_ROWS = 20


def warn_of_few_samples(measure: str, samples: int, width: int, unit: str) -> None:
    """Warn of a fit to fewer samples than dimensions.

    Args:
        measure: name of the analyzer.
        samples: number of samples that the fit uses.
        width: width of the widest site.
        unit: the word for samples, in the plural.
    """
    if samples < width:
        warn(
            f"{measure} is fitted on {samples:,} {unit} of {width:,} dimensions. With fewer samples than dimensions the result "
            "depends on the number of samples: pass more data, or compare sites on equal numbers."
        )


def warn_of_few_rows(measure: str, rows: int) -> None:
    """Warn if few held-out rows have samples.

    Args:
        measure: name of the analyzer.
        rows: number of held-out rows with samples.
    """
    if rows < FEW_HELD_OUT_ROWS:
        warn(
            f"{measure} is evaluated on {amount(rows, 'held-out row')}. Below {FEW_HELD_OUT_ROWS} its values scatter by "
            "tenths: pass more rows, or a larger test_fraction=."
        )


EPS = torch.finfo(torch.float64).eps
# A spread below this multiple of the rounding error of its sums is none.
ROUNDING = 1e4 * EPS


def ridge_weights(covariance: Tensor, cross: Tensor, mean: Tensor, ridge: float) -> Tensor:
    """Weights of a ridge regression that penalises the weights of standardised dimensions.

    The covariance of standardised dimensions has a mean eigenvalue of 1, and one dimension of large variance does not raise the
    penalty of the others.

    Args:
        covariance: `width width`, covariance of the predicting dimensions.
        cross: `... width target`, covariances of the predicting dimensions with the targets.
        mean: `width`, mean of the predicting dimensions.
        ridge: penalty on the squared weights of standardised dimensions.

    Returns:
        Weights for the dimensions before standardisation, of the shape of `cross`; 0 for dimensions without spread, such as
        padding.

    Raises:
        LayersimError: the penalty is within the rounding error of the sums.
    """
    variance = covariance.diagonal()
    power = variance + mean.square()
    spread = variance > ROUNDING * power
    least = 100 * EPS * (power / variance).where(spread, 0).max()
    if not ridge >= least:
        raise LayersimError(
            f"`ridge` is {ridge:g}, within the rounding error of the sums, because the mean of the activations is large; it "
            f"must be at least {float(2 * least):.1g}."
        )
    scale = variance.where(spread, torch.inf).rsqrt()
    penalised = covariance * scale * scale[:, None] + ridge * torch.eye(len(covariance), dtype=torch.float64)
    return torch.cholesky_solve(cross * scale[:, None], torch.linalg.cholesky(penalised)) * scale[:, None]


def ridge_probe(second: Tensor, total: Tensor, counts: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Weights `width class` and offsets `class` of a linear probe, by ridge regression of one-hot labels.

    Args:
        second: `width width`, sum of x x' over training samples.
        total: `class width`, sum of x over the training samples of each class.
        counts: `class`, number of training samples.
        ridge: see `ridge_weights`.

    Raises:
        LayersimError: the penalty is within the rounding error of the sums.
    """
    # Whole numbers divide to float32.
    n = counts.sum().double()
    mean, share = total.sum(0) / n, counts / n
    cross = (total / n - torch.outer(share, mean)).T
    weight = ridge_weights(second / n - torch.outer(mean, mean), cross, mean, ridge)
    # A class without training samples is never predicted.
    offset = (share - mean @ weight).masked_fill(counts == 0, -torch.inf)
    return weight, offset


def samples_differ(second: Tensor, mean: Tensor) -> bool:
    """Whether samples differ by more than rounding.

    Args:
        second: `width width`, mean of x x' over the samples.
        mean: `width`, mean of the samples.
    """
    power = second.diagonal().sum()
    return bool(power - mean @ mean > ROUNDING * power)
