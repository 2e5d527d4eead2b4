"""`Adapter`: the module that maps the front's residual stream into the back's."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from ..core.errors import LayersimError
from .adapters import adapter_kind


class Adapter(nn.Module):
    """A map from the front's residual stream to the back's. Call it on `... d_front` for `... d_back`.

    | kind | map |
    | --- | --- |
    | `identity` | h |
    | `linear` | W h |
    | `affine` | W h + b |
    | `affine-norm` | h + W LN(h) + b, with a layer norm that has no weights; W LN(h) + b where the widths differ |

    Args:
        kind: one of these, or of a class in `tl_layersim/stitching/adapters/`.
        weight: `d_back d_front`; None for `identity`.
        bias: `d_back`; None for `identity` and `linear`.

    Source:
        Brown et al. 2023 (arXiv 2310.14993), section 3 and appendix C.1; `affine-norm` in the form of Belrose et al. 2023
        (arXiv 2303.08112).

    Examples:
        >>> import torch, tl_layersim as lsim
        >>> turn = lsim.Adapter("linear", torch.tensor([[0.0, 1.0], [-1.0, 0.0]]))
        >>> turn(torch.tensor([1.0, 2.0]))
        tensor([ 2., -1.])
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, kind: str, weight: Tensor | None = None, bias: Tensor | None = None) -> None:
        super().__init__()
        definition = adapter_kind(kind)
        needed = (definition.has_weight, definition.has_bias)
        if (weight is not None, bias is not None) != needed:
            has, needs = (
                " and ".join(name for name, holds in zip(("a weight", "a bias"), each, strict=True) if holds)
                for each in ((weight is not None, bias is not None), needed)
            )
            raise LayersimError(
                f"`weight` and `bias` do not match an adapter of kind {kind!r}.",
                given=has or "neither",
                expected=needs or "neither",
                do="Adapter('affine', weight, bias), Adapter('linear', weight), Adapter('identity')",
            )
        if weight is not None and (weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1])):
            raise LayersimError(
                "`weight` and `bias` must have shapes `d_back d_front` and `d_back`.",
                given=f"shapes {tuple(weight.shape)} and {None if bias is None else tuple(bias.shape)}",
                expected="a matrix, and as many biases as it has rows",
                do="Adapter('affine', weight, bias)",
            )
        if weight is not None and not weight.is_floating_point():
            raise LayersimError(
                "`weight` must be of a floating-point type: whole numbers would round residuals.",
                given=f"a weight of {weight.dtype}",
                expected="floating-point weights",
                do="weight.float()",
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
