"""Norms of activations, their sizes by position and dimension, and a test for differences beyond rounding error.

Plain functions of torch: they are serialised by value with the kernels that call them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .view import View


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale vectors to a largest absolute entry of 1. Zero vectors stay zero.

    The divisors are constants to autograd, which does not change the gradient of a cosine.

    Args:
        x: `... width`.

    Returns:
        The scaled vectors, `... width`, and their largest absolute entries before scaling, `... 1`.

    Examples:
        >>> scaled(torch.tensor([[0.0, -4e30], [0.0, 0.0]]))
        (tensor([[ 0., -1.],
                [ 0.,  0.]]), tensor([[4.0000e+30],
                [0.0000e+00]]))
    """
    # `abs` makes -0 of a zero vector 0, by which a norm can be divided.
    largest = torch.maximum(x.detach().amax(-1, keepdim=True), -x.detach().amin(-1, keepdim=True)).abs()
    return x / largest.where(largest > 0, 1), largest


def unit_vectors(x: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors divided by their norms, and the norms. Unit vectors have x's dtype, norms are float64. Zero vectors stay zero.

    Args:
        x: `... width`.

    Examples:
        >>> unit, norm = unit_vectors(torch.tensor([[3e30, 4e30], [0.0, 0.0]]))
        >>> unit, [f"{value:.3g}" for value in norm]
        (tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]]), ['5e+30', '0'])
    """
    unit, largest = scaled(x)
    length = torch.linalg.vector_norm(unit, dim=-1, keepdim=True, dtype=torch.float64)
    return unit.div_(length.where(length > 0, 1).to(x.dtype)), (length * largest)[..., 0]


def norms(x: Tensor) -> Tensor:
    """Norms of vectors, in float64.

    Args:
        x: `... width`.
    """
    unit, largest = scaled(x)
    length: Tensor = torch.linalg.vector_norm(unit, dim=-1, dtype=torch.float64) * largest[..., 0]
    return length


def beyond_rounding(centred: Tensor, mean: Tensor) -> Tensor:
    """Whether centred samples differ from zero by more than rounding error (`layer sample`).

    A difference within rounding error has no direction: its cosine, or its weight in CKA, would be arbitrary.

    Args:
        centred: `layer sample d_model`, samples minus their mean.
        mean: the mean, in a shape that broadcasts to `centred`.
    """
    allowed = 16 * torch.finfo(centred.dtype).eps
    # Norms decide almost all samples; the others are compared dimension by dimension.
    beyond: Tensor = centred.norm(dim=-1) > allowed * mean.norm(dim=-1)
    layers, samples = (~beyond).nonzero(as_tuple=True)
    if len(layers):
        mean = mean.expand_as(centred)[layers, samples]
        beyond[layers, samples] = (centred[layers, samples].abs() > allowed * mean.abs()).any(-1)
    return beyond


# Positions 0 to 3 of a row are counted apart, all later ones together.
FIRST_PLACES = 4
# Statistics of fewer tokens scatter by themselves, so that no warning rests on them.
LEAST_TOKENS = 200


def activation_sizes(*views: View) -> dict[str, Tensor]:
    """Sums for the sizes of activations: norms by position; power and variance of all dimensions, and of the largest one.

    Args:
        *views: views of the same tokens, one for each model.

    Returns:
        For each model, with its index before each key: "tokens", `place`; "norm^2" and "norm^4", `site place`, sums of |x|^2
        and |x|^4; and `site`: "all power" and "largest power", sums over rows of the mean of x^2 / |x|^2 over samples, of all
        dimensions and of the largest one; "all variance" and "largest variance", the same of the variance over the samples of a
        row after position 3.
    """
    sizes = {}
    for number, view in enumerate(views):
        for name, value in _sizes(view).items():
            sizes[f"{number} {name}"] = value
    return sizes


def _sizes(view: View) -> dict[str, Tensor]:
    if "sizes" not in view.memo:
        device = view.activations.device
        place = view.position.to(device).clamp(max=FIRST_PLACES)
        # On the CPU, because numbers of rows and positions are values, which the meta device lacks.
        sequence = view.sequence.cpu()
        later = (view.position.cpu() >= FIRST_PLACES).nonzero()[:, 0]
        rows = _rows_and_counts(sequence, device)
        rows_of_later = _rows_and_counts(sequence[later], device)
        sites = [_sizes_of_site(x, place, rows, later.to(device), rows_of_later) for x in view.activations]
        view_sizes = {"tokens": torch.bincount(place, minlength=FIRST_PLACES + 1)}
        for name in sites[0]:
            view_sizes[name] = torch.stack([site[name] for site in sites])
        view.memo["sizes"] = view_sizes
    sizes: dict[str, Tensor] = view.memo["sizes"]
    return sizes


def _rows_and_counts(sequence: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """The index of each sample's row, and the number of samples in each row."""
    row, count = torch.unique_consecutive(sequence, return_inverse=True, return_counts=True)[1:]
    return row.to(device), count.to(device)


def _sizes_of_site(
    x: Tensor, place: Tensor, rows: tuple[Tensor, Tensor], later: Tensor, rows_of_later: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    unit, norm = unit_vectors(x)
    out = {f"norm^{2 * power}": _by_group(norm ** (2 * power), place, FIRST_PLACES + 1) for power in (1, 2)}
    # Samples are divided by their mean norm. There may be no samples.
    size = norm[later].sum() / max(len(later), 1)
    size = size.where(size > 0, 1)
    x = x[later] / size.to(x.dtype)
    for name, terms, (row, count) in (("power", unit.square(), rows), ("variance", x.square(), rows_of_later)):
        mean = _by_group(terms, row, len(count)) / count[:, None]
        if name == "variance":
            mean = mean - (_by_group(x, row, len(count)) / count[:, None]).square()
        largest = mean.amax(1) if len(count) else mean.new_zeros(0)
        factor = size.square() if name == "variance" else 1
        out |= {f"all {name}": mean.sum().double() * factor, f"largest {name}": largest.sum().double() * factor}
    return out


def _by_group(values: Tensor, group: Tensor, groups: int) -> Tensor:
    return values.new_zeros(groups, *values.shape[1:]).index_add_(0, group, values)
