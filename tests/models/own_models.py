"""Small models of a user, whose blocks lie in `parts`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class AddingBlock(torch.nn.Linear):
    """Adds a tanh of a linear map to its input, or to a mixture of positions and rows of its input.

    Args:
        width: width of the residual.
        mix: function of the residual `batch pos width`; None for no mixture.
    """

    def __init__(self, width: int, mix: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__(width, width)
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        mixed = x if self.mix is None else self.mix(x)
        return mixed + torch.tanh(super().forward(mixed))


class TwoBlocks(torch.nn.Module):
    """Token embeddings, two blocks that mix positions or rows, and a head.

    Args:
        mix: see `AddingBlock`.
    """

    def __init__(self, mix: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = torch.nn.Embedding(100, 16), torch.nn.Linear(16, 100)
        self.parts = torch.nn.ModuleList(AddingBlock(16, mix) for _ in range(2))

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.words(tokens)
        for part in self.parts:
            x = part(x)
        return self.head(x)
