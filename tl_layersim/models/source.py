"""Source: runs a model on batches and gives its residual stream to kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.errors import LayersimError

if TYPE_CHECKING:
    from ..data.batches import Batch
from .hook_point import HookPoint
from .model_info import Model
from .pools import AnyKernel, run_batch
from .site_map import StreamSum
from .view import Kernel, Reduced, View


@dataclass(frozen=True)
class PartialSums:
    """Sums of kernel outputs over a group of consecutive rows.

    Attributes:
        count: number of rows, a power of two; the last of the data may count rows that are not there.
        not_finite: for each view `layer`, the number of activations that were NaN or infinite.
        out: by kernel name, the sums of what the kernel returned.
    """

    count: int
    not_finite: list[Tensor]
    out: Mapping[str, Mapping[str, Tensor]]


class Source(ABC):
    """A model that runs batches of tokens and applies kernels to its residual stream, in this process or on a server.

    A new source implements `model` and `run`, and `collect` if activations may leave the process that computes them.

    Attributes:
        calling: whether an analyzer calls blocks again, so that views must carry `calls`.
        is_remote: whether the model is on a server, to which requests are sent.
        can_hook: whether the model's modules run in this process as they are, so that hooks can be placed on them.
        is_single_model: whether the layers belong to one model; False for a model that is stitched together from two.
    """

    calling: bool = False
    is_remote: bool = False
    can_hook: bool = False
    is_single_model: bool = True

    @property
    @abstractmethod
    def model(self) -> Model:
        """The description of the model."""

    @property
    def can_differentiate(self) -> bool:
        """Whether gradients flow through the model's blocks, which they do not in a server's sandbox."""
        return self.model.calls == "gradients"

    @abstractmethod
    def run(self, batch: Batch, kernels: Mapping[str, Kernel]) -> Reduced:
        """Run one forward pass over the batch, and `reduce(kernels, view)` in the process that holds the activations."""

    @abstractmethod
    def collect(self, batch: Batch) -> View:
        """Run one forward pass over the batch and return the view. A source on a server refuses this."""

    def unembed_gap(self, batch: Batch) -> Tensor:
        """Run the batch's first row through the whole model and return `unembed_gap` of the lens at the last layer.

        Called only if `model.head` is known.
        """
        raise LayersimError(
            f"{type(self).__name__} has the head {self.model.head} and must implement `unembed_gap`, which checks the logit "
            "lens."
        )

    @property
    def is_settled(self) -> bool:
        """Whether nothing about the sites has to be found out by a forward pass."""
        return self.model.stream != "unknown"

    def count_positions(self, batch: Batch) -> int:
        """Number of positions that a row without token ids has in the residual stream: the patches of an image, and [CLS].

        Args:
            batch: one row.
        """
        raise LayersimError(
            f"{type(self).__name__} takes rows of token ids, and the data have {', '.join(batch.inputs)}. Implement "
            "count_positions(batch)."
        )

    def settle(self, batch: Batch) -> None:  # noqa: B027 (most sources know their blocks)
        """Run the batch's first row, to find out what is not known of the sites before a forward pass.

        That is whether the modules pass on one residual stream, where `model.stream` is "unknown", and the order and the widths
        of sites that `read_at` chose.
        """

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the sites that forward passes read; the residual layers unless `read_at` chose others."""
        return self.model.layers

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of each site; empty where all are the residual stream, or where no forward pass has shown the widths yet."""
        return ()

    @property
    def residual_points(self) -> tuple[HookPoint, ...]:
        """The hook points of the residual layers."""
        raise self._no_hook_points(", ".join(self.model.layers[:2]))

    def hook_points(self, at: Any, per_head: bool) -> tuple[HookPoint, ...]:
        """The hook points that `at` names, see `find_points`.

        Raises:
            LayersimError: the model lacks them; or this source reads the residual stream only.
        """
        raise self._no_hook_points(f"at={at!r}")

    @property
    def has_two_stacks(self) -> bool:
        """Whether the model has an encoder and a decoder, of which one is read."""
        return False

    def in_stack(self, at: Any) -> Any:
        """Read the stack of an encoder-decoder that `at` names, and return `at` without its name.

        Args:
            at: as in `hook_points`.
        """
        return at

    def read_at(self, points: tuple[HookPoint, ...]) -> None:
        """Read these hook points in further forward passes, in place of the residual layers."""
        raise self._no_hook_points(", ".join(point.name for point in points[:3]))

    def reading_at(self, points: tuple[HookPoint, ...]) -> AbstractContextManager[None]:
        """A context in which forward passes read other hook points."""
        raise self._no_hook_points(", ".join(point.name for point in points[:3]))

    @property
    def is_starting(self) -> bool:
        """Whether further copies of the model are being loaded, with which runs become faster."""
        return False

    def stream_sums(self) -> tuple[StreamSum, ...]:
        """The identities of the residual stream that the architecture implies for the sites that `read_at` chose."""
        return ()

    def _no_hook_points(self, given: str) -> LayersimError:
        return LayersimError(
            f"`at` cannot be given for a {type(self).__name__}, which reads the residual stream only: {given}."
        )

    def stream(
        self,
        batches: Iterator[Batch],
        kernels: Mapping[str, AnyKernel],
        start: int = 0,
        say: Callable[[str], None] = print,
        first_block: int | None = None,
    ) -> Iterator[list[PartialSums]]:
        """Run batches in order; a source on a server runs several in one request.

        Args:
            batches: each with at least one counted token.
            kernels: of views, as in `run`, and of pools of rows.
            start: number of rows of the data before these, which earlier processes or other shards run.
            say: takes short progress messages.
            first_block: number of rows in the first block of the data (`core.blocks`), whose boundaries no part crosses;
                None for any parts.

        Yields:
            Sums of all leaves of the next batches, in parts whose counts are powers of two and join as in
            `pairwise_summation.push`: the number of a part's first row is a multiple of its count.
        """
        for batch in batches:
            yield [PartialSums(batch.leaf, *own) for own in self.sums(batch, kernels)]

    def sums(self, batch: Batch, kernels: Mapping[str, AnyKernel]) -> list[Reduced]:
        """The sums of the leaves of one batch, in the process that holds the activations.

        Args:
            batch: of one forward pass or more.
            kernels: of views, as in `run`, and of pools of rows.
        """
        return run_batch(self.run, batch, kernels)

    def plan(self, passes: int, count: int, tokens: int, positions: int, samples: int) -> str:
        """Describe the requests, memory and time that a run needs on a server; "" for a model in this process.

        Args:
            passes: number of passes over the data.
            count: number of batches.
            tokens: in all batches.
            positions: of the largest batch, padding included.
            samples: of the batch with most of them.
        """
        return ""

    def refuse_larger(self, rows: int, positions: int) -> None:  # noqa: B027 (there is no limit in this process)
        """Refuse batches that exceed `tokens_per_request`.

        Args:
            rows: of the largest batch.
            positions: of the largest batch, padding included.
        """

    def record(self) -> dict[str, Any]:
        """Facts about the server that a result records; empty for a model in this process."""
        return {}

    def peers(self) -> frozenset[int]:
        """Ranks of the process group that share one copy of the model, see `distributed.weight_peers`.

        Empty where this process holds the whole model.
        """
        return frozenset()

    def evaluating(self) -> AbstractContextManager[None]:
        """A context in which the model runs without dropout; the model's previous state is restored at the end."""
        return nullcontext()

    @contextmanager
    def with_calls(self) -> Iterator[None]:
        """A context in which `calling` is true. Used only if `model.calls` is not "none"."""
        if isinstance(module := getattr(self, "module", None), torch.nn.Module):
            refuse_inference_weights(module)
        self.calling = True
        try:
            yield
        finally:
            self.calling = False


def refuse_inference_weights(module: torch.nn.Module) -> None:
    """Refuse weights that were created under `torch.inference_mode()`, because autograd cannot use them."""
    unusable = [path for path, parameter in module.named_parameters() if parameter.is_inference()]
    if unusable:
        raise LayersimError(
            f"The weights of {type(module).__name__} were created under torch.inference_mode(), so they can have no "
            f"gradients: {len(unusable)} parameters, the first {unusable[0]}. Load the model under torch.no_grad()."
        )
