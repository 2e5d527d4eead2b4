"""ExitLens: logits after each number of blocks, by the model's own head or by a head of the layer's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..architectures.unembed import LayerHeads, Unembed


@dataclass(frozen=True, eq=False)
class ExitLens:
    """The predictions of each layer of a model, from its residual.

    Attributes:
        unembed: the model's own final norm and head.
        blocks: number of blocks of the model.
        heads: of the layers below the last; None for the model's own head at every layer.
        normed: whether `heads` read the output of the final norm.
    """

    unembed: Unembed
    blocks: int
    heads: LayerHeads | None = None
    normed: bool = True

    def norms(self, layer: int) -> bool:
        """Whether the head of a layer, counted from 1, reads the output of the final norm."""
        return self.heads is None or self.normed or layer == self.blocks

    def __call__(self, x: Tensor, layer: int, needs_norm: bool = True) -> Tensor:
        """Logits `token vocabulary` after block number `layer`, counted from 1.

        Args:
            x: `token d_model`, residuals that leave the block, or what a head that reads rows pools of them.
            layer: number of the block.
            needs_norm: whether the final norm is still to be applied where the head reads its output.
        """
        if self.heads is None:
            return self.unembed(x, needs_norm)
        own = layer == self.blocks
        normed = needs_norm and self.norms(layer)
        logits = self.unembed(x, normed) if own else self.heads.logits(self.unembed, x, layer - 1, normed)
        # The logits of all layers are one tensor.
        return logits.to(torch.promote_types(self.heads.weight.dtype, self.unembed.dtype or logits.dtype))

    def rows(self, layer: int, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """The rows of a layer's head, weight `candidate d_model` and bias `candidate`, that belong to some token ids."""
        if self.heads is not None:
            return self.heads.rows(layer - 1, ids)
        linear = self.unembed.linear
        assert linear is not None
        ids = ids.to(linear.weight.device)
        return linear.weight.detach()[ids], None if linear.bias is None else linear.bias.detach()[ids]

    def logits_of_rows(self, x: Tensor, weight: Tensor, bias: Tensor | None, needs_norm: bool) -> Tensor:
        """Logits `token candidate` of rows of a head; `x` and `needs_norm` as in a call."""
        read = self.unembed.features(x, needs_norm and (self.heads is None or self.normed)).to(weight.dtype)
        return self.unembed.finish(torch.nn.functional.linear(read, weight, bias))
