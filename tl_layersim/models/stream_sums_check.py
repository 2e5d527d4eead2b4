"""Check on the first row that sublayer outputs add up to the residual stream, as the architecture implies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..architectures.points import HookPoint
from ..architectures.unembed import rounding
from ..core.errors import LayersimError
from ..data.batches import Batch
from ..data.positions import Positions
from .source import CanCountPositions, CanReadSites
from .view import View


def check_stream_sums(source: CanReadSites, batch: Batch) -> None:
    """Refuse sites whose activations do not add up to the residual stream on the batch's first row.

    Args:
        source: the model.
        batch: of the data.

    Raises:
        LayersimError: names the first block at which a sum is not the stream.
    """
    sums = source.stream_sums()
    if not sums:
        return
    points = _distinct([point for one in sums for point in (one.total, *one.terms)])
    number = {point.name: at for at, point in enumerate(points)}
    groups = tuple((number[one.total.name], tuple(number[term.name] for term in one.terms)) for one in sums)
    row = batch.short_row
    with source.reading_at(points):
        if not row.has_positions:
            # These sites may have another number of positions than the first one of the run, which lies in another stage.
            assert isinstance(source, CanCountPositions)
            row = row.with_positions(source.count_positions(row), Positions())
        source.settle(row)
        _, out = source.run(row, {"sums": partial(stream_gaps, groups=groups)})
    if not out:
        # Activations that are not finite are refused where the batch is measured.
        return
    gap, size = out["sums"]["gap"], out["sums"]["size"]
    dtype = getattr(torch, source.model.dtype.removeprefix("torch."), torch.float32)
    wrong = (gap > rounding(dtype) * size.clamp(min=1e-6)).nonzero()[:, 0]
    if len(wrong):
        one = sums[int(wrong[0])]
        raise LayersimError(
            f"The hook points of {source.model.name} do not add up to its residual stream: "
            f"{' + '.join(term.name for term in one.terms)} differs from {one.total.name} by "
            f"{float(gap[wrong[0]] / size[wrong[0]]):.2g} of its norm. Name module paths in at=."
        )


def stream_gaps(view: View, *, groups: tuple[tuple[int, tuple[int, ...]], ...]) -> dict[str, Tensor]:
    """For each sum, the norm of its difference from the total, and the norm of the total.

    Args:
        view: of one row.
        groups: for each sum, the site of its total and the sites of its terms.
    """
    x = view.activations.double()
    gaps = [(x[list(terms)].sum(0) - x[total]).norm() for total, terms in groups]
    # Terms that cancel leave a small total with the rounding of large terms.
    sizes = [x[[total, *terms]].norm(dim=(1, 2)).max() for total, terms in groups]
    return {"gap": torch.stack(gaps).cpu(), "size": torch.stack(sizes).cpu()}


def _distinct(points: Sequence[HookPoint]) -> tuple[HookPoint, ...]:
    by_name: dict[str, HookPoint] = {}
    for point in points:
        by_name.setdefault(point.name, point)
    return tuple(by_name.values())
