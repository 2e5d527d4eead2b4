"""A model whose activations are looked up: token ids index a bank of activations, so that any population can be measured."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import tl_layersim as lsim


class Look(nn.Module):
    """Block that returns the activations of one site of the bank.

    Args:
        site: number of the site.
    """

    def __init__(self, site: int) -> None:
        super().__init__()
        self.site = site
        # In a list, so that torch does not register the bank with every block.
        self.read: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.read[0][:, :, self.site]


class TokenBank(nn.Module):
    """Model that looks up the activations of its tokens. Its head returns the last site, as logits.

    Args:
        bank: `token site width`; site 0 is the input of block 0.
    """

    def __init__(self, bank: Tensor) -> None:
        super().__init__()
        self.bank = bank
        self.part = nn.ModuleList(Look(site) for site in range(1, bank.shape[1]))
        self.head = nn.Identity()

    def forward(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        activations = self.bank[input_ids]
        x = activations[:, :, 0]
        for block in self.part:
            block.read[:] = [activations]
            x = block(x)
        return self.head(x)


def opened(bank: Tensor) -> Any:
    """The model of a bank, opened."""
    layers = [f"part.{number}" for number in range(bank.shape[1] - 1)]
    return lsim.open_model(TokenBank(bank), layers=layers, unembed=["head"])


def data_of(lengths: list[int], labels: Tensor | None = None) -> lsim.Data:
    """Rows of these numbers of tokens, whose ids count through the bank.

    Args:
        lengths: number of tokens of each row.
        labels: label of each token.
    """
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    attended, targets = torch.zeros_like(ids), torch.full_like(ids, -100)
    start = 0
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.arange(start, start + length)
        attended[row, :length] = 1
        if labels is not None:
            targets[row, :length] = labels[start : start + length]
        start += length
    columns = {"input_ids": ids, "attention_mask": attended}
    return lsim.Data(columns if labels is None else columns | {"labels": targets}, batch_size=64)
