"""One run of analyzers over data: what is checked before it, its checkpoint, its passes and its report."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from tqdm.auto import tqdm

from ..analyzers.base import Analyzer, code_digest
from ..core.blocks import MOST_BLOCKS, first_block_size
from ..core.data_pass_progress import Tally
from ..core.distributed import add_blocks_over_ranks, add_over_ranks, agree
from ..core.errors import LayersimError
from ..core.results import Report
from ..core.sums import Sums
from ..core.wording import duration_in_words
from ..data.batches import Batches, BatchSize, batch_sizes
from ..models.source import Source
from ..models.view import Kernel
from ..remote.open import on_server
from .checkpoint import open_checkpoint
from .cross_model_statistics import crossing
from .data_pass import DataPass
from .report_assembly import make_report, refuse_empty
from .site_plan import SitePlan
from .submitted_run import RemoteRun, start
from .validation import refuse_large_heads


def run_analysis(
    sources: list[Source],
    batches: Batches,
    analyzers: dict[str, Analyzer],
    path: str | os.PathLike[str] | None,
    opened_with: dict[str, Any],
    plan: SitePlan,
    blocking: bool = True,
    intervals: bool = False,
) -> Report | RemoteRun:
    """Run analyzers over the batches on one model, or on several to compare.

    Args:
        sources: the models.
        batches: the data.
        analyzers: by name.
        path: of the checkpoint, or None.
        opened_with: options with which the models were opened, for the record.
        plan: the sites that each analyzer reads.
        blocking: False to send the main pass to a server and return at once.
        intervals: keep the sums of blocks of the data, for confidence intervals.

    Raises:
        LayersimError: an analyzer refuses a model or the data, or the data differs from that of the checkpoint.
    """
    batches = in_pools(batches, analyzers)
    settings = batches.record() | opened_with | plan.record() | ({"intervals": True} if intervals else {})
    first_kernels = first_kernels_of(analyzers, plan)
    check_arguments(sources, batches, analyzers, plan, intervals)
    deal = agree([source.peers() for source in sources])
    identity = {} if path is None else identity_of(sources, analyzers, settings, "checkpoint")
    checkpoint, tallies = open_checkpoint(path, identity, deal)
    _read_ahead(sources, batches, {name: analyzers[name] for name in first_kernels})
    sizes = _known_sizes(sources, batches)
    total = announce(sources, batches, analyzers, plan, len(first_kernels) > 0, sizes)
    # In this process blocks need not be chosen before.
    rows = None if sizes is None else sum(size.rows for size in sizes)
    first_block = first_block_size(rows) if intervals else None
    with ExitStack() as stack:
        for source in sources:
            stack.enter_context(source.evaluating())
            if any(analyzer.needs_calls for analyzer in analyzers.values()):
                stack.enter_context(source.with_calls())
        first: dict[str, Sums] = {}
        if first_kernels:
            with_first = {name: analyzers[name] for name in first_kernels}
            # Counting tokens or labels needs no model.
            models = [] if all(analyzer.first_without_model for analyzer in with_first.values()) else sources
            DataPass("first", models, batches, with_first, first_kernels, tallies, checkpoint, plan, total, deal).run()
            first = add_over_ranks(tallies["first"].sums(first_kernels), deal)
            if not any(first.values()):
                refuse_empty(tallies["first"])
        kernels = plan.kernels(analyzers, first)
        if not blocking:
            digest = tallies["first"].digest if first_kernels else ""
            return start(on_server(sources[0]), batches, analyzers, kernels, first, settings, plan, digest)
        DataPass("main", sources, batches, analyzers, kernels, tallies, checkpoint, plan, total, deal, first_block).run()
    tally = tallies["main"]
    if first_kernels:
        refuse_other_rows(tallies["first"], tally)
        tally = replace(tally, seconds=tally.seconds + tallies["first"].seconds)
    settings = settings | batches.row_counts()
    places = [record for source in sources if (record := source.record())]
    if places:
        settings = settings | {"remote": places}
    # A source may know more of its model after a forward pass.
    read = plan.models_by_analyzer([source.model for source in sources], sources)
    about = (analyzers, read, tally, add_over_ranks(tally.sums(kernels), deal), first, settings)
    if tally.tree.size is None:
        return make_report(*about)
    return make_report(*about, add_blocks_over_ranks(tally.tree, kernels, deal))


def in_pools(batches: Batches, analyzers: Mapping[str, Analyzer]) -> Batches:
    """The batches of a run, which hold whole pools of rows."""
    return replace(batches, pool_rows=lambda density: max((one.pool_need(density) for one in analyzers.values()), default=0))


def first_kernels_of(analyzers: Mapping[str, Analyzer], plan: SitePlan) -> dict[str, Kernel]:
    """The kernels of the first pass, by analyzer; empty if no analyzer needs one."""
    return {
        name: kernel if analyzer.first_without_model else plan.kernel(name, kernel)
        for name, analyzer in analyzers.items()
        if (kernel := analyzer.first_kernel()) is not None
    }


def check_arguments(
    sources: list[Source], batches: Batches, analyzers: Mapping[str, Analyzer], plan: SitePlan, intervals: bool
) -> None:
    """Refuse models and options that an analyzer cannot work with, and print the cost of expensive analyzers."""
    models = plan.models_by_analyzer([source.model for source in sources], sources)
    for name, analyzer in analyzers.items():
        analyzer.check_sites(*models[name])
        analyzer.check(*models[name])
        if any(source.is_remote for source in sources):
            refuse_large_heads(analyzer)
        if analyzer.prompts and batches.data.pack:
            raise LayersimError(
                f"`pack` is True; it must be False for {type(analyzer).__name__}, which takes each row for a prompt."
            )
    for name, analyzer in analyzers.items():
        if cost := analyzer.cost(models[name][0]):
            tqdm.write(cost, file=sys.stderr)
        # A call for all data and for the data without each block.
        seconds = (1 + MOST_BLOCKS) * analyzer.compute_seconds(models[name][0])
        if intervals and seconds >= 10:
            words = f"it computes its result up to {1 + MOST_BLOCKS} times, about {duration_in_words(seconds)} on one core."
            tqdm.write(f"With intervals, {type(analyzer).__name__} takes longer: {words}", file=sys.stderr)


def identity_of(
    sources: list[Source], analyzers: Mapping[str, Analyzer], settings: Mapping[str, Any], argument: str
) -> dict[str, Any]:
    """Models, analyzers, data options and version, which must be equal for a call that resumes the file of `argument`."""
    return {
        "models": [source.model.identity(argument) for source in sources],
        "sites": [list(source.sites) for source in sources],
        "analyzers": {
            name: (f"{type(analyzer).__module__}.{type(analyzer).__qualname__}", analyzer.options())
            for name, analyzer in analyzers.items()
        },
        "code": {name: code_digest(analyzer) for name, analyzer in analyzers.items()},
        "data": settings,
        "version": version("tl_layersim"),
    }


def _read_ahead(sources: list[Source], batches: Batches, with_first: Mapping[str, Analyzer]) -> None:
    """Read and keep the rows of an iterator that the run needs more than once.

    Raises:
        LayersimError: its rows are too large to be kept.
    """
    if not batches.one_shot:
        return
    if with_first:
        analyzer = next(iter(with_first.values()))
        do = "list(data)" + (f", or {analyzer.one_pass}" if analyzer.one_pass else "")
        batches.read_ahead(type(analyzer).__name__, do)
    elif len(sources) > 1 and any(source.is_remote for source in sources):
        # What crosses between models is stated before it does.
        batches.read_ahead("a comparison with a model on a server", "list(data)")


def refuse_other_rows(first: Tally, main: Tally) -> None:
    """Refuse data whose rows on the second pass differ from those on the first."""
    if first.digest != main.digest:
        raise LayersimError(
            f"`data` gave different rows on the second data pass: {first.tokens} tokens, then {main.tokens}"
            + (" others" if main.tokens else "")
            + ". Pass list(data)."
        )


def _known_sizes(sources: list[Source], batches: Batches) -> list[BatchSize] | None:
    """The sizes of the batches of a run on servers; None where they are not known before it."""
    return batch_sizes(batches) if any(source.is_remote for source in sources) and not batches.one_shot else None


def announce(
    sources: list[Source],
    batches: Batches,
    analyzers: Mapping[str, Analyzer],
    plan: SitePlan,
    twice: bool,
    sizes: list[BatchSize] | None,
) -> int | None:
    """Print the cost of a run on servers before it starts; return the number of counted tokens, None if it is not known."""
    if sizes is None:
        return batches.data.max_tokens
    remote_sources = [source for source in sources if source.is_remote]
    tokens = sum(size.tokens for size in sizes)
    if len(sources) > 1:
        # Printed also where stderr is no terminal, unlike progress bars.
        tqdm.write(crossing(analyzers, sources, plan, sizes), file=sys.stderr)
    elif sizes:
        rows, positions = max((size.pass_size for size in sizes), key=lambda size: size[1])
        remote_sources[0].refuse_larger(rows, positions)
        # Forward passes of a batch have about equally many samples.
        samples = max(math.ceil(size.samples * min(rows / size.rows, 1)) for size in sizes)
        count = sum(math.ceil(size.rows / rows) for size in sizes)
        words = remote_sources[0].plan(2 if twice else 1, count, tokens, positions, samples)
        tqdm.write(words, file=sys.stderr)
    return tokens
