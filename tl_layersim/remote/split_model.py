"""Remote split models: on an NDIF server, or in nnsight's local simulation of one. Each method call is one request.

The bodies of traces are shipped: they refer to local names and to functions that need torch and the standard library alone.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..activations.block_call import first_tensor
from ..data.batches import Batch
from ..sources.inputs import forward_arguments
from ..sources.nnsight import NNsightSource
from ..split import Moments, SplitModel, logits_of, mean_loss_and_gradient, score_of


class RemoteSplitModel(SplitModel):
    """A split model that runs inside nnsight's traces.

    Args:
        source: runs the model.
    """

    source: NNsightSource

    def __init__(self, source: NNsightSource) -> None:
        self.source, self.model, self.module = source, source.model, source.module

    def evaluating(self) -> AbstractContextManager[None]:
        return self.source.evaluating()

    def hidden(self, batch: Batch, layer: int) -> Tensor:
        return self.source.request(lambda at: _hidden(*self._inputs(batch, at), layer))

    def score(self, batch: Batch, targets: Tensor, layer: int = 0, x: Tensor | None = None) -> dict[str, Tensor]:
        narrow = None if x is None else self._narrowed(x)
        return self.source.request(lambda at: _score(*self._inputs(batch, at), targets, layer, narrow))

    def loss_and_gradient(self, batch: Batch, targets: Tensor, layer: int, x: Tensor) -> tuple[float, Tensor]:
        narrow = self._narrowed(x)
        loss, gradient = self.source.request(lambda at: _loss_and_gradient(*self._inputs(batch, at), targets, layer, narrow))
        return float(loss), gradient.to(x.dtype)

    def moments(self, batch: Batch, layer: int, moments_of: Moments, h: Tensor) -> dict[str, Tensor]:
        h = h.cpu()
        return self.source.request(
            lambda at: _moments_in_trace(*self._inputs(batch, at), layer, moments_of, batch.attention, h)
        )

    def _narrowed(self, x: Tensor) -> Tensor:
        """The residual in the dtype of the remote model, so that no more bytes than needed are sent."""
        dtype = getattr(torch, self.model.dtype.removeprefix("torch."), None)
        return x.detach().cpu().to(dtype if isinstance(dtype, torch.dtype) else x.dtype)

    def _inputs(self, batch: Batch, at: dict[str, Any]) -> tuple[Any, list[Any], tuple[Tensor, ...], dict[str, Any]]:
        args, options = forward_arguments(self.module, self.padded(batch), self.model)
        return self.source.envoy, self.source.blocks, args, options | at


def _hidden(model: Any, blocks: list[Any], args: tuple[Tensor, ...], options: dict[str, Any], layer: int) -> Tensor:
    import nnsight

    with torch.no_grad(), model.trace(*args, **options):
        x = residual_at(blocks, layer)
        saved: Tensor = nnsight.save(x.detach().cpu())
    return saved


def _score(
    model: Any,
    blocks: list[Any],
    args: tuple[Tensor, ...],
    options: dict[str, Any],
    targets: Tensor,
    layer: int,
    x: Tensor | None,
) -> dict[str, Tensor]:
    import nnsight

    with torch.no_grad(), model.trace(*args, **options), torch.no_grad():
        if x is not None:
            enter(blocks, layer, x)
        scores = score_of(logits_of(model.output), targets)
        saved: dict[str, Tensor] = nnsight.save({name: value.cpu() for name, value in scores.items()})
    return saved


def _loss_and_gradient(
    model: Any,
    blocks: list[Any],
    args: tuple[Tensor, ...],
    options: dict[str, Any],
    targets: Tensor,
    layer: int,
    x: Tensor,
) -> tuple[Tensor, Tensor]:
    import nnsight

    with torch.enable_grad(), model.trace(*args, **options), torch.enable_grad():
        x = x.requires_grad_()
        enter(blocks, layer, x)
        loss, gradient = mean_loss_and_gradient(logits_of(model.output), targets, x)
        saved: tuple[Tensor, Tensor] = nnsight.save((loss.cpu(), gradient.cpu()))
    return saved


def _moments_in_trace(
    model: Any,
    blocks: list[Any],
    args: tuple[Tensor, ...],
    options: dict[str, Any],
    layer: int,
    moments_of: Moments,
    attention: Tensor,
    h: Tensor,
) -> dict[str, Tensor]:
    import nnsight

    with torch.no_grad(), model.trace(*args, **options), torch.no_grad():
        target = residual_at(blocks, layer)
        keep = attention.to(target.device)
        # Sums in float64 are not affected by autocast.
        sums = moments_of(h.to(target.device)[keep], target[keep])
        saved: dict[str, Tensor] = nnsight.save({name: value.cpu() for name, value in sums.items()})
    return saved


def residual_at(blocks: list[Any], layer: int) -> Tensor:
    """The residual at a layer, inside a trace."""
    residual: Tensor = blocks[0].input if layer == 0 else first_tensor(blocks[layer - 1].output)
    return residual


def enter(blocks: list[Any], layer: int, x: Tensor) -> None:
    """Replace the residual at a layer by `x`, inside a trace."""
    if layer < len(blocks):
        own = blocks[layer].input
        blocks[layer].input = x.to(device=own.device, dtype=own.dtype)
        return
    output = blocks[-1].output
    own = first_tensor(output)
    x = x.to(device=own.device, dtype=own.dtype)
    blocks[-1].output = (x, *output[1:]) if isinstance(output, tuple) else x
