"""The run of one shard: counts the data, measures its own batches, and writes their sums to a file."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from ..analyzers.base import Analyzer
from ..core.blocks import first_block_size
from ..core.data_pass_progress import Tally
from ..core.distributed import ALONE
from ..core.errors import LayersimError
from ..core.resumable_file import Snapshot
from ..core.sums import Sums
from ..data.batches import Batches, batch_sizes
from ..models.pools import AnyKernel
from ..models.source import Source
from ..models.view import Kernel
from .checkpoint import tallies_snapshot
from .data_pass import DataPass
from .merging import merged_first
from .run_analysis import announce, check_arguments, first_kernels_of, identity_of, in_pools, refuse_other_rows
from .saved_runs import model_notes, recipe_of, sites_notes
from .shard_files import FIRST, MAIN, DataCounts, ShardFile, ShardPart, counts_notes, digest_of, first_notes
from .shards import Shard, count_data, refuse_one_shot
from .site_plan import SitePlan


def run_shard(
    source: Source,
    batches: Batches,
    analyzers: dict[str, Analyzer],
    opened_with: dict[str, Any],
    plan: SitePlan,
    intervals: bool,
    shard: Shard,
) -> Path:
    """Measure one shard of the data and write its sums to a file, which is the shard's checkpoint too.

    Args:
        source: the model.
        batches: the data.
        analyzers: by name.
        opened_with: options with which the model was opened, for the record.
        plan: the sites that each analyzer reads.
        intervals: keep the sums of blocks of the data, for confidence intervals.
        shard: which one, and its file.

    Returns:
        Path of the file.

    Raises:
        LayersimError: an analyzer refuses the model or the data, or a file belongs to another run.
        OSError: the file cannot be written.
    """
    refuse_one_shot(batches)
    batches = in_pools(batches, analyzers)
    settings = batches.record() | opened_with | plan.record() | ({"intervals": True} if intervals else {})
    check_arguments([source], batches, analyzers, plan, intervals)
    run = ShardRun(source, batches, analyzers, plan, shard, settings, intervals)
    run.run()
    return shard.save_to


@dataclass
class ShardRun:
    """The run of one shard.

    Attributes:
        source: the model.
        batches: the data.
        analyzers: by name.
        plan: the sites that each analyzer reads.
        shard: which one, and its file.
        settings: how data and model were opened.
        intervals: whether blocks of the data are kept.
        counts: of all data; None until it was read.
        first: sums of the first pass over all data, by analyzer.
        first_seconds: that the first stage took, all of its shards together.
        first_counts: of the data of the first stage; None without one.
    """

    source: Source
    batches: Batches
    analyzers: dict[str, Analyzer]
    plan: SitePlan
    shard: Shard
    settings: Mapping[str, Any]
    intervals: bool
    counts: DataCounts | None = None
    first: Mapping[str, Sums] = field(default_factory=dict)
    first_seconds: float = 0.0
    first_counts: DataCounts | None = None

    def run(self) -> None:
        """Run the shard from where its file ends, and write the file."""
        kernels = first_kernels_of(self.analyzers, self.plan)
        # Counting tokens or labels needs no model: each shard counts them in all data.
        in_two_stages = any(not self.analyzers[name].first_without_model for name in kernels)
        identity = identity_of([self.source], self.analyzers, self.settings, "save_to")
        self._read_first(identity, in_two_stages)
        stage = FIRST if in_two_stages and self.shard.first is None else MAIN
        own = {"first": digest_of(self.first), "shard": [self.shard.number, self.shard.of], "stage": stage}
        file = ShardFile(self.shard.save_to, identity | own, self._described)
        kept = file.resume_part()
        if kept is not None and kept.is_done:
            self._refuse_other_data(kept)
            tqdm.write(f"{self.shard.save_to} holds this shard already, and is complete.", file=sys.stderr)
            return
        tallies = {} if kept is None else dict(kept.tallies)
        self.counts = count_data(self.batches) if kept is None or kept.counts is None else kept.counts
        self._refuse_other_first()
        file.write(*tallies_snapshot(tallies))
        with ExitStack() as stack:
            stack.enter_context(self.source.evaluating())
            if any(analyzer.needs_calls for analyzer in self.analyzers.values()):
                stack.enter_context(self.source.with_calls())
            if stage == FIRST:
                self._pass(FIRST, [self.source], kernels, tallies, file)
            else:
                self._main(kernels, tallies, file)
        for tally in tallies.values():
            refuse_other_rows(Tally(tokens=self.counts.tokens, digest=self.counts.digest), tally)
        file.write(*tallies_snapshot(tallies))
        if stage == FIRST:
            names = ", ".join(type(self.analyzers[name]).__name__ for name in kernels)
            tqdm.write(
                f"{self.shard.save_to} holds the first stage of shard {self.shard.number} of {self.shard.of}, the first pass "
                f"over the data for {names}. When all shards have theirs, pass the files to second calls: "
                "analyze(..., shard=(i, n), first=[files of the first stage], save_to=another path).",
                file=sys.stderr,
            )

    def _main(self, first_kernels: dict[str, Kernel], tallies: dict[str, Tally], file: ShardFile) -> None:
        """The main pass, after a first pass that needs no model."""
        if first_kernels and self.shard.first is None:
            self._pass(FIRST, [], first_kernels, tallies, file)
            self.first = tallies[FIRST].sums(first_kernels)
        kernels = self.plan.kernels(self.analyzers, self.first)
        self._pass(MAIN, [self.source], kernels, tallies, file)

    def _pass(
        self, label: str, models: list[Source], kernels: Mapping[str, AnyKernel], tallies: dict[str, Tally], file: ShardFile
    ) -> None:
        """One pass: over the batches of this shard, or over all where no model runs."""
        assert self.counts is not None
        analyzers = {name: own for name, own in self.analyzers.items() if name in kernels}
        within = self.shard.takes(self.counts.measured) if models else None
        if models and self.source.is_remote:
            own = batch_sizes(self.batches)[within.start : within.stop] if within is not None else []
            announce(models, self.batches, analyzers, self.plan, False, own)
        # Known beforehand, so that the blocks of all shards are those of a run over all data.
        size = first_block_size(self.counts.rows) if self.intervals and label == MAIN else None
        start = within.start * self.counts.capacity if within is not None else 0
        about = (self.batches, analyzers, kernels, tallies, file, self.plan, self.counts.tokens, ALONE, size, within, start)
        DataPass(label, models, *about).run()

    def _read_first(self, identity: Mapping[str, Any], in_two_stages: bool) -> None:
        """Read the sums of the first pass from the files of the first stage."""
        if self.shard.first is None:
            return
        if not in_two_stages:
            raise LayersimError("`first` is given, but no analyzer of this call has a first pass with the model.")
        self.first, self.first_seconds, self.first_counts = merged_first(self.shard.first, identity)

    def _refuse_other_data(self, kept: ShardPart) -> None:
        """Refuse data that is not that of the complete file."""
        now, then = count_data(self.batches), kept.counts
        if then is not None and now != then:
            raise LayersimError(
                f"`save_to` is {self.shard.save_to}, the shard of other data: {then.tokens} tokens in {then.sequences} "
                f"rows, not {now.tokens} in {now.sequences}."
            )

    def _refuse_other_first(self) -> None:
        """Refuse a first stage over other data."""
        counts, others = self.counts, self.first_counts
        if counts is not None and others is not None and others != counts:
            raise LayersimError(
                f"`first` holds the first stage of other data: {others.tokens} tokens in {others.sequences} rows, not "
                f"{counts.tokens} in {counts.sequences}."
            )

    def _described(self) -> Snapshot:
        """What the file holds beside the tallies."""
        read = self.plan.models_by_analyzer([self.source.model], [self.source])
        names, tensors = first_notes(self.first)
        notes = {
            "counts": counts_notes(self.counts),
            "model": model_notes(self.source.model),
            "read": sites_notes({name: own[0] for name, own in read.items()}),
            "analyzers": {name: recipe_of(analyzer) for name, analyzer in self.analyzers.items()},
            "settings": {**self.settings, **self.batches.row_counts()},
            "places": [record for record in [self.source.record()] if record],
            "first_seconds": self.first_seconds,
        }
        return {**notes, **names}, tensors
