"""RaySource: a model whose copies run in the workers of a Ray cluster; this process has its description only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..core.errors import LayersimError
from ..data.batches import Batch
from ..models.hook_point import HookPoint
from ..models.model_info import Model
from ..models.pools import AnyKernel
from ..models.site_map import StreamSum
from ..models.source import PartialSums, Source
from ..models.view import Kernel, Reduced, View
from ..remote.request_sizes import RequestSchedule
from .model_copy import Facts, GroupSums, Settings, equal_fields_of
from .workers import Workers

# Seconds that a worker computes for each call: long beside the time of a call, short beside that of a run.
SECONDS_PER_CALL = 2.0


@dataclass(frozen=True)
class ModelOnRay:
    """A model that opens itself as a `RaySource`.

    Attributes:
        workers: hold its copies.
    """

    workers: Workers

    def open_source(self, layers: list[str] | None, unembed: list[str] | None) -> RaySource:
        """The source; the workers know `layers` and `unembed` already."""
        return RaySource(self.workers)


class RaySource(Source):
    """Source of a model whose copies run in the workers of a Ray cluster.

    Args:
        workers: hold the copies.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._settings = Settings()
        self._facts: Facts = workers.ask("facts", self._settings)
        self._settings = Settings(1, equal_fields_of(self._facts.model))
        self.schedule = RequestSchedule(None)

    @property
    def model(self) -> Model:
        return self._facts.model

    @property
    def is_settled(self) -> bool:
        return self._facts.is_settled

    @property
    def is_starting(self) -> bool:
        return self._workers.are_starting

    @property
    def sites(self) -> tuple[str, ...]:
        return self._facts.sites

    @property
    def widths(self) -> tuple[int, ...]:
        return self._facts.widths

    def _ask(self, name: str, *arguments: Any) -> Any:
        """A property or the result of a method of the source, in a worker."""
        return self._workers.ask("ask", self._settings, name, *arguments)

    def _change(self, **settings: Any) -> None:
        """Change the settings of all copies; each follows with the next call that it gets."""
        self._settings = replace(self._settings, number=self._settings.number + 1, **settings)
        self._facts = self._workers.ask("facts", self._settings)

    @property
    def residual_points(self) -> tuple[HookPoint, ...]:
        points: tuple[HookPoint, ...] = self._ask("residual_points")
        return points

    def hook_points(self, at: Any, per_head: bool) -> tuple[HookPoint, ...]:
        points: tuple[HookPoint, ...] = self._ask("hook_points", at, per_head)
        return points

    @property
    def has_two_stacks(self) -> bool:
        return bool(self._ask("has_two_stacks"))

    def in_stack(self, at: Any) -> Any:
        self._change(stack=at)
        return self._ask("in_stack", at)

    def read_at(self, points: tuple[HookPoint, ...]) -> None:
        self._change(points=points, settled_on=None)

    @contextmanager
    def reading_at(self, points: tuple[HookPoint, ...]) -> Iterator[None]:
        """A context in which forward passes read other hook points."""
        before = self._settings
        self.read_at(points)
        try:
            yield
        finally:
            self._change(points=before.points, settled_on=before.settled_on)

    def settle(self, batch: Batch) -> None:
        self._change(settled_on=batch.first_row)

    def stream_sums(self) -> tuple[StreamSum, ...]:
        sums: tuple[StreamSum, ...] = self._ask("stream_sums")
        return sums

    def count_positions(self, batch: Batch) -> int:
        return int(self._ask("count_positions", batch))

    def unembed_gap(self, batch: Batch) -> Tensor:
        gap: Tensor = self._ask("unembed_gap", batch.first_row)
        return gap

    @contextmanager
    def with_calls(self) -> Iterator[None]:
        """A context in which views carry the calls of the blocks."""
        self._change(calling=True)
        try:
            yield
        finally:
            self._change(calling=False)

    def run(self, batch: Batch, kernels: Mapping[str, Kernel]) -> Reduced:
        whole = replace(batch, leaf=len(batch.tokens), rows_at_once=0)
        found: GroupSums = self._workers.ask("sums", self._settings, self._workers.share(kernels), [whole], 0)
        [part] = found.parts
        return part.not_finite, {name: dict(one) for name, one in part.out.items()}

    def collect(self, batch: Batch) -> View:
        raise LayersimError(f"Activations of {self.model.name} on Ray stay in its workers; load the model in this process.")

    def stream(
        self,
        batches: Iterator[Batch],
        kernels: Mapping[str, AnyKernel],
        start: int = 0,
        say: Callable[[str], None] = print,
        first_block: int | None = None,
    ) -> Iterator[list[PartialSums]]:
        shared = self._workers.share(kernels)

        def calls() -> Iterator[tuple[str, tuple[Any, ...]]]:
            number = start
            for group in self.schedule.groups(batches, start, None, self._affordable, first_block):
                yield "sums", (self._settings, shared, group, number)
                number += sum(batch.leaf_rows for batch in group)

        with self._workers.saying(say):
            for found in self._workers.in_order(calls()):
                self.schedule.measure(found.seconds, found.batches)
                yield found.parts

    def _affordable(self) -> int:
        """The number of batches that the next call may take."""
        return self.schedule.affordable(4 * SECONDS_PER_CALL)
