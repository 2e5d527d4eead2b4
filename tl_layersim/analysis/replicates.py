"""Results without each block of the data, from which their intervals are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tqdm.auto import tqdm

from ..analyzers.base import Analyzer, Run
from ..core.blocks import DataBlock
from ..core.errors import LayersimError, recorded_warnings, warn
from ..core.intervals import with_replicates
from ..core.jackknife import leave_one_out
from ..core.results import Result
from ..core.sums import Sums

# Below this number of blocks a warning is given: a standard error from few blocks is itself uncertain.
FEW_BLOCKS = 16


def replicated(result: Result, analyzer: Analyzer, run: Run, name: str, blocks: Sequence[DataBlock]) -> Result:
    """A result with the results without each block.

    The sums of a first pass are held fixed: the kernel of the main pass was made of them.

    Args:
        result: of all data.
        analyzer: that computed it.
        run: as it was given to `compute`.
        name: of the analyzer.
        blocks: of the main pass.
    """
    tokens = tuple(block.tokens for block in blocks)
    if len(blocks) < 2:
        return with_replicates(result, (), tokens)
    replicates = []
    try:
        # What is said of all data need not be said again of each part.
        with recorded_warnings(issued=False):
            rests = leave_one_out([block.sums[name] for block in blocks], Sums.__add__)
            # Shown only for results that take long, such as those with many decompositions.
            for rest in tqdm(rests, desc=f"intervals of {name}", total=len(blocks), delay=2, leave=False, disable=None):
                replicates.append(analyzer.compute(rest, run))
    except (LayersimError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]  # not among torch's exports
        # The result of all data is not lost with that of a part of it.
        why = f"{error.what} Given: {error.given}." if isinstance(error, LayersimError) else str(error)
        warn(f"{name!r} has no intervals, because it is not defined on the data without one of its {len(blocks)} blocks: {why}")
        return result
    return with_replicates(result, tuple(replicates), tokens)


def warn_of_few(blocks: Mapping[str, Sequence[DataBlock]]) -> dict[str, str]:
    """Warn once of the analyzers whose intervals rest on few blocks; return the warning by analyzer.

    Args:
        blocks: of the main pass, by analyzer.
    """
    few = {name: len(own) for name, own in blocks.items() if len(own) < FEW_BLOCKS}
    if not few:
        return {}
    fewest = min(few.values())
    words = f"{fewest} block{'s' * (fewest > 1)} of batches"
    text = (
        f"Intervals of {', '.join(map(repr, few))} rest on {words}{', so there are none' if fewest < 2 else ' only'}; "
        f"{FEW_BLOCKS} or more are good. A block has one batch at least: pass more rows, a smaller batch_size, or, for packed "
        "text, a smaller seq_len."
    )
    warn(text)
    return dict.fromkeys(few, text)
