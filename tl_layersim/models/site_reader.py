"""SiteReader: stores the activations of one forward pass at sites that run once each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..architectures.feature_maps import to_positions
from ..architectures.points import HookPoint
from ..core.errors import LayersimError
from ..data.batches import Batch
from .site_buffer import SiteBuffer


class SiteReader:
    """Stores the activations of one forward pass over a batch, at its counted positions.

    Args:
        points: the sites.
        names: of the sites.
        order: the order in which the forward pass reaches the sites; None for any order.
        batch: the batch that runs.

    Attributes:
        buffer: the activations.
        seen: the sites that were read so far.
    """

    def __init__(
        self, points: tuple[HookPoint, ...], names: tuple[str, ...], order: tuple[int, ...] | None, batch: Batch
    ) -> None:
        self.points, self.order, self.seen = points, order, list[int]()
        self.pos = batch.token_positions
        keep = batch.counted.reshape(-1).nonzero()[:, 0]
        shape = (batch.counted.shape[0], batch.counted.shape[1])
        self.buffer = SiteBuffer(names, keep, shape, batch.pooled, batch.has_positions)

    @property
    def is_complete(self) -> bool:
        """Whether every site was read."""
        return len(self.seen) == len(self.points)

    def read(self, sites: list[int], hidden: Tensor) -> None:
        """Store the sites that are parts of one tensor.

        Args:
            sites: their numbers.
            hidden: the input or the output of a module.

        Raises:
            LayersimError: a site runs twice or out of order, or its activations do not fit the batch.
        """
        for site in sites:
            point, count = self.points[site], len(self.seen)
            if site in self.seen or (self.order is not None and site != self.order[count]):
                raise LayersimError(
                    f"{point.name} ran after {count} of {len(self.points)} sites were read, so its module {point.module} does "
                    "not run once and in order in a forward pass. Name the blocks in the order in which they run, as "
                    "layers=[...]; a hook of yours must not run the model again."
                )
            self.buffer.put(
                site, to_positions(whole_tensor(hidden, point.name), point.channels, point.name, self.pos), point.part
            )
            self.seen.append(site)


def whole_tensor(hidden: Tensor, name: str) -> Tensor:
    """The activations of a site as one tensor, also where every process holds a copy of them.

    Args:
        hidden: a plain tensor, or one that is distributed over processes.
        name: of the site.

    Raises:
        LayersimError: each process holds a part.
    """
    shared: Any = hidden
    placements = getattr(shared, "placements", None)
    if placements is None:
        return hidden
    if not all(placement.is_replicate() for placement in placements):
        raise LayersimError(
            f"The activations at {name} are {' x '.join(map(str, hidden.shape))} in parts on several processes (sequence "
            "parallelism); every process must hold all of them."
        )
    whole: torch.Tensor = shared.to_local()
    return whole
