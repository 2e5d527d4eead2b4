"""Results without each block of the data, from which their intervals are computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import NamedTuple

import torch
from tqdm.auto import tqdm

from ..analyzers.base import Analyzer, Run
from ..core.blocks import DataBlock
from ..core.errors import LayersimError, recorded_warnings, warn
from ..core.intervals import aligned, bounds_of, with_and_without_blocks, with_replicates
from ..core.jackknife import leave_one_out, neighbour_correlation
from ..core.results import Result
from ..core.sums import Sums, with_pools

# Below this number of blocks a warning is given: a standard error from few blocks is itself uncertain.
FEW_BLOCKS = 16
# Above this correlation of neighbouring blocks a warning is given; 3 to 4 of 100 independent data sets of 16 blocks reach it.
MOST_CORRELATION = 0.4


class SumsOfBlock(NamedTuple):
    """The sums of one analyzer over a block of the data.

    Attributes:
        tokens: number of its counted positions.
        sums: of the analyzer.
    """

    tokens: int
    sums: Sums


def blocks_of(blocks: Sequence[DataBlock], name: str) -> list[SumsOfBlock]:
    """The blocks in which an analyzer has sums: those over a pool of rows stand in the block of its last row.

    Args:
        blocks: of the main pass.
        name: of the analyzer.
    """
    own, tokens = list[SumsOfBlock](), 0
    for block in blocks:
        tokens += block.tokens
        if sums := with_pools(block.sums, name):
            own.append(SumsOfBlock(tokens, sums))
            tokens = 0
    return own


def replicated(result: Result, analyzer: Analyzer, run: Run, name: str, blocks: Sequence[SumsOfBlock]) -> Result:
    """A result with the results without each block.

    The sums of a first pass are held fixed: the kernel of the main pass was made of them.

    Args:
        result: of all data.
        analyzer: that computed it.
        run: as it was given to `compute`.
        name: of the analyzer.
        blocks: in which the analyzer has sums.
    """
    tokens = tuple(block.tokens for block in blocks)
    if len(blocks) < 2:
        return with_replicates(result, (), tokens)
    replicates = []
    try:
        # What is said of all data need not be said again of each part.
        with recorded_warnings(issued=False):
            rests = leave_one_out([block.sums for block in blocks], Sums.__add__)
            # Shown only for results that take long, such as those with many decompositions.
            for rest in tqdm(rests, desc=f"intervals of {name}", total=len(blocks), delay=2, leave=False, disable=None):
                replicates.append(analyzer.compute(rest, run))
            if len(run.models) > 1:
                halves = (reduce(Sums.__add__, (block.sums for block in blocks[start::2])) for start in (0, 1))
                result = result.with_halves(*(analyzer.compute(half, run) for half in halves))
    except (LayersimError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]  # not among torch's exports
        # The result of all data is not lost with that of a part of it.
        warn(
            f"{name!r} has no intervals, because it is not defined on the data without one of its {len(blocks)} blocks: {error}"
        )
        return result
    return with_replicates(result, tuple(replicates), tokens)


def warn_of_drift(results: Mapping[str, Result]) -> dict[str, str]:
    """Warn once of data in which neighbouring blocks are alike; return the warning by analyzer.

    Args:
        results: with their replicates, by name of the analyzer.
    """
    found = {name: value for name, result in results.items() if (value := drift_of(result)) > MOST_CORRELATION}
    if not found:
        return {}
    text = (
        f"Neighbouring blocks of the data are alike in {', '.join(map(repr, found))}, with a correlation of "
        f"{max(found.values()):.2f} where independent ones have about 0: intervals are too narrow. Draw the texts at random "
        "from their whole source, or pass more."
    )
    warn(text)
    return dict.fromkeys(found, text)


def drift_of(result: Result) -> float:
    """The mean of `neighbour_correlation` over all numbers of a result that have an interval; NaN without blocks.

    Args:
        result: any.
    """
    each = []
    for field, within in bounds_of(result).items() if len(result.replicates) >= FEW_BLOCKS else ():
        if within is not None:
            replicates = with_and_without_blocks(result, partial(aligned, result=result, field=field))[1]
            each.append(neighbour_correlation(replicates).flatten())
    return float(torch.cat(each).nanmean()) if each else math.nan


def warn_of_few(blocks: Mapping[str, Sequence[SumsOfBlock]]) -> dict[str, str]:
    """Warn once of the analyzers whose intervals rest on few blocks; return the warning by analyzer.

    Args:
        blocks: of the main pass, by analyzer.
    """
    few = {name: len(own) for name, own in blocks.items() if len(own) < FEW_BLOCKS}
    if not few:
        return {}
    fewest = min(few.values())
    words = f"{fewest} block{'s' * (fewest > 1)} of rows"
    text = (
        f"Intervals of {', '.join(map(repr, few))} rest on {words}{', so there are none' if fewest < 2 else ' only'}; "
        f"{FEW_BLOCKS} or more are good: pass more rows, for packed text a smaller seq_len, or in attach fewer rows in a "
        "forward pass. A block of CKA and of other measures over pairs of samples has 16 rows at least, and minibatch= samples."
    )
    warn(text)
    return dict.fromkeys(few, text)
