"""Base class of the kinds of adapters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from ...core.errors import LayersimError


class AdapterKind(ABC):
    r"""A family of maps from the front's residual stream $h$ to the back's.

    $$ y = [h +]\; W \varphi(h)\; [+\, b] $$

    `features` is $\varphi$; `adds_residual` says whether the first bracket is present. Both are static methods that need torch
    alone, because they are sent to NDIF servers as source.

    Class attributes:
        - `name`: value of `adapter=` in `stitch`; files hold it too.
        - `has_weight`: whether there is a $W$. Without it the adapter is $\varphi$ itself and is not fitted.
        - `has_bias`: whether there is a $b$. The closed form then centres features and targets.
        - `needs_equal_widths`: whether both residual streams must be of one width.
    """

    name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        if "apply" in vars(cls):
            # The closed form solves for a full W: with another map, it would fit one thing and apply another.
            raise TypeError(
                f"{cls.__qualname__} must not override `apply`: a kind of adapter is y = [h +] W features(h) [+ b]."
            )

    has_weight: ClassVar[bool] = True
    has_bias: ClassVar[bool] = True
    needs_equal_widths: ClassVar[bool] = False

    @staticmethod
    @abstractmethod
    def features(hidden: Tensor) -> Tensor:
        """Features of residuals, both `... d_front`; the weight multiplies the features."""

    @staticmethod
    def adds_residual(d_front: int, d_back: int) -> bool:
        """Whether the adapter adds the residual itself (a skip connection) between streams of these widths."""
        return False

    def apply(self, hidden: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Map residuals `... d_front` to `... d_back` with these parameters."""
        out = self.features(hidden)
        if out.shape != hidden.shape:
            raise LayersimError(
                f"`features` of the adapter kind {self.name!r} returns shape {tuple(out.shape)} for {tuple(hidden.shape)}; it "
                "must be the same."
            )
        if weight is None:
            return out
        out = torch.nn.functional.linear(out, weight, bias)
        return hidden + out if self.adds_residual(hidden.shape[-1], weight.shape[0]) else out
