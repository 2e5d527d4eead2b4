"""Affine adapters of the normalised residual, beside a skip connection."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import AdapterKind


class AffineNorm(AdapterKind):
    r"""$y = h + W\, \mathrm{LN}(h) + b$ with a layer norm without weights; without the first $h$ where the widths differ.

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
