"""`Analysis`: models, data and analyzers of a run. `DataPart`: the part of the data that one call measures."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from tqdm.auto import tqdm

from ..activations.row_pools import AnyKernel
from ..activations.text_order import text_order_kernel
from ..activations.view import Kernel
from ..analyzers.analyzer import Analyzer
from ..core.distributed import ALONE, Deal
from ..core.errors import LayersimError
from ..core.resumable_file import Snapshot
from ..core.sums import MOST_BLOCKS, TEXT_ORDER, Tally
from ..core.wording import duration_in_words
from ..data.batches import Batches, RowDigests
from ..sources.hooked_module import HookedSource
from ..sources.source import OnServer, Source, running
from .run_arguments import refuse_large_heads, refuse_server, refuse_unknown_functions
from .run_files import model_notes, recipe_of, tallies_snapshot
from .run_identity import identity_of, modules_here
from .site_plan import SitePlan

# Names of the passes over the data, as files hold them.
FIRST = "first"
MAIN = "main"


@dataclass(frozen=True)
class DataCounts:
    """Numbers of batches, rows and tokens in all data.

    Attributes:
        batches: number of batches.
        measured: number of batches with a counted position, which are divided among the shards.
        sequences: number of rows.
        tokens: number of counted positions.
        digest: SHA-256 of all rows.
        texts: number of texts.
        measured_texts: number of texts in the measured batches.
        capacity: number of texts in each batch but the last.
        inputs: digest of all rows with their counted positions, labels and texts, see `data.batches.RowDigests`.
    """

    batches: int
    measured: int
    sequences: int
    tokens: int
    digest: str
    texts: int
    measured_texts: int
    capacity: int
    inputs: str = ""

    def within(self, number: int, shard_count: int) -> range:
        """Indices of the batches of one shard, as a range. Batches without a counted position have no index.

        Args:
            number: index of the shard.
            shard_count: number of shards of the run.

        Examples:
            >>> counts = DataCounts(8, 7, 14, 70, "", 14, 14, 2)
            >>> [list(counts.within(number, 3)) for number in range(3)]
            [[0, 1], [2, 3], [4, 5, 6]]
        """
        return range(self.measured * number // shard_count, self.measured * (number + 1) // shard_count)


@dataclass(frozen=True)
class DataPart:
    """The batches that a call of `run` measures, and the pass after which the call stops.

    Attributes:
        deal: the batches that this rank measures.
        counts: counts of all data; None if the data was not counted before.
        within: range of this part among the batches with a counted position; None for all batches of this rank.
        last_pass: "first" to end after the first pass; else "main".
    """

    deal: Deal = ALONE
    counts: DataCounts | None = None
    within: range | None = None
    last_pass: str = MAIN


@dataclass(frozen=True)
class Analysis:
    """Models, data and analyzers of a run.

    Attributes:
        plan: the models, one or several to compare, and the sites that each analyzer reads.
        batches: the data; each batch holds whole pools of rows.
        analyzers: the analyzers, by name.
        opened_with: options with which the models were opened, for the record.
        intervals: whether to keep the sums of jackknife blocks, for confidence intervals.
    """

    plan: SitePlan
    batches: Batches
    analyzers: Mapping[str, Analyzer]
    opened_with: Mapping[str, Any] = field(default_factory=dict)
    intervals: bool = False

    def __post_init__(self) -> None:
        whole_texts = any(analyzer.needs.whole_texts for analyzer in self.analyzers.values())
        object.__setattr__(self, "batches", replace(self.batches, pool_texts=self._pool_texts, whole_texts=whole_texts))

    def _pool_texts(self, density: float) -> int:
        return max((analyzer.pool_need(density) for analyzer in self.analyzers.values()), default=0)

    @property
    def compares_texts(self) -> bool:
        """Whether the run compares texts that follow each other in a batch, because intervals take them as independent.

        Servers return small sums only, and analyzers that need one model at a time compare small statistics.
        """
        one_at_a_time = any(analyzer.needs.one_model_at_a_time for analyzer in self.analyzers.values())
        return self.intervals and not self.is_remote and not one_at_a_time

    @property
    def kernels_of_texts(self) -> dict[str, AnyKernel]:
        """The kernel that compares texts that follow each other; empty if the run does not."""
        return {TEXT_ORDER: text_order_kernel()} if self.compares_texts else {}

    @property
    def sources(self) -> Sequence[Source]:
        return self.plan.sources

    @property
    def is_remote(self) -> bool:
        """Whether a model runs on a server."""
        return any(isinstance(source, OnServer) for source in self.sources)

    @cached_property
    def single_source(self) -> Source | None:
        """One `Source` that runs all models together; None if each model runs by itself.

        Edits of one model on one server run together if an analyzer has no `exchange`. Otherwise each model runs by itself,
        because one model in a request is the smaller job.
        """
        if len(self.sources) == 1:
            return self.sources[0]
        if self.is_remote and all(analyzer.exchange() is not None for analyzer in self.analyzers.values()):
            return None
        return self.sources[0].beside(self.sources[1:])

    @property
    def settings(self) -> dict[str, Any]:
        """Options of the data, the models, the sites and the intervals, by name."""
        intervals = {"intervals": True} if self.intervals else {}
        return self.batches.record() | dict(self.opened_with) | self.plan.record() | intervals

    @property
    def provenance(self) -> dict[str, Any]:
        """Options, row counts and facts about servers, for the provenance of results."""
        provenance = self.settings | self.batches.row_counts()
        servers = [source.record() for source in self.sources if isinstance(source, OnServer)]
        if servers:
            provenance["remote"] = servers
        return provenance

    @cached_property
    def first_kernels(self) -> dict[str, Kernel]:
        """Kernels of the first pass, by analyzer; empty if one pass is enough."""
        kernels: dict[str, Kernel] = {}
        for name, analyzer in self.analyzers.items():
            kernel = analyzer.first_kernel()
            if kernel is None:
                continue
            # A kernel of tokens alone reads no sites.
            kernels[name] = kernel if analyzer.needs.first_pass == "data" else self.plan.kernel(name, kernel)
        return kernels

    @property
    def first_needs_model(self) -> bool:
        """Whether the first pass runs the model. A first pass that counts tokens or labels does not."""
        return any(self.analyzers[name].needs.first_pass == "model" for name in self.first_kernels)

    def identity(self, argument: str | None) -> dict[str, Any]:
        """Models, sites, analyzers, data options and versions of a run; `run_identity` lists all inputs.

        A call continues a saved run only if all are equal.

        Args:
            argument: see `ModelDescription.identity`.
        """
        models = [source.model for source in self.sources]
        if argument is not None:
            for analyzer in self.analyzers.values():
                refuse_unknown_functions(analyzer, argument)
        return identity_of(models, modules_here(self.sources), argument) | {
            "sites": [list(source.sites) for source in self.sources],
            "analyzers": {name: recipe_of(analyzer) for name, analyzer in self.analyzers.items()},
            "data": self.settings,
        }

    @cached_property
    def counts(self) -> DataCounts:
        """Numbers of batches, rows and tokens in all data. The first access reads all data."""
        return count_data(self.batches)

    def snapshot(self, part: DataPart, tallies: Mapping[str, Tally]) -> Snapshot:
        """Progress and sums over a part of the data, as JSON data and tensors for a file.

        The file of a shard also holds the models, for `merge`.

        Args:
            part: the part of the data.
            tallies: tallies by pass, "first" or "main".
        """
        notes, tensors = tallies_snapshot(tallies)
        if part.counts is None:
            return notes, tensors
        models = {name: model_notes(analyzer_models[0]) for name, analyzer_models in self.plan.models().items()}
        return {"counts": asdict(part.counts), "models": models, "provenance": self.provenance, **notes}, tensors

    def read_ahead(self) -> None:
        """Read an iterator of rows into memory, if the run reads its data more than once.

        Raises:
            LayersimError: the rows are too large to be kept.
        """
        if not self.batches.one_shot:
            return
        for name in self.first_kernels:
            analyzer = self.analyzers[name]
            remedy = "list(data)"
            if analyzer.needs.one_pass:
                remedy += f", or {analyzer.needs.one_pass}"
            # The rows are kept once: the first analyzer with a first pass is named if they are too large.
            return self.batches.read_ahead(type(analyzer).__name__, remedy)
        if len(self.sources) > 1 and self.is_remote:
            # What crosses between models is stated before it does.
            self.batches.read_ahead("a comparison with a model on a server", "list(data)")

    def check(self) -> None:
        """Raise an error if an analyzer cannot use a model or the options. Results that take long are announced."""
        models = self.plan.models()
        for name, analyzer in self.analyzers.items():
            analyzer.check_sites(*models[name])
            analyzer.check(*models[name])
            if self.is_remote:
                refuse_server(analyzer)
                refuse_large_heads(analyzer)
            if analyzer.needs.single_texts and self.batches.data.pack:
                raise LayersimError(
                    f"`pack` is True; it must be False for {type(analyzer).__name__}, whose rows must be single texts."
                )
        for name, analyzer in self.analyzers.items():
            # With intervals, a call for all data and for the data without each jackknife block.
            calls = 1 + MOST_BLOCKS * self.intervals
            seconds = calls * analyzer.compute_seconds(models[name][0])
            if seconds >= 10:
                name_of_class = type(analyzer).__name__
                text = f"{name_of_class} takes about {duration_in_words(seconds)} on one core after the data pass."
                tqdm.write(text, file=sys.stderr)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager that turns off dropout, and records calls of blocks for analyzers that run them again."""
        needs_calls = any(analyzer.needs.calls for analyzer in self.analyzers.values())
        with ExitStack() as stack:
            for source in self.sources:
                stack.enter_context(running(source, needs_calls))
            single = self.single_source
            if isinstance(single, HookedSource) and self.first_needs_model:
                # Both passes over the data read the activations of one forward pass, if it holds all rows.
                stack.enter_context(single.keeping_activations())
            yield


def count_data(batches: Batches) -> DataCounts:
    """Read all data once and count its batches, rows and tokens.

    Args:
        batches: the data.
    """
    digests = RowDigests(batches.data.selection.marked)
    number = 0
    measured = 0
    sequences = 0
    tokens = 0
    texts = 0
    measured_texts = 0
    capacity = 0
    bar: Any = tqdm(desc="counting", unit="token", unit_scale=True, disable=None)
    with bar:
        for batch in batches:
            digests.add(batch)
            counted = int(batch.counted.sum())
            number += 1
            sequences += len(batch.tokens)
            texts += batch.text_count
            tokens += counted
            capacity = batch.capacity
            if counted:
                measured += 1
                measured_texts += batch.text_count
            bar.update(counted)
    # As a pass over the data counts: no row, no digest.
    digest = digests.rows if number else ""
    inputs = digests.inputs if number else ""
    return DataCounts(number, measured, sequences, tokens, digest, texts, measured_texts, capacity, inputs)
