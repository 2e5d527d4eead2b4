"""`RemoteSplitModel`: runs the lower or the upper part of a model on an NDIF server."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..activations.block_call import first_tensor
from ..data.batches import Batch
from ..sources.forward_arguments import forward_arguments
from ..sources.nnsight import NNsightSource
from ..sources.partial_forward import Moments, Reading, SplitModel, logits_of, loss_and_gradient_of, score_of
from ..sources.result_seals import are_tensors, sealed, ticket_of

# Width of a model whose configuration names none.
UNKNOWN_WIDTH = 8192


class RemoteSplitModel(SplitModel):
    """Runs the lower or the upper part of a model on an NDIF server, or in nnsight's simulation.

    Each method call is one request. nnsight ships the source of the traces, which use local names, torch and the standard
    library alone.

    Args:
        source: source that runs the model.
    """

    source: NNsightSource

    def __init__(self, source: NNsightSource) -> None:
        self.source = source
        self.model = source.model
        self.module = source.module

    def evaluating(self) -> AbstractContextManager[None]:
        return self.source.evaluating()

    def lower(self, batch: Batch, layer: int, read: Reading) -> dict[str, Tensor]:
        size = self._size(batch)
        return self.source.request(lambda at: _lower(*self._inputs(batch, at), layer, read), are_tensors, size)

    def upper(self, batch: Batch, targets: Tensor, layer: int, x: Tensor | None, gradient: bool = False) -> dict[str, Tensor]:
        narrow = None if x is None else self._narrowed(x)
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("loss", "correct", "count"), (len(targets),))
        if gradient and narrow is not None:
            shapes = {"loss": (), "gradient": tuple(narrow.shape)}

        def run(at: dict[str, Any]) -> dict[str, Tensor]:
            return _upper(*self._inputs(batch, at), targets, layer, narrow, gradient)

        def fits(value: Any) -> bool:
            return are_tensors(value) and {name: tuple(tensor.shape) for name, tensor in value.items()} == shapes

        return self.source.request(run, fits, self._size(batch))

    def moments(self, batch: Batch, layer: int, moments_of: Moments, h: Tensor) -> dict[str, Tensor]:
        return super().moments(batch, layer, moments_of, h.cpu())

    def _narrowed(self, x: Tensor) -> Tensor:
        """Cast a residual to the dtype of the remote model, for a smaller request."""
        return x.detach().cpu().to(self.model.torch_dtype)

    def _size(self, batch: Batch) -> int:
        """Bytes of the residuals of a batch and of a few matrices of the width of the model, in float64."""
        width = self.model.d_model or UNKNOWN_WIDTH
        return 8 * (4 * batch.tokens.numel() * width + 8 * width * width)

    def _inputs(self, batch: Batch, at: dict[str, Any]) -> tuple[Any, list[Any], tuple[Tensor, ...], dict[str, Any]]:
        args, options = forward_arguments(self.module, self.padded(batch), self.model)
        return self.source.envoy, self.source.blocks, args, options | at


def _lower(
    model: Any, blocks: list[Any], args: tuple[Tensor, ...], options: dict[str, Any], layer: int, read: Reading
) -> dict[str, Tensor]:
    import nnsight

    ticket = ticket_of(options)
    with torch.no_grad(), model.trace(*args, **options), torch.no_grad():
        residual = blocks[0].input if layer == 0 else first_tensor(blocks[layer - 1].output)
        tensors = {name: value.cpu() for name, value in read(residual.detach()).items()}
        found: dict[str, Tensor] = nnsight.save(sealed(tensors, ticket))
    return found


def _upper(
    model: Any,
    blocks: list[Any],
    args: tuple[Tensor, ...],
    options: dict[str, Any],
    targets: Tensor,
    layer: int,
    x: Tensor | None,
    gradient: bool,
) -> dict[str, Tensor]:
    import nnsight

    ticket = ticket_of(options)
    with torch.set_grad_enabled(gradient), model.trace(*args, **options), torch.set_grad_enabled(gradient):
        if x is not None:
            x = x.requires_grad_(gradient)
            enter(blocks, layer, x)
        logits = logits_of(model.output)
        scores = score_of(logits, targets) if x is None or not gradient else loss_and_gradient_of(logits, targets, x)
        tensors = {name: value.cpu() for name, value in scores.items()}
        found: dict[str, Tensor] = nnsight.save(sealed(tensors, ticket))
    return found


def enter(blocks: list[Any], layer: int, x: Tensor) -> None:
    """Replace the residual at a layer with `x`, inside a trace."""
    if layer < len(blocks):
        entering = blocks[layer].input
        blocks[layer].input = x.to(device=entering.device, dtype=entering.dtype)
        return
    output = blocks[-1].output
    leaving = first_tensor(output)
    x = x.to(device=leaving.device, dtype=leaving.dtype)
    blocks[-1].output = (x, *output[1:]) if isinstance(output, tuple) else x
