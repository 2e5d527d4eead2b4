"""Adapters from the front model's residual stream to the back model's, one class for each kind.

A new subclass of `AdapterKind` goes into this file, or into a new module of this folder. No other file changes.

Examples:
    >>> sorted(ADAPTER_KINDS.all())
    ['affine', 'affine-norm', 'identity', 'linear']
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ...core.arguments import typed
from ...core.errors import LayersimError
from ...core.registry import Registry


class AdapterKind(ABC):
    r"""Base class of adapter kinds. An adapter maps the front model's residual stream $h$ to the back model's.

    $$ y = [h +]\; W \varphi(h)\; [+\, b] $$

    `features` is $\varphi$; `adds_residual` says whether the first bracket is present. Both are static methods that need torch
    alone, because they are sent to NDIF servers as source.

    A new subclass goes into this `__init__.py`, or into a new module of this folder. It is then available as
    `stitch(..., adapter=name)`; no other file changes.

    Class attributes:
        - `name`: value of `adapter=` in `stitch`; files hold it too.
        - `has_weight`: whether there is a $W$. Without it the adapter is $\varphi$ itself, which is not fitted, and both
          residual streams must be of one width.
        - `has_bias`: whether there is a $b$. The closed form then centres features and targets.
    """

    name: ClassVar[str]

    has_weight: ClassVar[bool] = True
    has_bias: ClassVar[bool] = True

    @staticmethod
    @abstractmethod
    def features(hidden: Tensor) -> Tensor:
        r"""Features $\varphi(h)$ of the residuals. Features and residuals have the same shape, `... d_front`."""

    @staticmethod
    def adds_residual(d_front: int, d_back: int) -> bool:
        """Whether the adapter has a skip connection, for these widths."""
        return False


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


class Identity(AdapterKind):
    """Identity map, $y = h$, for models whose residual streams have the same basis."""

    name = "identity"
    has_weight = False
    has_bias = False

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


ADAPTER_KINDS = Registry(__name__, AdapterKind, "kind")


class Adapter(nn.Module):
    """A map from the front model's residual stream (`... d_front`) to the back model's (`... d_back`).

    | kind | map |
    | --- | --- |
    | `identity` | h |
    | `linear` | W h |
    | `affine` | W h + b |
    | `affine-norm` | h + W LN(h) + b, with a layer norm that has no weights; W LN(h) + b if the widths differ |

    Args:
        kind: one of these kinds, or the name of another class in `tl_layersim/stitching/adapters/`.
        weight: `d_back d_front`; None for `identity`.
        bias: `d_back`; None for `identity` and `linear`.

    Source:
        Brown et al. 2023 (arXiv 2310.14993), section 3 and appendix C.1; `affine-norm` in the form of Belrose et al. 2023
        (arXiv 2303.08112).

    Examples:
        >>> import torch, tl_layersim as lsim
        >>> turn = lsim.stitching.Adapter("linear", torch.tensor([[0.0, 1.0], [-1.0, 0.0]]))
        >>> turn(torch.tensor([1.0, 2.0]))
        tensor([ 2., -1.])
    """

    weight: Tensor | None
    bias: Tensor | None

    @typed
    def __init__(
        self,
        kind: str,
        weight: Float[Tensor, "d_back d_front"] | None = None,
        bias: Float[Tensor, " d_back"] | None = None,
    ) -> None:
        super().__init__()
        definition = ADAPTER_KINDS.named(kind)()
        if (weight is not None, bias is not None) != (definition.has_weight, definition.has_bias):
            raise LayersimError(
                f"Adapter got {_parts_in_words(weight is not None, bias is not None)}; with kind={kind!r}, it takes "
                f"{_parts_in_words(definition.has_weight, definition.has_bias)}."
            )
        self.definition = definition
        self.kind = kind
        # Buffers are moved and saved with a model, and not trained by its optimiser. The layout in memory is that of a weight
        # read from a file, because the last bits of a product depend on it.
        contiguous = None if weight is None else weight.detach().clone(memory_format=torch.contiguous_format)
        self.register_buffer("weight", contiguous)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def forward(self, hidden: Tensor) -> Tensor:
        """The mapped residual, in the dtype of the weight. Without a weight, the residual's dtype is kept."""
        if self.weight is None:
            return self.definition.features(hidden)
        hidden = hidden.to(self.weight.dtype)
        mapped = torch.nn.functional.linear(self.definition.features(hidden), self.weight, self.bias)
        if self.definition.adds_residual(hidden.shape[-1], len(self.weight)):
            return hidden + mapped
        return mapped

    def digest(self) -> str:
        """The first 12 hex digits of a SHA-256 over kind, weight and bias."""
        digest = hashlib.sha256(self.kind.encode())
        for part in (self.weight, self.bias):
            if part is not None:
                digest.update(part.detach().double().cpu().contiguous().numpy().tobytes())
            digest.update(b"|")
        return digest.hexdigest()[:12]

    def extra_repr(self) -> str:
        return self.kind if self.weight is None else f"{self.kind}, {self.weight.shape[1]} -> {self.weight.shape[0]}"


def _parts_in_words(weight: bool, bias: bool) -> str:
    """Names of the parts of an adapter, for the message."""
    if weight and bias:
        return "weight and bias"
    if weight or bias:
        return "weight" if weight else "bias"
    return "neither weight nor bias"
