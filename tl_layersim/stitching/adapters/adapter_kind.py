"""The base class of adapter kinds, and the kinds by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from ...core.registry import Registry


class AdapterKind(ABC):
    r"""Base class of adapter kinds. An adapter maps the front model's residual stream $h$ to the back model's.

    $$ y = [h +]\; W \varphi(h)\; [+\, b] $$

    `features` is $\varphi$; `adds_residual` says whether the first bracket is present. Both are static methods that need torch
    alone, because they are sent to NDIF servers as source.

    A new subclass goes into a new file of this folder. It is then available as `stitch(..., adapter=name)`; no other file
    changes.

    Class attributes:
        - `name`: value of `adapter=` in `stitch`; files hold it too.
        - `has_weight`: whether there is a $W$. Without it the adapter is $\varphi$ itself, which is not fitted, and both
          residual streams must be of one width.
        - `has_bias`: whether there is a $b$. The closed form then centres features and targets.
        - `is_affine`: whether the adapter is $y = W h [+ b]$, so that it moves directions alike at all residuals.
    """

    name: ClassVar[str]

    has_weight: ClassVar[bool] = True
    has_bias: ClassVar[bool] = True
    is_affine: ClassVar[bool] = False

    @staticmethod
    @abstractmethod
    def features(hidden: Tensor) -> Tensor:
        r"""Features $\varphi(h)$ of the residuals. Features and residuals have the same shape, `... d_front`."""

    @staticmethod
    def adds_residual(d_front: int, d_back: int) -> bool:
        """Whether the adapter has a skip connection, for these widths."""
        return False


ADAPTER_KINDS = Registry(__package__, AdapterKind, "kind")
