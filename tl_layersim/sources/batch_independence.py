"""Whether a row has the same activations alone and in a batch, and which rows of a batch may run together."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..architectures.unembed import rounding

if TYPE_CHECKING:
    from ..data.batches import Batch

# Rounding of the same row in batches of other shapes differs from layer to layer; mixing of rows is far above this multiple.
TIMES_NOISE = 8.0


class Together(Enum):
    """The rows of a batch that run in one forward pass.

    Attributes:
        ALL: all rows, padded to one length.
        OF_ONE_LENGTH: rows of equal length, because padding changes the activations of shorter rows.
        ALONE: each row alone, because other rows change its activations.
    """

    ALL = "all rows"
    OF_ONE_LENGTH = "rows of equal length"
    ALONE = "each row alone"

    @property
    def next(self) -> Together:
        """The next smaller choice."""
        return Together.OF_ONE_LENGTH if self is Together.ALL else Together.ALONE

    def groups(self, batch: Batch) -> list[list[int]]:
        """Indices of the rows in each forward pass, without rows that have no counted position.

        Args:
            batch: the rows.
        """
        lengths = batch.lengths.tolist()
        groups: dict[int, list[int]] = {}
        for row in batch.counted.any(1).nonzero()[:, 0].tolist():
            groups.setdefault(row if self is Together.ALONE else lengths[row], []).append(row)
        return list(groups.values())


def row_to_compare(batch: Batch, together: Together) -> int | None:
    """Index of the row that would be changed most by the rows that run with it; None if every row runs alone.

    It is the shortest row with a counted position, in a group of several rows.

    Args:
        batch: the rows.
        together: the rows that run in one forward pass.
    """
    counted = batch.counted.any(1)
    if together is Together.ALL:
        groups = [counted.nonzero()[:, 0].tolist()] if len(batch.tokens) > 1 else []
    else:
        groups = [group for group in together.groups(batch) if len(group) > 1]
    rows: list[int] = []
    for group in groups:
        rows += group
    return min(rows, key=lambda row: int(batch.lengths[row]), default=None)


def gaps(in_batch: Tensor, alone: Tensor) -> Tensor:
    """Relative differences between activations of a row in a batch and alone (`site`), the largest over its samples.

    A difference is relative to the largest norm of the sample up to this site, because the rounding of large activations stays
    where they cancel.

    Args:
        in_batch: `site sample width`, in a batch.
        alone: `site sample width`, alone.
    """
    gap_of_site = []
    largest_norms = torch.full(alone.shape[1:2], torch.finfo(torch.float32).tiny, dtype=torch.float64, device=alone.device)
    # Site by site, because copies of all sites in float64 may not fit into memory.
    for site_in_batch, site_alone in zip(in_batch, alone, strict=True):
        reference = site_alone.double()
        largest_norms = torch.maximum(largest_norms, reference.norm(dim=-1))
        difference = (site_in_batch.double() - reference).norm(dim=-1)
        gap_of_site.append((difference / largest_norms).amax())
    # Activations that are not finite are refused where they are measured.
    return torch.stack(gap_of_site).nan_to_num(posinf=0.0)


def allowed_gaps(sites: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Largest differences that rounding causes without a doubt (`site`).

    Many models compute norms and attention weights in float32 whatever their dtype. The rounding of each block adds to that of
    the blocks before it, as in a random walk.

    Args:
        sites: number of sites, in the order of computation.
        dtype: dtype of the model.
        device: device of the activations.
    """
    dtypes = [dtype]
    if torch.is_autocast_enabled(device.type):
        dtypes.append(torch.get_autocast_dtype(device.type))
    return rounding(*dtypes) * torch.arange(1, sites + 1, dtype=torch.float64, device=device).sqrt()
