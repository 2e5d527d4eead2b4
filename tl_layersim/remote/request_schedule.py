"""Requests to a server: number of batches, size in bytes, and preparation of the next request while one runs."""

from __future__ import annotations

import io
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..activations.row_pools import AnyKernel
from ..core.errors import LayersimError
from ..core.sums import Sums, next_size, rows_in_block
from ..data.batches import Batch
from ..sources.nnsight import shippable
from .client import NdifClient, PreparedRequest
from .failures import JobTooLong
from .traces import submit

# Seconds that a request may take where the operator's limit is not known; where it is, a quarter of the limit at most.
SECONDS_PER_REQUEST = 10.0
# Batches that a request holds at most, a power of two.
MOST_BATCHES = 64


class RequestSchedule:
    """Chooses the number of batches per request, from a limit of positions or from the measured time of a batch.

    Args:
        most_tokens: maximum number of positions in a request; None to choose the number of batches by time.

    Attributes:
        most_batches: maximum number of batches in a request; it is lowered if the server ends a job because of its time limit.
        lowered: number of times that `most_batches` was lowered.
        largest_completed: number of batches in the largest completed request.
    """

    def __init__(self, most_tokens: int | None) -> None:
        self.most_tokens, self.most_batches, self.lowered = most_tokens, MOST_BATCHES, 0
        self.largest_completed = 0
        self._seconds_per_batch: float | None = None

    def refuse_larger(self, rows: int, positions: int) -> None:
        """Raise an error if a forward pass exceeds `tokens_per_request`."""
        if self.most_tokens is not None and positions > self.most_tokens:
            width = positions // rows
            fits = self.most_tokens // width
            raise LayersimError(
                f"`tokens_per_request` is {self.most_tokens}, smaller than one forward pass, {rows} rows of {width} tokens; "
                f"it must be at least {positions}{f', or use batch_size={fits}' if fits else ''}."
            )

    def groups(
        self,
        batches: Iterator[Batch],
        start: int,
        most_tokens: int | None,
        affordable: Callable[[], int],
        first_block: int | None = None,
    ) -> Iterator[list[Batch]]:
        """Group batches into requests: each takes all remaining batches, or 2^k of them.

        Args:
            batches: the batches, in order.
            start: number of rows before these batches.
            most_tokens: maximum number of positions in a request; None for no limit.
            affordable: function that returns the maximum number of batches by time.
            first_block: number of rows in the first block of the data; None if the run keeps no blocks. A request holds at most
                one block, or a single batch.
        """
        ahead: deque[Batch] = deque(itertools.islice(batches, 1))
        rows = max(1, ahead[0].capacity) if ahead else 1
        index = start // rows
        while True:
            most = affordable()
            if first_block is not None:
                most = max(1, min(most, rows_in_block(index * rows, first_block) // rows))
            size = next_size(index, most)
            while len(ahead) < size and (batch := next(batches, None)) is not None:
                ahead.append(batch)
            if not ahead:
                return
            for batch in ahead:
                self.refuse_larger(*batch.pass_size)
            taken, total = 0, 0
            for batch in list(ahead)[:size]:
                total += batch.tokens.numel()
                if taken and most_tokens is not None and total > most_tokens:
                    break
                taken += 1
            if taken < len(ahead):
                taken = 1 << (taken.bit_length() - 1)
            yield [ahead.popleft() for _ in range(taken)]
            index += taken

    def affordable(self, job_limit: float | None) -> int:
        """The maximum number of batches in the next request.

        Args:
            job_limit: the operator's time limit for a job in seconds; None if unknown.
        """
        if self.most_tokens is not None:
            return self.most_batches
        if self._seconds_per_batch is None:
            return 1
        seconds = SECONDS_PER_REQUEST if job_limit is None else min(SECONDS_PER_REQUEST, job_limit / 4)
        return max(1, min(self.most_batches, int(seconds / self._seconds_per_batch)))

    def measure(self, seconds: float, count: int) -> None:
        """Record the time of a completed job with this number of batches."""
        self._seconds_per_batch = max(seconds, 1e-3) / count
        self.largest_completed = max(self.largest_completed, count)

    def lower(self, most_batches: int) -> None:
        """Limit later requests to this number of batches, after a job took too long."""
        if most_batches < self.most_batches:
            self.most_batches, self.lowered = most_batches, self.lowered + 1


# Levels of Zstandard at which nnsight packs requests and NDIF packs results.
REQUEST_LEVEL, RESULT_LEVEL = 6, 3


def packed_request(kernels: Mapping[str, AnyKernel]) -> int:
    """Size in bytes of the fixed part of a request: the source of the kernels and their values.

    Args:
        kernels: kernels of the data pass, by name.
    """
    import nnsight
    from nnsight.intervention.serialization import dumps

    nnsight.register("tl_layersim")
    return _packed(dumps((submit, shippable(kernels))), REQUEST_LEVEL)


def packed_result(sites: Sequence[str], sums: Mapping[str, Sums]) -> int:
    """Size in bytes of the result of a request.

    Args:
        sites: the sites that are read.
        sums: sums by kernel.
    """
    buffer = io.BytesIO()
    counts = [torch.zeros((), dtype=torch.int64) for _ in sites]
    torch.save({"found": [(0, (counts, {name: dict(one.fields) for name, one in sums.items()}))]}, buffer)
    return _packed(buffer.getvalue(), RESULT_LEVEL)


def _packed(data: bytes, level: int) -> int:
    import zstandard

    return len(zstandard.ZstdCompressor(level=level).compress(data))


# Number of requests of one run that are queued or running on the server at once.
MOST_ON_SERVER = 2


@dataclass
class PlannedRequest:
    """The batches of a request, the prepared request, and the error of reading or preparing it."""

    batches: list[Batch]
    request: PreparedRequest | None = None
    failure: Exception | None = None


class RequestPipeline:
    """Runs requests on a server and yields their results in the order of the data.

    While a request runs, the next one is prepared. It is also sent, unless its size is new (two jobs would be lost if one
    exceeds the server's time limit) or requests of other users wait in the queue.

    Args:
        ndif: the client.
        schedule: chooses the number of batches in a request.
        prepare: traces and serialises the request for a group of batches.
        halve: splits a group in two, if its job exceeded the server's time limit or the group is now too large.
    """

    def __init__(
        self,
        ndif: NdifClient,
        schedule: RequestSchedule,
        prepare: Callable[[list[Batch]], PreparedRequest],
        halve: Callable[[list[Batch], JobTooLong | None], tuple[list[Batch], list[Batch]]],
    ) -> None:
        self._ndif, self._schedule, self._prepare, self._halve = ndif, schedule, prepare, halve
        self._planned: deque[PlannedRequest] = deque()

    def results(self, groups: Iterator[list[Batch]]) -> Generator[tuple[list[Batch], Any], None, None]:
        """Run groups of batches, and yield each group, or its halves, with the result of its request.

        An error in reading or preparing a group is raised after the results of earlier groups.
        """
        try:
            while True:
                self._fill(groups)
                if not self._planned:
                    return
                first = self._planned[0]
                if first.failure is not None:
                    raise first.failure
                assert first.request is not None
                try:
                    result = self._ndif.finish(first.request)
                except JobTooLong as error:
                    self._split(0, error)
                    continue
                self._planned.popleft()
                yield first.batches, result
        finally:
            for planned in self._planned:
                if planned.request is not None:
                    planned.request.abandon()

    def _fill(self, groups: Iterator[list[Batch]]) -> None:
        """Send the first request, and prepare or send the next ones."""
        for place in range(MOST_ON_SERVER):
            if place == len(self._planned):
                self._plan_next(groups)
            if place == len(self._planned) or self._planned[place].failure is not None:
                return
            planned = self._planned[place]
            if planned.request is not None and planned.request.is_sent:
                continue
            while len(self._planned[place].batches) > self._schedule.most_batches:
                self._split(place, None)
            planned = self._planned[place]
            try:
                planned.request = planned.request or self._prepare(planned.batches)
            except Exception as error:
                planned.failure = error
                return
            if place == 0 or self._may_follow(planned, self._planned[place - 1]):
                self._ndif.send(planned.request)

    def _plan_next(self, groups: Iterator[list[Batch]]) -> None:
        try:
            self._planned += [PlannedRequest(group) for group in [next(groups, None)] if group is not None]
        except Exception as error:
            self._planned.append(PlannedRequest([], failure=error))

    def _may_follow(self, planned: PlannedRequest, before: PlannedRequest) -> bool:
        """Whether a request may be sent before the previous one has completed."""
        assert before.request is not None
        known = len(planned.batches) <= self._schedule.largest_completed
        return known and before.request.is_sent and before.request.queue_position == 1

    def _split(self, place: int, error: JobTooLong | None) -> None:
        """Replace a planned request by two smaller ones."""
        halves = self._halve(self._planned[place].batches, error)
        del self._planned[place]
        for half in reversed(halves):
            self._planned.insert(place, PlannedRequest(half))
