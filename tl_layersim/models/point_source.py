"""PointSource: a source that reads hook points of a module, the residual layers or others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from .block_lists import encoder_and_decoder, lists_by_stack, lists_by_stage
from .feature_maps import channels_at, has_convolution
from .hook_point import HookPoint
from .hook_points import find_points, items_of, stream_sums
from .model_description import stack_fields
from .model_info import Model
from .module_sites import find_stacks
from .out_of_memory import RowParts
from .sharded_sites import refuse_sharded_sites
from .site_map import StreamSum
from .source import Source
from .stack_choice import choose_stack
from .transformer_lens import is_transformer_lens


@dataclass(frozen=True)
class SitesRead:
    """The hook points that forward passes read.

    Attributes:
        points: the hook points.
        order: in which a forward pass reaches them (and further events of the source); None where none has shown it yet.
        widths: of the points; empty where they are the residual layers, or none has shown them yet.
    """

    points: tuple[HookPoint, ...]
    order: tuple[int, ...] | None
    widths: tuple[int, ...] = ()


class PointSource(Source):
    """Source whose sites are hook points of a module.

    Attributes:
        module: the model.
        paths: of its blocks, those of one stack in an encoder-decoder.
    """

    module: torch.nn.Module
    paths: list[str]
    _home: list[str]  # the paths with which the source was opened
    _named: bool  # whether the user named them
    _head_paths: list[str] | None  # the modules of the head that the user named
    _model: Model

    @abstractmethod
    def _place_blocks(self) -> None:
        """Set what depends on the paths of the blocks: the blocks, the head, and the residual layers."""

    def _start_reading(self, points: tuple[HookPoint, ...], order: tuple[int, ...]) -> None:
        """Read the residual layers, whose order is known, of whole batches until one runs out of memory."""
        self._parts = RowParts()
        self._residual = self._reading = SitesRead(self._with_channels(points), order)

    def _indivisible(self) -> str:
        """Why the rows of a batch must run in one forward pass; "" where they need not."""
        if self.calling:
            return "an analyzer calls blocks again with all rows of a batch"
        if self.peers():
            return "processes that share the weights must run the same forward passes"
        return ""

    @property
    def reads_residual(self) -> bool:
        """Whether the sites are the residual layers."""
        return self._reading is self._residual

    @property
    def is_settled(self) -> bool:
        return super().is_settled and self._reading.order is not None

    @property
    def sites(self) -> tuple[str, ...]:
        return self.model.layers if self.reads_residual else tuple(point.name for point in self._reading.points)

    @property
    def widths(self) -> tuple[int, ...]:
        return self._reading.widths

    @property
    def residual_points(self) -> tuple[HookPoint, ...]:
        return self._residual.points

    def hook_points(self, at: Any, per_head: bool) -> tuple[HookPoint, ...]:
        items = items_of(at)
        # Names with a stage may lie in other stages than the one whose residual stream is read.
        stages = lists_by_stage(self.module)
        several = any(isinstance(item, str) and item.startswith(f"{stage}.") for item in items for stage in stages)
        blocks = find_stacks(self.module, None) if several else self.paths
        points = find_points(self.module, blocks, at, per_head)
        refuse_sharded_sites(self.module, points)
        return self._with_channels(points)

    def _with_channels(self, points: tuple[HookPoint, ...]) -> tuple[HookPoint, ...]:
        """The hook points with what is known of the axis of their channels, in a model with convolutions."""
        # Tested once, and not for each of what may be hundreds of points.
        if is_transformer_lens(self.module) or not has_convolution(self.module):
            return points
        return tuple(replace(point, channels=channels_at(self.module, point.module)) for point in points)

    def stream_sums(self) -> tuple[StreamSum, ...]:
        return () if self.reads_residual else stream_sums(self.module, self.paths, self.sites)

    @property
    def has_two_stacks(self) -> bool:
        return bool(encoder_and_decoder(self.module))

    def in_stack(self, at: Any) -> Any:
        if not lists_by_stack(self.module) and not self.has_two_stacks:
            return at
        paths, at = choose_stack(self.module, self._home, self._named, at)
        if paths != self.paths:
            self.paths = paths
            head = self._head_paths if paths == self._home else None
            self._model = replace(self._model, **stack_fields(self.module, paths, head, self._named))
            self._place_blocks()
        return at

    def read_at(self, points: tuple[HookPoint, ...]) -> None:
        self._reading = self._residual if points == self._residual.points else SitesRead(points, None)

    @contextmanager
    def reading_at(self, points: tuple[HookPoint, ...]) -> Iterator[None]:
        """A context in which forward passes read other hook points."""
        before = self._reading
        self.read_at(points)
        try:
            yield
        finally:
            self._reading = before
