"""Memory that the sums of a run take, checked with the sums of its first batch."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping

import psutil
from tqdm.auto import tqdm

from ..analyzers import Analyzer
from ..core.blocks import MOST_BLOCKS
from ..core.errors import LayersimError, in_words, warn
from ..core.sum_tree import most_nodes
from ..core.sums import Sums, analyzer_of

# Bytes of all blocks above which their size is printed.
LARGE_BLOCKS = 1e9
# Copies of the sums that are held beside the nodes of the tree while two nodes are added.
ADDED = 2


def refuse_large_blocks(sums: Mapping[str, Sums]) -> None:
    """Refuse intervals whose blocks do not fit into memory; announce large ones.

    Args:
        sums: of one batch, by analyzer.

    Raises:
        LayersimError: names the analyzer with the largest sums.
    """
    free = float(psutil.virtual_memory().available)
    sizes = _bytes_of(sums)
    need = MOST_BLOCKS * sum(sizes.values())
    if need > free / 2:
        largest = max(sizes, key=lambda name: sizes[name])
        raise LayersimError(
            f"`intervals` keeps the sums of up to {MOST_BLOCKS} blocks, which take {in_words(need)}, and {in_words(free)} are "
            f"free. Measure {largest!r}, whose sums are the largest, without `intervals`, or read fewer sites with `at`."
        )
    if need > LARGE_BLOCKS:
        tqdm.write(f"Intervals keep the sums of up to {MOST_BLOCKS} blocks of the data: {in_words(need)}.", file=sys.stderr)


def refuse_sums_over_limits(sums: Mapping[str, Sums], analyzers: Mapping[str, Analyzer], leaves: int, intervals: bool) -> None:
    """Refuse sums of an analyzer that need more memory than its `max_memory_gb`, all copies that a run holds included.

    Args:
        sums: of one batch, by kernel.
        analyzers: by name.
        leaves: number of groups of rows whose sums are added, or an upper limit.
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
                f"`max_memory_gb` is {limit:g}, and the sums of {name!r} need {need:.2g} GB ({copies} copies). Read fewer "
                "sites with `at`."
            )


def warn_of_large_sums(sums: Mapping[str, Sums], batches: int) -> None:
    """Warn where the sums of a run may not fit into memory: they are added in pairs, so several of them are held at once.

    Args:
        sums: of one batch, by analyzer.
        batches: number of batches, or an upper limit.
    """
    sizes = _bytes_of(sums)
    copies = most_nodes(batches, False) + ADDED
    free = float(psutil.virtual_memory().available)
    if copies * sum(sizes.values()) > free:
        largest = max(sizes, key=lambda name: sizes[name])
        warn(
            f"The sums of this run may not fit into memory: {in_words(sum(sizes.values()))}, held up to {copies} times, and "
            f"{in_words(free)} are free. Most of them are those of {largest!r}. Read fewer sites with at=[...]."
        )


def _bytes_of(sums: Mapping[str, Sums]) -> dict[str, int]:
    """Bytes of the sums of each analyzer."""
    return {name: sum(value.nbytes for value in own.fields.values()) for name, own in sums.items()}
