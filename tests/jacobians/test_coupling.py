"""Which connections are related."""

from __future__ import annotations

import torch

from tl_layersim.jacobians.coupling import Connections, CouplingOptions, couple

from ..tiny_models import random_tokens, tiny_llama
from .helpers import MEMORY, calls_of


def test_couple_relates_connections_of_one_row_only():
    model = tiny_llama()
    calls = calls_of(model, lambda: model(random_tokens(2, 8), use_cache=False))
    at = torch.tensor([[3, 7], [3, 7]])
    options = CouplingOptions((4,), "dense", "signed", MEMORY, 0)
    with torch.no_grad():
        both = couple(calls, Connections(torch.tensor([0, 1]), (1, 1), at, at), options)
        second = couple(calls, Connections(torch.tensor([1]), (1, 1), at[1:], at[1:]), options)
    torch.testing.assert_close(both.off[:, 1:], second.off, rtol=1e-4, atol=1e-5)
