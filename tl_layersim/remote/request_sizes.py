"""Scheduling: how many batches each request to a server contains."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator

from ..core.blocks import rows_in_block
from ..core.errors import LayersimError
from ..core.pairwise_summation import next_size
from ..data.batches import Batch

# Seconds that a request may take where the operator's limit is not known; where it is, a quarter of the limit at most.
SECONDS_PER_REQUEST = 10.0
# Batches that a request holds at most, a power of two.
MOST_BATCHES = 64


class RequestSchedule:
    """The number of batches per request, limited by positions, or by the measured time of a batch.

    Args:
        most_tokens: number of positions that a request may hold; None to choose the number of batches by time.

    Attributes:
        most_batches: number of batches that a request may hold; it is lowered where the server ends a job for its time.
        lowered: how often it was lowered.
        largest_completed: number of batches of the largest request that was completed.
    """

    def __init__(self, most_tokens: int | None) -> None:
        self.most_tokens, self.most_batches, self.lowered = most_tokens, MOST_BATCHES, 0
        self.largest_completed = 0
        self._seconds_per_batch: float | None = None

    def refuse_larger(self, rows: int, positions: int) -> None:
        """Refuse a forward pass that exceeds `tokens_per_request`, before anything is sent."""
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
        """Group batches into requests: all remaining batches, or a power of two of them, at least one.

        Args:
            batches: in order.
            start: number of rows before these.
            most_tokens: number of positions that a request may hold; None for any number.
            affordable: gives the number of batches that a request may take by time.
            first_block: number of rows in the first block of the data, of which a request carries one or a part of one, or a
                single batch; None where the run keeps no blocks.
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
        """The number of batches that the next request may take.

        Args:
            job_limit: seconds that the operator allows for a job, None where this is not known.
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
        """Limit later requests to this number of batches, after a job that took too long."""
        if most_batches < self.most_batches:
            self.most_batches, self.lowered = most_batches, self.lowered + 1
