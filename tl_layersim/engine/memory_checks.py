"""Memory for the sums of a run, and a line on memory and time if the run takes more than a minute."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import psutil
from tqdm.auto import tqdm

from ..analyzers import Analyzer
from ..core.distributed import rank_and_size
from ..core.errors import LayersimError, in_words, warn
from ..core.sums import MOST_BLOCKS, Sums, Tally, analyzer_of, most_nodes
from ..core.wording import duration_in_words
from ..data.data import Data
from ..sources.source import Source

# Bytes of all blocks above which their size is printed.
LARGE_BLOCKS = 1e9
# Copies of the sums that are held beside the nodes of the tree while two nodes are added.
ADDED = 2


def refuse_large_blocks(sums: Mapping[str, Sums]) -> None:
    """Raise an error if the blocks for intervals do not fit into memory; print their size if it is large.

    Args:
        sums: sums of one batch, by analyzer.

    Raises:
        LayersimError: names the analyzer with the largest sums.
    """
    free = float(psutil.virtual_memory().available)
    sizes = _bytes_of(sums)
    need = MOST_BLOCKS * sum(sizes.values())
    if need > free / 2:
        largest = max(sizes, key=lambda name: sizes[name])
        raise LayersimError(
            f"`intervals` keeps the sums of up to {MOST_BLOCKS} blocks, which take {in_words(need)}, but only {in_words(free)} "
            f"are free. Measure {largest!r}, whose sums are the largest, without `intervals`, or read fewer sites with `at`."
        )
    if need > LARGE_BLOCKS:
        tqdm.write(f"Intervals keep the sums of up to {MOST_BLOCKS} blocks of the data: {in_words(need)}.", file=sys.stderr)


def refuse_sums_over_limits(sums: Mapping[str, Sums], analyzers: Mapping[str, Analyzer], leaves: int, intervals: bool) -> None:
    """Raise an error if an analyzer's sums, with all copies that a run holds, need more than its `max_memory_gb`.

    Args:
        sums: sums of one batch, by kernel.
        analyzers: the analyzers, by name.
        leaves: number of groups of rows (leaves) whose sums are added, or an upper limit.
        intervals: whether blocks are kept.

    Raises:
        LayersimError: names the analyzer, its need and its limit.
    """
    copies, needs = most_nodes(max(leaves, 1), intervals) + ADDED, dict.fromkeys(analyzers, 0.0)
    for name, size in _bytes_of(sums).items():
        needs[analyzer_of(name)] += copies * size / 1e9
    for name, need in needs.items():
        limit = getattr(analyzers[name], "max_memory_gb", math.inf)
        if need > limit:
            raise LayersimError(
                f"`max_memory_gb` is {limit:g}, but the sums of {name!r} need {need:.2g} GB ({copies} copies). Read fewer "
                "sites with `at`."
            )


def warn_of_large_sums(sums: Mapping[str, Sums], batches: int) -> None:
    """Warn if the sums of a run may not fit into memory. Sums are added in pairs, so several copies are held at once.

    Args:
        sums: sums of one batch, by analyzer.
        batches: number of batches, or an upper limit.
    """
    sizes = _bytes_of(sums)
    copies = most_nodes(batches, False) + ADDED
    free = float(psutil.virtual_memory().available)
    if copies * sum(sizes.values()) > free:
        largest = max(sizes, key=lambda name: sizes[name])
        warn(
            f"The sums of this run may not fit into memory: {in_words(sum(sizes.values()))}, held up to {copies} times, but "
            f"only {in_words(free)} are free. {largest!r} has the largest sums. Read fewer sites with at=[...]."
        )


def _bytes_of(sums: Mapping[str, Sums]) -> dict[str, int]:
    """Bytes of the sums of each analyzer."""
    return {name: sum(value.nbytes for value in own.fields.values()) for name, own in sums.items()}


# Seconds from which on a run is announced.
LONG = 60.0
# Least seconds of a window in which speed is measured. A run becomes faster while requests grow from one
# batch; it is announced when a window is faster than the one before it by no more than this factor.
SHORTEST_WINDOW = 2.0
FASTER = 1.1


class LongRunNotice:
    """Prints the expected time of a pass once if it is long, after its speed has stopped rising.

    Speed is measured after the first batch, which warms up.

    Args:
        total: number of tokens in the data, or an upper limit; None if not known.
        rows: number of rows in the data, to estimate `total` from the first rows; None if not known. Nothing is printed if both
            are None.
        sources: the models.
        clock: function that returns seconds, for tests.

    Examples:
        >>> seconds = iter([0.0, 4.0, 8.0])
        >>> notice = LongRunNotice(100_000, None, [], lambda: next(seconds))
        >>> [notice.words(Tally(tokens=tokens)) for tokens in (1000, 2000, 3000)]
        ['', '', 'This pass takes up to 7 minutes for 100,000 tokens (250 tokens/s).']
    """

    def __init__(
        self,
        total: int | None,
        rows: int | None,
        sources: Sequence[Source],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.rows, self.sources, self.clock = total, rows, sources, clock
        self._start: float | None = None
        self._window, self._speed = (0.0, 0), 0.0
        self._ended = (total is None and rows is None) or rank_and_size()[0] != 0

    def note(self, tally: Tally) -> None:
        """Print the line if it is due.

        Args:
            tally: tally of the pass so far.
        """
        if words := self.words(tally):
            tqdm.write(words, file=sys.stderr)

    def words(self, tally: Tally) -> str:
        """The line; "" if it is not due, if the time is not known, or if the run is short.

        Args:
            tally: tally of the pass so far.
        """
        if self._ended:
            return ""
        now = self.clock()
        if self._start is None:
            self._start = now
        if now == self._start:
            self._window = (now, tally.tokens)
            return ""
        before, tokens = self._window
        if now - before < SHORTEST_WINDOW or tally.tokens == tokens:
            return ""
        last, self._speed = self._speed, (tally.tokens - tokens) / (now - before)
        self._window = (now, tally.tokens)
        if self._speed > FASTER * last:
            return ""
        self._ended = True
        speed = self._speed
        # Rows that are not read yet are taken to be as long as those that are.
        by_rows = tally.tokens if self.rows is None else round(tally.tokens * self.rows / max(1, tally.sequences))
        total = by_rows if self.total is None else self.total if self.rows is None else min(self.total, by_rows)
        seconds = total / speed
        if seconds < LONG:
            return ""
        # Without the number of rows, the total may be a limit that the data does not reach.
        about = "up to" if self.rows is None else "about"
        line = f"This pass takes {about} {duration_in_words(seconds)} for {total:,} tokens ({speed:,.0f} tokens/s)."
        held = self._memory(tally)
        return f"{line} It holds {held}." if held else line

    def _memory(self, tally: Tally) -> str:
        """Memory for the sums, and for the sites of an average batch."""
        kept = (sums for node in tally.tree.nodes for sums in node.sums.values())
        size = sum(value.nbytes for sums in kept for value in sums.fields.values())
        widths = [max(source.widths, default=0) or source.model.d_model or 0 for source in self.sources]
        samples = tally.tokens / max(1, tally.batches)
        read = sum(4 * len(source.sites) * samples * width for source, width in zip(self.sources, widths, strict=True))
        parts = ([f"{in_words(size)} of sums"] if size else []) + ([f"{in_words(read)} of sites"] if read else [])
        return " and ".join(parts)


def rows_in_data(data: Data) -> int | None:
    """Number of rows in data that has a length; None for other data, or if rows are joined.

    Args:
        data: the data of the run.

    Examples:
        >>> rows_in_data(Data(["one", "two"])), rows_in_data(Data({"input_ids": [[1], [2], [3]]}))
        (2, 3)
    """
    source = data.source
    if isinstance(source, Mapping):
        source = next(iter(source.values()), None)
    try:
        return None if data.pack else len(source)
    except (TypeError, RuntimeError):
        # Generators, and tensors without axes.
        return None
