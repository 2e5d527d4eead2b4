"""The adapter kinds of this package: identity, linear, affine, and affine of the normalised residual."""

from __future__ import annotations

import torch
from torch import Tensor

from . import AdapterKind


class Affine(AdapterKind):
    """Affine map, $y = W h + b$.

    Source:
        Brown et al. 2023 (arXiv 2310.14993), section 3.
    """

    name = "affine"

    @staticmethod
    def features(hidden: Tensor) -> Tensor:
        return hidden


class AffineNorm(AdapterKind):
    r"""$y = h + W\, \mathrm{LN}(h) + b$ with a layer norm without weights. The first $h$ is left out if the widths differ.

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


class Identity(AdapterKind):
    """Identity map, $y = h$, for models whose residual streams share their coordinates."""

    name = "identity"
    has_weight = False
    has_bias = False
    needs_equal_widths = True

    @staticmethod
    def features(hidden: Tensor) -> Tensor:
        return hidden


class Linear(AdapterKind):
    """Linear map, $y = W h$."""

    name = "linear"
    has_bias = False

    @staticmethod
    def features(hidden: Tensor) -> Tensor:
        return hidden
