"""Pipeline of requests: while a server runs one request, the next one is prepared or waits in the server's queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from ..data.batches import Batch
from .client import NdifClient
from .failures import JobTooLong
from .prepared_request import PreparedRequest
from .request_sizes import RequestSchedule

# Number of requests of one run that are queued or running on the server at once.
MOST_ON_SERVER = 2


@dataclass
class PlannedRequest:
    """Batches of a request, the request once it is prepared, and the error that reading or preparing it raised."""

    batches: list[Batch]
    request: PreparedRequest | None = None
    failure: Exception | None = None


class RequestPipeline:
    """Runs requests on a server and gives their results in the order of the data.

    The request after the one that runs is prepared meanwhile. It is also sent, unless its size is new, so that two jobs are not
    lost where one exceeds the server's time limit, or requests of other users wait in the queue.

    Args:
        ndif: the client.
        schedule: the number of batches that a request may hold.
        prepare: traces and serialises the request for a group of batches.
        halve: gives the two groups that replace a group whose job exceeded the server's time limit, or that is too large now.
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
        """Run groups of batches, and yield each group, or the halves of it, with the result of its request.

        An error in reading or preparing a group is raised after the results of the groups before it.
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
        """Send the first request, and prepare or send those after it."""
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
        """Whether a request may wait in the server's queue while the request before it is not complete."""
        assert before.request is not None
        known = len(planned.batches) <= self._schedule.largest_completed
        return known and before.request.is_sent and before.request.queue_position == 1

    def _split(self, place: int, error: JobTooLong | None) -> None:
        """Replace a planned request by two."""
        halves = self._halve(self._planned[place].batches, error)
        del self._planned[place]
        for half in reversed(halves):
            self._planned.insert(place, PlannedRequest(half))
