"""An adapter: a kind with its weight and bias."""

from __future__ import annotations

import hashlib
from typing import Literal

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

    def to_linear(self) -> nn.Linear:
        """This adapter as a `torch.nn.Linear` with copies of its weight and bias, which gives the same outputs.

        Raises:
            LayersimError: the kind is not `linear` or `affine`: a layer norm is no linear map, and `identity` has no width.

        Examples:
            >>> import torch, tl_layersim as lsim
            >>> turn = lsim.stitching.Adapter("linear", torch.tensor([[0.0, 1.0], [-1.0, 0.0]]))
            >>> turn.to_linear()
            Linear(in_features=2, out_features=2, bias=False)
        """
        self._need_affine("to_linear()")
        if self.weight is None:
            raise LayersimError(f"`kind` is {self.kind!r}, which has no width; torch.nn.Identity() is the same map.")
        d_back, d_front = self.weight.shape
        linear = nn.Linear(d_front, d_back, bias=self.bias is not None, device=self.weight.device, dtype=self.weight.dtype)
        with torch.no_grad():
            linear.weight.copy_(self.weight)
            if self.bias is not None:
                linear.bias.copy_(self.bias)
        return linear

    @typed
    def transfer(self, vectors: Float[Tensor, "*vectors width"], *, role: Literal["write", "read"] = "write") -> Tensor:
        r"""Move directions of an SAE, a probe or a steering vector through the adapter.

        A direction that is written, such as a row of an SAE's decoder or a steering vector, is added to the residual stream.
        The adapter takes it from the front model to the back model, as $W v$: its output for $h + v$ is that for $h$, plus
        $W v$.

        A direction that is read, such as the weights of a probe or a row of an SAE's encoder, is multiplied with the residual
        stream. The adapter takes it from the back model to the front model, as $W' u$, because
        $u \cdot (W h + b) = W' u \cdot h + u \cdot b$. Add `vectors @ adapter.bias` to the offset of the probe.

        To move an SAE or a probe of the front model to the back model, move what it writes through this adapter, and what it
        reads through an adapter from the back to the front.

        Args:
            vectors: directions, `... d_front` to write, `... d_back` to read.
            role: "write" or "read".

        Returns:
            The directions in the other model, `... d_back` to write, `... d_front` to read.

        Raises:
            LayersimError: the adapter has a layer norm, so that what it does to a direction depends on the residual; or the
                width is wrong.

        Source:
            Chen, Merullo, Stolfo and Pavlick 2025 (arXiv 2506.06609), for SAEs moved by affine maps of two streams.

        Examples:
            >>> import torch, tl_layersim as lsim
            >>> turn = lsim.stitching.Adapter("linear", torch.tensor([[0.0, 1.0], [-1.0, 0.0]]))
            >>> turn.transfer(torch.tensor([1.0, 0.0])), turn.transfer(torch.tensor([1.0, 0.0]), role="read")
            (tensor([ 0., -1.]), tensor([0., 1.]))
        """
        self._need_affine("transfer()")
        if self.weight is None:
            return vectors
        weight = self.weight if role == "write" else self.weight.T
        if vectors.shape[-1] != weight.shape[1]:
            raise LayersimError(
                f"`vectors` have width {vectors.shape[-1]}; to {role}, this adapter takes vectors of width {weight.shape[1]}."
            )
        return torch.nn.functional.linear(vectors.to(weight.dtype), weight)

    def _need_affine(self, call: str) -> None:
        """Raise an error if the adapter is not y = W h + b."""
        if not self.definition.is_affine:
            raise LayersimError(f"`kind` is {self.kind!r}; {call} needs a linear map, such as 'linear' or 'affine'.")

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
