"""Halves of models that stay on an NDIF server, or in nnsight's simulation of one: each thing asked is one request.

The bodies of traces are shipped, see `nnsight.py`: they refer to local names and to functions that need torch alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..data.batches import Batch
from ..models.block_call import first_tensor
from ..models.layout import call_options
from ..models.nnsight import NNsightSource
from ..models.split_model import Moments, SplitModel, logits_of, loss_and_slope, score_of
from .source import RemoteSource

T = TypeVar("T")


class RemoteSplitModel(SplitModel):
    """An nnsight model that is not run here.

    Args:
        source: how it is reached.
    """

    is_remote = True
    source: NNsightSource

    def __init__(self, source: NNsightSource) -> None:
        self.source, self.model, self.module = source, source.model, source.module

    def evaluating(self) -> AbstractContextManager[None]:
        return self.source.evaluating()

    def hidden(self, batch: Batch, layer: int) -> Tensor:
        return self._ask(lambda at: _hidden(*self._what(batch, at), layer))

    def score(self, batch: Batch, targets: Tensor, layer: int = 0, x: Tensor | None = None) -> dict[str, Tensor]:
        narrow = None if x is None else self._narrowed(x)
        return self._ask(lambda at: _score(*self._what(batch, at), targets, layer, narrow))

    def loss_and_gradient(self, batch: Batch, targets: Tensor, layer: int, x: Tensor) -> tuple[float, Tensor]:
        narrow = self._narrowed(x)
        loss, slope = self._ask(lambda at: _loss_and_gradient(*self._what(batch, at), targets, layer, narrow))
        return float(loss), slope.to(x.dtype)

    def moments(self, batch: Batch, layer: int, moments_of: Moments, h: Tensor) -> dict[str, Tensor]:
        h = h.cpu()
        return self._ask(lambda at: _moments(*self._what(batch, at), layer, moments_of, batch.attention, h))

    def _narrowed(self, x: Tensor) -> Tensor:
        """What is sent in place of a residual, no wider than the model there holds it."""
        dtype = getattr(torch, self.model.dtype.removeprefix("torch."), None)
        return x.detach().cpu().to(dtype if isinstance(dtype, torch.dtype) else x.dtype)

    def _what(self, batch: Batch, at: dict[str, Any]) -> tuple[Any, list[Any], Tensor, dict[str, Any]]:
        options = call_options(self.module, batch) | at
        return self.source.envoy, self.source.blocks, self.padded(batch).tokens, options

    def _ask(self, run: Callable[[dict[str, Any]], T]) -> T:
        if isinstance(self.source, RemoteSource):
            return self.source.ndif.request(lambda backend: run({"backend": backend}))
        return run(dict(self.source.where))


def _hidden(model: Any, blocks: list[Any], tokens: Tensor, options: dict[str, Any], layer: int) -> Tensor:
    import nnsight

    with torch.no_grad(), model.trace(tokens, **options):
        x = residual_at(blocks, layer)
        found: Tensor = nnsight.save(x.detach().cpu())
    return found


def _score(
    model: Any,
    blocks: list[Any],
    tokens: Tensor,
    options: dict[str, Any],
    targets: Tensor,
    layer: int,
    x: Tensor | None,
) -> dict[str, Tensor]:
    import nnsight

    with torch.no_grad(), model.trace(tokens, **options), torch.no_grad():
        if x is not None:
            enter(blocks, layer, x)
        scores = score_of(logits_of(model.output), targets)
        found: dict[str, Tensor] = nnsight.save({name: value.cpu() for name, value in scores.items()})
    return found


def _loss_and_gradient(
    model: Any,
    blocks: list[Any],
    tokens: Tensor,
    options: dict[str, Any],
    targets: Tensor,
    layer: int,
    x: Tensor,
) -> tuple[Tensor, Tensor]:
    import nnsight

    with torch.enable_grad(), model.trace(tokens, **options), torch.enable_grad():
        x = x.requires_grad_()
        enter(blocks, layer, x)
        loss, slope = loss_and_slope(logits_of(model.output), targets, x)
        found: tuple[Tensor, Tensor] = nnsight.save((loss.cpu(), slope.cpu()))
    return found


def _moments(
    model: Any,
    blocks: list[Any],
    tokens: Tensor,
    options: dict[str, Any],
    layer: int,
    moments_of: Moments,
    attention: Tensor,
    h: Tensor,
) -> dict[str, Tensor]:
    import nnsight

    with torch.no_grad(), model.trace(tokens, **options), torch.no_grad():
        target = residual_at(blocks, layer)
        keep = attention.to(target.device)
        # float64 is out of autocast's reach.
        sums = moments_of(h.to(target.device)[keep], target[keep])
        found: dict[str, Tensor] = nnsight.save({name: value.cpu() for name, value in sums.items()})
    return found


def residual_at(blocks: list[Any], layer: int) -> Tensor:
    """Inside a trace: the residual at a layer."""
    found: Tensor = blocks[0].input if layer == 0 else first_tensor(blocks[layer - 1].output)
    return found


def enter(blocks: list[Any], layer: int, x: Tensor) -> None:
    """Inside a trace: put `x` in the place of the residual at a layer."""
    if layer < len(blocks):
        own = blocks[layer].input
        blocks[layer].input = x.to(device=own.device, dtype=own.dtype)
        return
    output = blocks[-1].output
    own = first_tensor(output)
    x = x.to(device=own.device, dtype=own.dtype)
    blocks[-1].output = (x, *output[1:]) if isinstance(output, tuple) else x
