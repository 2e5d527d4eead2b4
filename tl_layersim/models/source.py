"""Source: where activations come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..core.typed import named

if TYPE_CHECKING:
    from ..data.batches import Batch
from .model_info import Model
from .view import Kernel, Reduced, View


@named
@dataclass(frozen=True)
class PartialSums:
    """The sums of some batches that follow one another.

    Attributes:
        count: how many, a power of two.
        not_finite: for each view `layer`, how many activations were NaN or infinite.
        out: by kernel name what it returned, summed.
    """

    count: int
    not_finite: list[Tensor]
    out: Mapping[str, Mapping[str, Tensor]]


class Source(ABC):
    """A model that runs token batches and hands the residual stream to kernels, wherever the activations are.

    A new source implements `model` and `run`; `collect` too if activations may leave the place where they are made.

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
        """What is known of the model."""

    @property
    def can_differentiate(self) -> bool:
        """Whether gradients flow through the model's blocks, which they do not in a server's sandbox."""
        return self.model.calls == "gradients"

    @abstractmethod
    def run(self, batch: Batch, kernels: Mapping[str, Kernel]) -> Reduced:
        """One forward pass over the batch, and `reduce(kernels, view)` where the activations are."""

    @abstractmethod
    def collect(self, batch: Batch) -> View:
        """One forward pass over the batch, and the view itself. Refused where activations must stay."""

    def unembed_gap(self, batch: Batch) -> Tensor:
        """Of the batch's first row, run through the whole model: `unembed_gap`, the lens at the last layer beside the logits.

        Only asked of a source whose `model.head` is known.
        """
        raise LayersimError(
            f"{type(self).__name__} names a head and does not compare it with the model's logits.",
            given=f"head={self.model.head}",
            expected="a source with unembed_gap(batch)",
            do="implement unembed_gap, or leave model.head as None",
        )

    def settle(self, batch: Batch) -> None:  # noqa: B027 (most sources know their blocks)
        """Find out, where `model.stream` is "unknown", whether the modules hand on one stream, from the batch's first row."""

    @property
    def sum_group(self) -> int:
        """How many batches are added in pairs, see `pairwise_summation`, before they join the total: 1 to add each at once."""
        return 1

    def stream(
        self, batches: Iterator[Batch], kernels: Mapping[str, Kernel], start: int = 0, say: Callable[[str], None] = print
    ) -> Iterator[list[PartialSums]]:
        """Run batches in order, as many at a time as suits the place where the model is.

        Args:
            batches: each with at least one counted token.
            kernels: as in `run`.
            start: how many batches of the pass were run before, by an earlier process too.
            say: takes a few words on what is going on.

        Yields:
            The sums of the batches that follow, in parts whose counts are powers of two and meet as in `pairs.push`.
        """
        for batch in batches:
            yield [PartialSums(1, *self.run(batch, kernels))]

    def plan(self, passes: int, count: int, tokens: int, largest: int) -> str:
        """What a run over so many batches, tokens, and tokens in the largest batch will ask of the place where the model is.

        "" where the model is here, and nothing needs to be said.
        """
        return ""

    def refuse_larger(self, rows: int, positions: int) -> None:  # noqa: B027 (there is no limit in this process)
        """Refuse batches that are larger than a request may be.

        Args:
            rows: of the largest batch.
            positions: of the largest batch, padding included.
        """

    def record(self) -> dict[str, Any]:
        """What a result says of the place where the model is: nothing where it is here."""
        return {}

    def peers(self) -> frozenset[int]:
        """Ranks of the process group that hold one copy of the model together, see `distributed.weight_peers`.

        Empty where this process holds all of it.
        """
        return frozenset()

    def evaluating(self) -> AbstractContextManager[None]:
        """A context in which the model runs without dropout and is left as it was found."""
        return nullcontext()

    @contextmanager
    def with_calls(self) -> Iterator[None]:
        """A context in which `calling` is true. Only asked of a source whose `model.calls` is not "none"."""
        if isinstance(module := getattr(self, "module", None), torch.nn.Module):
            refuse_inference_weights(module)
        self.calling = True
        try:
            yield
        finally:
            self.calling = False


def refuse_inference_weights(module: torch.nn.Module) -> None:
    """Refuse weights that were made under `torch.inference_mode()` where gradients are wanted: autograd cannot use them."""
    made_there = [path for path, parameter in module.named_parameters() if parameter.is_inference()]
    if made_there:
        raise LayersimError(
            f"The weights of {type(module).__name__} were created under torch.inference_mode(), so they can have no gradients.",
            given=f"{len(made_there)} such parameters, the first {made_there[0]}",
            expected="weights that were created or loaded outside torch.inference_mode()",
            do="load the model outside torch.inference_mode(), or under torch.no_grad()",
        )
