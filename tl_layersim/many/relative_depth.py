"""Fields of two models at common relative depths, for models with different layers."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..core.report_tables import BLOCK_AXES
from ..core.results import Result

# Axes whose labels are the sites of a model, in order of depth.
SITE_AXES = ("row", "column", "residual", *BLOCK_AXES)


def sites_along(result: Result, axis: str) -> tuple[str, ...]:
    """All sites of the model that an axis of sites belongs to, including sites that the axis leaves out.

    Args:
        result: any result.
        axis: one of `SITE_AXES`.
    """
    return result.coordinates("column" if axis == "column" else "row")


def depths(sites: int, axis: str) -> tuple[float, ...]:
    """Relative depths of the entries of an axis of sites, from 0 to 1.

    Args:
        sites: number of sites of the model.
        axis: name of the axis; an axis of blocks starts after the first site.

    Examples:
        >>> depths(3, "residual"), depths(3, "layer")
        ((0.0, 0.5, 1.0), (0.5, 1.0))
    """
    return tuple(site / max(sites - 1, 1) for site in range(axis in BLOCK_AXES, sites))


def at_depths(values: Tensor, dim: int, sites: int, grid: int, axis: str) -> Tensor:
    """Values along an axis of sites, interpolated linearly at the relative depths of a model with fewer sites.

    Args:
        values: values with the axis at `dim`.
        dim: index of the axis.
        sites: number of sites of the model.
        grid: number of sites of the other model, at most `sites`.
        axis: name of the axis; an axis of blocks starts after the first site.

    Raises:
        LayersimError: the other model has a single site, whose relative depth is not defined.

    Examples:
        >>> at_depths(torch.tensor([0.0, 1.0, 4.0, 9.0, 16.0]).double(), 0, 5, 3, "residual")
        tensor([ 0.,  4., 16.], dtype=torch.float64)
    """
    if sites == grid:
        return values
    if grid < 2:
        raise LayersimError(
            "The relative depth of a single site is not defined; `at` must name two sites or more of each model."
        )
    first = int(axis in BLOCK_AXES)
    place = torch.arange(first, grid) * (sites - 1)
    # Whole numbers: a depth at which both models have a site takes no part of its neighbour, which may be NaN.
    low, part = place // (grid - 1) - first, (place % (grid - 1)).double() / (grid - 1)
    high = (low + 1).clamp(max=values.shape[dim] - 1)
    part = part.view(-1, *[1] * (values.dim() - dim - 1))
    below, above = values.index_select(dim, low), values.index_select(dim, high)
    return below.where(part == 0, below + part * (above - below))
