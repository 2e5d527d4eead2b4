"""SiteBuffer: collects the samples of one forward pass at every site for a view.

This file is shipped to NDIF servers by value: it uses torch and the standard library alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..architectures.points import Part, at_point


class SiteBuffer:
    """Activations `site sample width`, filled site by site.

    Each site is copied as soon as it is read, so that the model can free its activations.

    Args:
        names: names of the sites.
        keep: indices of the counted positions in the flattened `batch pos`, ascending.
        shape: `batch pos` of the forward pass.
        pooled: whether a sample is the mean over a row's counted positions.
        has_tokens: whether positions are tokens. If False, each site may have its own number of positions, over which the mean
            is taken.

    Attributes:
        sites: names of the sites.
        samples: for each sample, the index of its position in the flattened `batch pos`; for a mean, of its row's last counted
            position.

    Examples:
        >>> import torch
        >>> buffer = SiteBuffer(("wide", "narrow"), torch.tensor([0, 1, 3]), (2, 2), pooled=False)
        >>> buffer.put(0, torch.ones(2, 2, 3))
        >>> buffer.put(1, torch.ones(2, 2, 1))
        >>> buffer.activations.shape, buffer.widths
        (torch.Size([2, 3, 3]), (3, 1))
    """

    def __init__(
        self, names: tuple[str, ...], keep: Tensor, shape: tuple[int, int], pooled: bool, has_tokens: bool = True
    ) -> None:
        self.sites, self.keep, self.shape = names, keep, shape
        self.samples, self.row_of, self.lengths = keep, keep, keep
        self.pooled = pooled
        # A mean over positions of their own leaves none of them out.
        self.own_positions = pooled and not has_tokens and keep.numel() == shape[0] * shape[1]
        self.token_positions = shape[1] if has_tokens else None
        self._buffer: Tensor | None = None
        self._widths = [0] * len(names)
        if pooled:
            ends, self.row_of, self.lengths = last_of_rows(keep, shape[1])
            self.samples = keep[ends.to(keep.device)]

    def put(self, site: int, hidden: Tensor, part: Part | None = None) -> None:
        """Copy the samples of one site.

        Args:
            site: index of the site.
            hidden: `batch pos ...`, any dtype, any device.
            part: part of the last axis that belongs to the site; None for all of it.
        """
        own = self.own_positions and hidden.shape[0] == self.shape[0] and (hidden.dim() < 3 or hidden.shape[1] != self.shape[1])
        remedy = (
            "" if self.token_positions else " If the site has its own number of positions for an image, pass positions='mean'."
        )
        hidden = at_point(hidden, part, None if own else self.shape, self.sites[site], remedy)
        width = hidden.shape[-1]
        rows = hidden.detach() if own else hidden.detach().reshape(-1, width)
        # Positions are ascending, so that as many as there are is all of them.
        if not own and len(rows) != self.keep.numel():
            # Moved once: a copy to a GPU at every site would wait for the blocks before it.
            self.keep = self.keep.to(rows.device)
            rows = rows.index_select(0, self.keep)
        buffer = self._buffer
        if buffer is None:
            # Sums are float64; Apple's GPUs have none, so the view of such a model lives on the CPU.
            device = torch.device("cpu") if hidden.device.type == "mps" else hidden.device
            dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
            # NaN, so that a site that is never read is noticed.
            buffer = torch.full((len(self.sites), self.samples.numel(), width), torch.nan, dtype=dtype, device=device)
        if width > buffer.shape[-1]:
            buffer = torch.nn.functional.pad(buffer, (0, width - buffer.shape[-1]))
        if own:
            rows = rows.double().mean(1)
        elif self.pooled:
            lengths = self.lengths.to(rows.device)
            total = torch.zeros(lengths.numel(), width, dtype=torch.float64, device=rows.device)
            rows = total.index_add_(0, self.row_of.to(rows.device), rows.double()) / lengths[:, None]
        buffer[site, :, :width] = rows
        buffer[site, :, width:] = 0
        self._buffer, self._widths[site] = buffer, width

    @property
    def activations(self) -> Tensor:
        """The activations `site sample width`; narrower sites are zero-padded to the widest."""
        assert self._buffer is not None
        return self._buffer

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of each site."""
        return tuple(self._widths)

    def fields(self) -> dict[str, Any]:
        """The fields of a view that the buffer fills."""
        samples = self.samples.to(self.activations.device)
        where = {"sequence": samples // self.shape[1], "position": samples % self.shape[1]}
        return {"activations": self.activations, "sites": self.sites, "widths": self.widths, **where}


def last_of_rows(keep: Tensor, pos: int) -> tuple[Tensor, Tensor, Tensor]:
    """Group counted positions by row.

    Args:
        keep: indices of the counted positions in the flattened `batch pos`, ascending.
        pos: number of positions of a row.

    Returns:
        `row`, the index in `keep` of each row's last counted position; `token`, the index of each position's row; and `row`,
        the number of counted positions per row. Rows without a counted position are left out.
    """
    lengths: Tensor = torch.unique_consecutive(keep.cpu() // pos, return_counts=True)[1]
    return lengths.cumsum(0) - 1, torch.arange(lengths.numel()).repeat_interleave(lengths), lengths
