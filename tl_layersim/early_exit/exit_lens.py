"""ExitLens: logits after each number of blocks, by the model's own head or by a head of the layer's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.layer_heads import LayerHeads
from ..models.unembed import Unembed


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

    def __call__(self, x: Tensor, layer: int) -> Tensor:
        """Logits `token vocabulary` of residuals `token d_model` that leave block number `layer`, counted from 1."""
        if self.heads is None:
            return self.unembed(x)
        own = layer == self.blocks
        logits = self.unembed(x) if own else self.heads.logits(self.unembed, x, layer - 1, self.normed)
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

    def logits_of_rows(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Logits `token candidate` of residuals `token d_model`, of rows of a head."""
        read = self.unembed.features(x, self.heads is None or self.normed).to(weight.dtype)
        return self.unembed.finish(torch.nn.functional.linear(read, weight, bias))
