"""The run of one shard: measures its own batches, and writes their sums to a file or returns them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from ..core.errors import LayersimError
from ..core.resumable_file import Snapshot
from ..core.sums import Sums, Tally
from .merge import FirstStage, header_of, merged_first, reread
from .run import Analysis, DataPart, run
from .shards import (
    FIRST,
    MAIN,
    DataCounts,
    Shard,
    ShardFile,
    ShardPart,
    count_data,
    digest_of,
    first_notes,
    refuse_one_shot,
    tallies_snapshot,
)
from .submitted_runs import model_notes, recipe_of, sites_notes


def run_shard(analysis: Analysis, shard: Shard) -> Path:
    """Measure one shard of the data, and write its sums to a file that is also the shard's checkpoint.

    Args:
        analysis: model, data and analyzers.
        shard: index and file of the shard.

    Returns:
        Path of the file.

    Raises:
        LayersimError: an analyzer cannot use the model or the data, or a file belongs to another run.
        OSError: the file cannot be written.
    """
    refuse_one_shot(analysis.batches)
    analysis.check()
    identity, first = analysis.identity("save_to"), None
    if shard.first is not None:
        if not analysis.first_needs_model:
            raise LayersimError("`first` is given, but no analyzer of this call has a first pass with the model.")
        first = merged_first(map(header_of, shard.first), identity, reread)
    own = ShardRun(analysis, identity, shard.number, shard.of, first, shard.save_to)
    kept = own.file.resume_part()
    counts = count_data(analysis.batches) if kept is None or kept.counts is None or kept.is_done else kept.counts
    if kept is not None and kept.is_done:
        if kept.counts is not None and counts != kept.counts:
            raise _other_data(f"`save_to` is {shard.save_to}, the shard of other data", kept.counts, counts)
        tqdm.write(f"{shard.save_to} holds this shard already, and is complete.", file=sys.stderr)
        return shard.save_to
    own.measure(counts, {} if kept is None else dict(kept.tallies))
    if own.stage == FIRST:
        names = ", ".join(type(analysis.analyzers[name]).__name__ for name in analysis.first_kernels)
        tqdm.write(
            f"{shard.save_to} holds the first stage of shard {shard.number} of {shard.of}, the first pass over the data for "
            f"{names}. When all shards have a first stage, call again with the files of all: "
            "analyze(..., shard=(i, n), first=[files of the first stage], save_to=another path).",
            file=sys.stderr,
        )
    return shard.save_to


@dataclass
class ShardRun:
    """The run of one shard.

    Attributes:
        analysis: model, data and analyzers.
        identity: the identity of the run, see `Analysis.identity`.
        number: index of the shard.
        of: number of shards of the run.
        first: sums of the first stage; None without them.
        path: path of the file; None to keep the sums in memory.
        counts: counts of all data; None until all data was read.
        tallies: tallies by pass, "first" or "main".
    """

    analysis: Analysis
    identity: Mapping[str, Any]
    number: int
    of: int
    first: FirstStage | None
    path: Path | None = None
    counts: DataCounts | None = None
    tallies: dict[str, Tally] = field(default_factory=dict)

    @property
    def stage(self) -> str:
        """Name of the pass whose sums the shard returns. A first pass without the model is a part of each shard."""
        return FIRST if self.analysis.first_needs_model and self.first is None else MAIN

    @cached_property
    def file(self) -> ShardFile:
        """The file of the shard."""
        first = "" if self.first is None else digest_of(self.first.sums)
        own = {"first": first, "shard": [self.number, self.of], "stage": self.stage}
        return ShardFile(self.path, {**self.identity, **own}, self._described)

    def measure(self, counts: DataCounts, tallies: dict[str, Tally]) -> ShardPart:
        """Run the shard from where its file ends, and write the file.

        Args:
            counts: counts of all data, see `DataCounts`.
            tallies: tallies by pass, as read from the file.

        Raises:
            LayersimError: the data differs from the data of the first stage, or has changed since it was counted.
        """
        if self.first is not None and self.first.counts != counts:
            raise _other_data("`first` holds the first stage of other data", self.first.counts, counts)
        self.counts, self.tallies = counts, tallies
        self.file.write(*tallies_snapshot(tallies))
        first = None if self.first is None else self.first.sums
        run(
            self.analysis,
            DataPart(number=self.number, of=self.of, counts=counts, stage=self.stage, first=first),
            self.file,
            tallies,
        )
        return self.file.part(tallies)

    def _described(self) -> Snapshot:
        """The description that the file holds beside the tallies."""
        first: Mapping[str, Sums] = {} if self.first is None else self.first.sums
        if self.stage == MAIN and FIRST in self.tallies:
            first = self.tallies[FIRST].sums(self.analysis.first_kernels)
        names, tensors = first_notes(first)
        notes: dict[str, Any] = {
            "counts": None if self.counts is None else asdict(self.counts),
            "model": model_notes(self.analysis.sources[0].model),
            "read": sites_notes({name: own[0] for name, own in self.analysis.models.items()}),
            "analyzers": {name: recipe_of(analyzer) for name, analyzer in self.analysis.analyzers.items()},
            "settings": {**self.analysis.settings, **self.analysis.batches.row_counts()},
            "places": self.analysis.places,
            "first_seconds": 0.0 if self.first is None else self.first.seconds,
        }
        return {**notes, **names}, tensors


def _other_data(given: str, then: DataCounts, now: DataCounts) -> LayersimError:
    return LayersimError(f"{given}: {then.tokens} tokens in {then.sequences} rows, not {now.tokens} in {now.sequences}.")
