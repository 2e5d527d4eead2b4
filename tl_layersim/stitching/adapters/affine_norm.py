"""Affine adapters after a layer norm, with a skip connection."""

from __future__ import annotations

import torch
from torch import Tensor

from .adapter_kind import AdapterKind


class AffineNorm(AdapterKind):
    r"""Affine map after a layer norm without weights, plus a skip connection: $y = h + W\, \mathrm{LN}(h) + b$.

    The residual is not added if the widths differ.

    Source:
        Brown et al. 2023 (arXiv 2310.14993), appendix C.1, in the form of Belrose et al. 2023 (arXiv 2303.08112).
    """

    name = "affine-norm"

    @staticmethod
    def features(hidden: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(hidden, hidden.shape[-1:])

    @staticmethod
    def adds_residual(d_front: int, d_back: int) -> bool:
        return d_front == d_back
