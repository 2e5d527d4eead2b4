"""LayerHeads: a linear head for each layer below the last, as kernels carry it.

Plain torch, which is shipped to servers with the kernels that call it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.errors import LayersimError
from .unembed import Unembed


@dataclass(frozen=True, eq=False)
class LayerHeads:
    """A linear head for each layer below the last, in place of the last part of the model's own head.

    Attributes:
        weight: `layer vocabulary d_model`, the first block's first.
        bias: `layer vocabulary`, None where the heads have none.
        digest: of weight and bias; keys what is computed with these heads.
    """

    weight: Tensor
    bias: Tensor | None
    digest: str

    def fitting(self, unembed: Unembed, x: Tensor) -> LayerHeads:
        """The heads on the device of the residuals.

        Args:
            unembed: the model's own, whose last part the heads replace.
            x: `layer token d_model`, the outputs of all blocks, or what a head that reads rows pools of them.

        Raises:
            LayersimError: the heads do not read what the model's own head reads, or have other classes.
        """
        if x.shape[1]:
            one = x[-1, :1]
            own = (len(x) - 1, unembed(one, normed=False).shape[-1], unembed.features(one, normed=False).shape[-1])
            if own != tuple(self.weight.shape):
                raise LayersimError(
                    f"`heads` has shape {tuple(self.weight.shape)}, `layer vocabulary d_model`; the model's own head needs "
                    f"{own}."
                )
        return self.on(x.device)

    def on(self, device: torch.device) -> LayerHeads:
        """The heads on a device."""
        if self.weight.device == device:
            return self
        return replace(self, weight=self.weight.to(device), bias=None if self.bias is None else self.bias.to(device))

    def rows(self, layer: int, ids: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Weight `vocabulary d_model` and bias `vocabulary` of one layer's head, or their rows of some ids.

        Args:
            layer: index of the block, from 0.
            ids: token ids; None for the whole vocabulary.
        """
        weight, bias = self.weight[layer], None if self.bias is None else self.bias[layer]
        if ids is None:
            return weight, bias
        ids = ids.to(weight.device)
        return weight[ids], None if bias is None else bias[ids]

    def logits(self, unembed: Unembed, x: Tensor, layer: int, normed: bool) -> Tensor:
        """Logits `... vocabulary` of residuals, in the dtype of the heads.

        Args:
            unembed: the model's own, whose last part the layer's head replaces.
            x: `... d_model`, residuals that leave the block.
            layer: index of the block, from 0.
            normed: whether the final norm is applied.
        """
        weight, bias = self.rows(layer)
        read = unembed.features(x, normed).to(device=weight.device, dtype=weight.dtype)
        return unembed.finish(torch.nn.functional.linear(read, weight, bias))


def layer_logits(
    unembed: Unembed, x: Tensor, normed: bool, heads: LayerHeads | None = None, spare: Tensor | None = None
) -> Tensor:
    """Logits `token layer vocabulary` of all layers.

    Args:
        unembed: the model's own, which reads the last layer, and all layers without `heads`.
        x: `token layer d_model`, the outputs of all blocks.
        normed: whether the final norm is applied.
        heads: of the layers below the last.
        spare: memory `(token layer) vocabulary` for the logits, None to allocate it.
    """
    if heads is None:
        return unembed(x, normed, spare)
    last = unembed(x[:, -1], normed)
    shape = (*x.shape[:2], last.shape[-1])
    dtype = torch.promote_types(last.dtype, heads.weight.dtype)
    z = torch.empty(shape, dtype=dtype, device=last.device) if spare is None else spare[: shape[0] * shape[1]].view(shape)
    for layer in range(x.shape[1] - 1):
        z[:, layer] = heads.logits(unembed, x[:, layer], layer, normed)
    z[:, -1] = last
    return z
