"""`Adapter`: a module that maps the front model's residual stream to the back model's."""

from __future__ import annotations

import hashlib

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..core.arguments import typed
from ..core.errors import LayersimError
from .adapters import ADAPTER_KINDS


class Adapter(nn.Module):
    """A map from the front model's residual stream, `... d_front`, to the back model's, `... d_back`.

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
        needed = (definition.has_weight, definition.has_bias)
        if (weight is not None, bias is not None) != needed:
            has, needs = (
                " and ".join(name for name, holds in zip(("a weight", "a bias"), each, strict=True) if holds)
                for each in ((weight is not None, bias is not None), needed)
            )
            raise LayersimError(
                f"An adapter of kind {kind!r} takes {needs or 'neither a weight nor a bias'}, but got {has or 'neither'}."
            )
        self.definition, self.kind = definition, kind
        # Buffers: a fitted adapter is moved and saved with a model, and no optimiser trains it by accident. In rows: files keep
        # no other order in memory, on which the last bits of a product depend.
        own = None if weight is None else weight.detach().clone(memory_format=torch.contiguous_format)
        self.register_buffer("weight", own)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def forward(self, hidden: Tensor) -> Tensor:
        """The mapped residual, in the dtype of the weight; an adapter without a weight keeps the residual's dtype."""
        hidden = hidden if self.weight is None else hidden.to(self.weight.dtype)
        return self.definition.apply(hidden, self.weight, self.bias)

    def digest(self) -> str:
        """The first 12 hex digits of the SHA-256 of kind, weight and bias."""
        digest = hashlib.sha256(self.kind.encode())
        for part in (self.weight, self.bias):
            digest.update(b"|" if part is None else part.detach().double().cpu().contiguous().numpy().tobytes() + b"|")
        return digest.hexdigest()[:12]

    def extra_repr(self) -> str:
        return self.kind if self.weight is None else f"{self.kind}, {self.weight.shape[1]} -> {self.weight.shape[0]}"
