"""A run in this process: its checkpoint and its report, over all ranks of the process group."""

from __future__ import annotations

import os
from dataclasses import replace

from ..core.distributed import add_blocks_over_ranks, add_over_ranks, agree, weight_peers
from ..core.results import Report
from ..models.source import HasModule
from .checkpoint import open_checkpoint
from .engine import Analysis, DataPart, run
from .report_assembly import make_report
from .submitted_run import RemoteRun, start


def run_analysis(analysis: Analysis, path: str | os.PathLike[str] | None = None, blocking: bool = True) -> Report | RemoteRun:
    """Run analyzers over all data on one model, or on several to compare.

    Args:
        analysis: models, data and analyzers.
        path: of the checkpoint, or None.
        blocking: False to send the main pass to a server and return at once.

    Raises:
        LayersimError: an analyzer refuses a model or the data, or the data differs from that of the checkpoint.
    """
    analysis.check()
    deal = agree([weight_peers(one.module) if isinstance(one, HasModule) else frozenset() for one in analysis.sources])
    identity = {} if path is None else analysis.identity("checkpoint")
    file, tallies = open_checkpoint(path, identity, deal)
    _read_ahead(analysis)
    done = run(analysis, DataPart(deal), file, tallies, blocking)
    if not blocking:
        with analysis.running():
            return start(done)
    tally = done.state.tally
    seconds = sum(own.seconds for own in tallies.values())
    places = analysis.places
    settings = analysis.settings | analysis.batches.row_counts() | ({"remote": places} if places else {})
    return make_report(
        analysis.analyzers,
        analysis.models,
        replace(tally, seconds=seconds),
        add_over_ranks(tally.sums(done.kernels), deal),
        done.first,
        settings,
        None if tally.tree.size is None else add_blocks_over_ranks(tally.tree, done.kernels, deal),
    )


def _read_ahead(analysis: Analysis) -> None:
    """Read and keep the rows of an iterator that the run needs more than once.

    Raises:
        LayersimError: its rows are too large to be kept.
    """
    if not analysis.batches.one_shot:
        return
    for name in analysis.first_kernels:
        analyzer = analysis.analyzers[name]
        do = "list(data)" + (f", or {analyzer.one_pass}" if analyzer.one_pass else "")
        return analysis.batches.read_ahead(type(analyzer).__name__, do)
    if len(analysis.sources) > 1 and analysis.is_remote:
        # What crosses between models is stated before it does.
        analysis.batches.read_ahead("a comparison with a model on a server", "list(data)")
