"""An adapter: a kind with its weight and bias."""

from __future__ import annotations

import hashlib

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ...core.arguments import typed
from ...core.errors import LayersimError
from .adapter_kind import ADAPTER_KINDS


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
