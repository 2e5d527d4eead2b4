"""Source: a model that runs batches and passes activations to kernels, and the optional abilities of sources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..activations.row_pools import AnyKernel, run_batch
from ..activations.view import Kernel, Reduced, View
from ..architectures.blocks import encoder_and_decoder, find_stacks, lists_by_stage
from ..architectures.hook_points import HookPoint, StreamSum, channels_at, has_convolution
from ..architectures.site_selection import choose_stack, find_points, items_of, refuse_sharded_sites, stream_sums
from ..architectures.transformer_lens import is_transformer_lens
from ..core.distributed import weight_peers
from ..core.errors import LayersimError
from .hooks import eval_mode
from .model_description import Model, stack_fields
from .out_of_memory import RowParts

if TYPE_CHECKING:
    from ..data.batches import Batch


@dataclass(frozen=True)
class PartialSums:
    """Sums of kernel outputs over a group of consecutive rows.

    Attributes:
        count: number of rows, a power of two; at the end of the data it may count rows that do not exist.
        not_finite: for each view `layer`, the number of activations that were NaN or infinite.
        out: sums of the kernel outputs, by kernel name.
    """

    count: int
    not_finite: list[Tensor]
    out: Mapping[str, Mapping[str, Tensor]]


class Source(ABC):
    """A model that runs batches of tokens and applies kernels to its residual stream, in this process or on a server.

    A new source implements `model` and `run`, and `collect` if activations may leave the process that computes them. A source
    that can do more inherits from the classes below as well.
    """

    @property
    @abstractmethod
    def model(self) -> Model:
        """The description of the model."""

    @abstractmethod
    def run(self, batch: Batch, kernels: Mapping[str, Kernel]) -> Reduced:
        """Run one forward pass over the batch, and `reduce(kernels, view)` in the process that holds the activations."""

    def collect(self, batch: Batch) -> View:
        """Run one forward pass over the batch and return the view.

        Raises:
            LayersimError: activations cannot leave the process that computes them.
        """
        raise LayersimError(
            f"Activations of a {type(self).__name__} cannot leave the process that computes them: {self.model.name}."
        )

    def beside(self, others: Sequence[Source]) -> Source | None:
        """A source that runs this model and others in one trace or request; its kernels take a view of each model.

        Args:
            others: sources of further models.

        Returns:
            The source; None if the models cannot run together where their activations stay.
        """
        return None

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the sites to read; the residual layers unless `CanReadSites.read_at` chose others."""
        return self.model.layers

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of each site; empty if all sites are residual layers, or the widths are not known yet."""
        return ()

    def sums(self, batch: Batch, kernels: Mapping[str, AnyKernel]) -> list[Reduced]:
        """Run one batch and return its sums, one for each leaf (a group of rows).

        Args:
            batch: a batch of one or more forward passes.
            kernels: kernels of views (see `run`) and of pools of rows.
        """
        return run_batch(self.run, batch, kernels)

    def stream(
        self,
        batches: Iterator[Batch],
        kernels: Mapping[str, AnyKernel],
        start: int,
        say: Callable[[str], None],
        first_block: int | None,
    ) -> Iterator[list[PartialSums]]:
        """Run batches in order and return their sums, in groups of consecutive rows.

        Args:
            batches: each with at least one counted token.
            kernels: kernels of views (see `run`) and of pools of rows.
            start: number of rows of the data before the first batch, which an earlier process or another shard runs.
            say: function that shows a short progress message.
            first_block: number of rows per block (`core.sums`), whose boundaries no group crosses; None for no boundaries.

        Returns:
            Sums of the next batches in groups of 2^k rows that can be pushed by `core.sums.push`: the index of a group's first
            row is a multiple of its count.
        """
        return ([PartialSums(batch.leaf, *own) for own in self.sums(batch, kernels)] for batch in batches)


class HasModule(Source):
    """A source of a torch module, which runs in evaluation mode.

    Attributes:
        module: the model.
    """

    module: torch.nn.Module

    def evaluating(self) -> AbstractContextManager[None]:
        """A context manager in which the model runs without dropout; its previous mode is restored at the end."""
        return eval_mode(self.module)


class CanUnembed(Source):
    """A source with a logit lens (`View.unembed`); its model has a `head`."""

    @abstractmethod
    def unembed_gap(self, batch: Batch) -> Tensor:
        """Run the batch's first row through the whole model and return `unembed_gap` of the lens at the last layer."""


class CanReplay(Source):
    """A source whose block calls can be replayed; its `Model.calls` is not "none".

    Attributes:
        calling: whether views must contain `calls`.
    """

    calling: bool = False


class CanCountPositions(Source):
    """A source that accepts rows without token ids, such as images."""

    @abstractmethod
    def count_positions(self, batch: Batch) -> int:
        """Number of positions of a row in the residual stream, such as the patches of an image and [CLS].

        Args:
            batch: one row.
        """


class OnServer(Source):
    """A source of a model on a server; its `stream` may run several batches per request."""

    @abstractmethod
    def plan(self, passes: int, count: int, tokens: int) -> str:
        """Describe a run on the server before it starts.

        Args:
            passes: number of passes over the data.
            count: number of forward passes.
            tokens: number of tokens in all batches.
        """

    @abstractmethod
    def refuse_larger(self, rows: int, positions: int) -> None:
        """Raise an error if batches exceed `tokens_per_request`.

        Args:
            rows: number of rows of the largest batch.
            positions: number of positions of the largest batch, padding included.
        """

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Facts about the server that a result records."""


@contextmanager
def running(source: Source, calls: bool = False) -> Iterator[None]:
    """A context manager in which the model runs without dropout.

    Args:
        source: the model.
        calls: whether views contain `calls`.

    Raises:
        LayersimError: the weights cannot have gradients, or calls of blocks are needed and the source has none.
    """
    if calls and not isinstance(source, CanReplay):
        raise LayersimError(
            f"`calls` of the model of {type(source).__name__} is {source.model.calls!r}; it must be 'none' for a source that "
            "is no CanReplay."
        )
    with source.evaluating() if isinstance(source, HasModule) else nullcontext():
        if not calls:
            yield
            return
        assert isinstance(source, CanReplay)
        if isinstance(source, HasModule):
            refuse_inference_weights(source.module)
        source.calling = True
        try:
            yield
        finally:
            source.calling = False


def refuse_inference_weights(module: torch.nn.Module) -> None:
    """Raise an error if weights were created under `torch.inference_mode()`, because autograd cannot use them."""
    unusable = [path for path, parameter in module.named_parameters() if parameter.is_inference()]
    if unusable:
        raise LayersimError(
            f"The weights of {type(module).__name__} were created under torch.inference_mode(), so they can have no "
            f"gradients: {len(unusable)} parameters, the first {unusable[0]}. Load the model under torch.no_grad()."
        )


@dataclass(frozen=True)
class SitesRead:
    """The hook points to read, with their order and widths.

    Attributes:
        points: the hook points.
        order: order in which a forward pass reaches the points (and further events of the source); None if not known yet.
        widths: widths of the points; empty if they are the residual layers, or the widths are not known yet.
    """

    points: tuple[HookPoint, ...]
    order: tuple[int, ...] | None
    widths: tuple[int, ...] = ()


class CanReadSites(HasModule, CanReplay, CanUnembed, CanCountPositions):
    """A source that reads hook points of a module: the residual layers, or others by name.

    Attributes:
        paths: paths of its blocks, those of one stack in an encoder-decoder.
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
        """Set the blocks, the head and the residual layers by the paths of the blocks."""

    def _start_reading(self, points: tuple[HookPoint, ...], order: tuple[int, ...]) -> None:
        """Read the residual layers, in whole batches until one runs out of memory."""
        self._parts = RowParts()
        self._residual = self._reading = SitesRead(self._with_channels(points), order)

    def _indivisible(self) -> str:
        """Why the rows of a batch must run in one forward pass; "" if they need not."""
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
        """Whether everything about the sites is known without a forward pass."""
        return self.model.stream != "unknown" and self._reading.order is not None

    @abstractmethod
    def settle(self, batch: Batch) -> None:
        """Run the batch's first row to find out what is unknown about the sites.

        It finds whether the modules pass on one residual stream (if `model.stream` is "unknown"), and the order and widths of
        the sites that `read_at` chose.
        """

    @property
    def sites(self) -> tuple[str, ...]:
        return self.model.layers if self.reads_residual else tuple(point.name for point in self._reading.points)

    @property
    def widths(self) -> tuple[int, ...]:
        return self._reading.widths

    @property
    def residual_points(self) -> tuple[HookPoint, ...]:
        """The hook points of the residual layers."""
        return self._residual.points

    def hook_points(self, at: Any, per_head: bool) -> tuple[HookPoint, ...]:
        """The hook points that `at` names, see `find_points`.

        Raises:
            LayersimError: the model lacks them.
        """
        # Names with a stage may lie in other stages than the one whose residual stream is read.
        prefixes = tuple(f"{stage}." for stage in lists_by_stage(self.module))
        several = any(isinstance(item, str) and item.startswith(prefixes) for item in items_of(at))
        blocks = find_stacks(self.module, None) if several else self.paths
        points = find_points(self.module, blocks, at, per_head)
        refuse_sharded_sites(self.module, points)
        return self._with_channels(points)

    def _with_channels(self, points: tuple[HookPoint, ...]) -> tuple[HookPoint, ...]:
        """Add the evidence on channel axes to hook points, if the model has convolutions."""
        # Tested once, and not for each of what may be hundreds of points.
        if is_transformer_lens(self.module) or not has_convolution(self.module):
            return points
        return tuple(replace(point, channels=channels_at(self.module, point.module)) for point in points)

    def stream_sums(self) -> tuple[StreamSum, ...]:
        """The sums on the residual stream that contain a site chosen by `read_at`."""
        return () if self.reads_residual else stream_sums(self.module, self.paths, self.sites)

    def in_stack(self, at: Any) -> Any:
        """Select the stack of an encoder-decoder that `at` names, and return `at` without the stack's name.

        Args:
            at: see `hook_points`.
        """
        if not lists_by_stage(self.module) and not encoder_and_decoder(self.module):
            return at
        paths, at = choose_stack(self.module, self._home, self._named, at)
        if paths != self.paths:
            self.paths = paths
            head = self._head_paths if paths == self._home else None
            self._model = replace(self._model, **stack_fields(self.module, paths, head, self._named))
            self._place_blocks()
        return at

    def read_at(self, points: tuple[HookPoint, ...]) -> None:
        """Read these hook points instead of the residual layers in later forward passes."""
        self._reading = self._residual if points == self._residual.points else SitesRead(points, None)

    @contextmanager
    def reading_at(self, points: tuple[HookPoint, ...]) -> Iterator[None]:
        """A context manager in which forward passes read other hook points."""
        before = self._reading
        self.read_at(points)
        try:
            yield
        finally:
            self._reading = before
