"""PointSource: a source that reads hook points of a module, the residual layers or others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ..architectures.blocks import encoder_and_decoder, lists_by_stack, lists_by_stage
from ..architectures.feature_maps import channels_at, has_convolution
from ..architectures.hugging_face import find_stacks
from ..architectures.points import HookPoint, StreamSum
from ..architectures.resolve import choose_stack, find_points, items_of, refuse_sharded_sites, stream_sums
from ..architectures.transformer_lens import is_transformer_lens
from ..core.distributed import weight_peers
from .model_description import stack_fields
from .model_info import Model
from .out_of_memory import RowParts
from .source import CanCountPositions, CanReadSites, CanReplay, CanUnembed, HasModule


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


class PointSource(HasModule, CanReadSites, CanReplay, CanUnembed, CanCountPositions):
    """Source whose sites are hook points of a module.

    Attributes:
        paths: of its blocks, those of one stack in an encoder-decoder.
    """

    paths: list[str]
    _home: list[str]  # the paths with which the source was opened
    _named: bool  # whether the user named them
    _head_paths: list[str] | None  # the modules of the head that the user named
    _model: Model

    @property
    def model(self) -> Model:
        return self._model

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
        if weight_peers(self.module):
            return "processes that share the weights must run the same forward passes"
        return ""

    @property
    def reads_residual(self) -> bool:
        """Whether the sites are the residual layers."""
        return self._reading is self._residual

    @property
    def is_settled(self) -> bool:
        return self.model.stream != "unknown" and self._reading.order is not None

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

    def in_stack(self, at: Any) -> Any:
        if not lists_by_stack(self.module) and not encoder_and_decoder(self.module):
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
        before = self._reading
        self.read_at(points)
        try:
            yield
        finally:
            self._reading = before
