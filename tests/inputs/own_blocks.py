"""Blocks for views that no model made: torch alone, so that they can be sent where this package is not installed.

Block l adds to every token a part of its own and a part of the mean of all tokens up to it, through a tanh:
f(X)_t = b_t + W2 tanh(W1 x_t + W0 mean_{s <= t} x_s), with b_t such that the block gives what the view says it gave.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor


def weights(layer: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """W0, W1 and W2 of block `layer`, float64."""
    drawn = torch.randn(3, width, width, generator=torch.Generator().manual_seed(100 + layer), dtype=torch.float64)
    # Small enough that no direction is lost in the flat parts of the tanh.
    return drawn[0] / (8 * width**0.5), drawn[1] / (8 * width**0.5), drawn[2] / width**0.5


def branch(x: Tensor, layer: int) -> Tensor:
    w0, w1, w2 = (w.to(x.dtype) for w in weights(layer, x.shape[-1]))
    count = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
    return torch.tanh(x @ w1.T + (x.cumsum(1) / count) @ w0.T) @ w2.T


def own_block(x: Tensor, rest: Tensor, layer: int) -> Tensor:
    return x + branch(x, layer) + rest.to(x.dtype)


def own_calls(residual: Tensor):
    """Calls of such blocks for one row of residuals `layer token d_model`."""
    from tl_layersim.activations.block_call import BlockCall

    calls = []
    for layer in range(len(residual) - 1):
        before, after = residual[layer][None], residual[layer + 1][None]
        # Here as everywhere in float64: what is left must be exact where the view is float32.
        rest = after.double() - before.double() - branch(before.double(), layer)
        block = partial(own_block, rest=rest, layer=layer)
        calls.append(BlockCall(block, (before,), {}, 0, after))
    return tuple(calls)
