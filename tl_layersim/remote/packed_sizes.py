"""Bytes of a request and of its result as nnsight packs them, without a server."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import torch

from ..core.sums import Sums
from ..models.nnsight import shippable
from ..models.pools import AnyKernel
from .traces import submit

# Levels of Zstandard at which nnsight packs requests and NDIF packs results.
REQUEST_LEVEL, RESULT_LEVEL = 6, 3


def packed_request(kernels: Mapping[str, AnyKernel]) -> int:
    """Bytes of the part of a request that does not grow with its tokens and sites: the source of kernels, and their values.

    Args:
        kernels: of the pass, by name.
    """
    import nnsight
    from nnsight.intervention.serialization import dumps

    nnsight.register("tl_layersim")
    return _packed(dumps((submit, shippable(kernels))), REQUEST_LEVEL)


def packed_result(sites: Sequence[str], sums: Mapping[str, Sums]) -> int:
    """Bytes of the result of a request.

    Args:
        sites: that are read.
        sums: by kernel.
    """
    buffer = io.BytesIO()
    counts = [torch.zeros((), dtype=torch.int64) for _ in sites]
    torch.save({"found": [(0, (counts, {name: dict(one.fields) for name, one in sums.items()}))]}, buffer)
    return _packed(buffer.getvalue(), RESULT_LEVEL)


def _packed(data: bytes, level: int) -> int:
    import zstandard

    return len(zstandard.ZstdCompressor(level=level).compress(data))
