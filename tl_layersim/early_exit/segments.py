"""Segments: forward passes from one check to the next, each of which starts where the one before it stopped.

A segment is a run of consecutive blocks between two checks. Cached decoding and full-sequence forward passes are both runs of
segments; they differ in what stops, and in what enters the next segment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..activations.block_call import first_tensor
from ..sources.hooks import ForwardRun, on_leave, temporary_hooks
from ..sources.split_model import LocalSplitModel
from .supported_models import not_reached


@contextmanager
def entered(split_model: LocalSplitModel, layer: int, x: Tensor) -> Iterator[None]:
    """Enter the model at a layer with residuals `x`, without the forward hooks of the block below, which already ran on `x`."""
    below = vars(split_model.blocks[layer - 1])
    hooks = below["_forward_hooks"]
    below["_forward_hooks"] = OrderedDict()
    try:
        with split_model.entered(layer, lambda _: x):
            yield
    finally:
        below["_forward_hooks"] = hooks


class Segments(ABC):
    """Forward passes of a batch in segments of blocks; some rows or positions stop after each segment.

    Args:
        split_model: the model.
        ends: for each segment, the number of blocks up to its end; the last is that of the highest block that runs.

    Attributes:
        block_calls: block calls so far, whatever the number of tokens in each.
        block_tokens: tokens run through blocks, summed over blocks.
        passes: forward passes started.
        segment: index of the segment that runs.
    """

    def __init__(self, split_model: LocalSplitModel, ends: tuple[int, ...]) -> None:
        self.split_model, self.ends = split_model, ends
        self.block_calls = self.block_tokens = self.passes = self.segment = 0
        self._stopped, self._forward = False, ForwardRun()

    @abstractmethod
    def enter(self) -> tuple[dict[str, Any], Tensor | None] | None:
        """The arguments of the model's forward and the residuals that enter the current segment; None if nothing is left."""

    @abstractmethod
    def leave(self, number: int, entering: Tensor, hidden: Tensor) -> bool:
        """Decide which rows or positions stop after a segment; return whether the same forward pass can go on.

        Args:
            number: index of the segment.
            entering: `row pos d_model`, the residuals that entered its last block.
            hidden: `row pos d_model`, those that left it.
        """

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """A context with hooks on the last block of each segment, in which `run` can be called."""
        with temporary_hooks() as handles:
            for number, end in enumerate(self.ends):
                block = self.split_model.blocks[end - 1]
                handles.append(on_leave(block, partial(self._reached, number), with_kwargs=True))
            yield

    def run(self) -> None:
        """Run all that enters block 0, until nothing is left."""
        self.segment = 0
        while (entry := self.enter()) is not None:
            options, x = entry
            self._stopped = False
            self.passes += 1
            with ExitStack() as stack:
                if x is not None:
                    stack.enter_context(entered(self.split_model, self.ends[self.segment - 1], x))
                stack.enter_context(self._forward)
                self.split_model.module(**options)
            if not self._stopped:
                raise not_reached(self.split_model, self.ends[self.segment])

    def _reached(self, number: int, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """The forward hook of the last block of a segment."""
        # Blocks below the entered layer are called too, and return their input.
        if number < self.segment:
            return
        entering, hidden = first_tensor((*args, *kwargs.values())), first_tensor(output)
        length = self.ends[number] - (self.ends[number - 1] if number else 0)
        self.block_calls += length
        self.block_tokens += length * hidden.shape[0] * hidden.shape[1]
        self.segment = number + 1
        if not self.leave(number, entering, hidden):
            self._stopped = True
            self._forward.stop()
