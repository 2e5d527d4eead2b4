"""Runs kernels on the batches of one part of the data, and adds their outputs.

Local runs, ranks, shards, workers on Ray and runs on servers call `run`, each with another `DataPart`.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import psutil
from tqdm.auto import tqdm

from ..activations.row_pools import ROWS, AnyKernel, run_batch
from ..activations.view import Kernel, Reduced, reduce, tokens_alone
from ..analyzers.analyzer import Analyzer, Exchange
from ..core.distributed import add_over_ranks, rank_and_size
from ..core.errors import LayersimError, in_words, warn
from ..core.resumable_file import ResumableFile, Snapshot
from ..core.sums import SIZES, DataBlock, Sums, SumTree, Tally, analyzer_of, first_block_size, most_nodes, rows_in_block
from ..data.batches import Batch, BatchSize, batch_sizes, fingerprint, new_digest
from ..data.data import Data
from ..sources.activation_checks import check_lens, check_stream_sums, refuse_not_finite
from ..sources.model_description import Model
from ..sources.out_of_memory import reduce_batch
from ..sources.source import CanReadSites, OnServer, PartialSums, Source
from .report_assembly import refuse_empty
from .run_description import FIRST, MAIN, Analysis, DataPart
from .site_plan import SitePlan

# Leaves of a run whose number is not known, for the memory of its sums.
TYPICAL_LEAVES = 1024
# Copies of the sums that are held beside the nodes of the tree while two nodes are added.
ADDED = 2
TITLES = {FIRST: "first pass", MAIN: "layers"}


class Step(NamedTuple):
    """Counts of a batch that was read and whose sums are not computed yet.

    Attributes:
        measured: whether this process runs the model on the batch.
        batches: number of batches read so far, this one included.
        rows: number of rows in the batch.
        tokens: number of counted positions in each leaf; a single number for a batch on which no model runs.
        digest: SHA-256 of all rows read so far, the batch's own included.
        leaf: number of rows in a leaf.
    """

    measured: bool
    batches: int
    rows: int
    tokens: tuple[int, ...]
    digest: str
    leaf: int = 1


@dataclass
class PassState:
    """Progress of a pass: sums and counts of complete batches, and the batches that still wait for their sums.

    Attributes:
        tally: tally of the complete batches.
        names: names of the kernels.
        waiting: the waiting batches, in the order of the data.
    """

    tally: Tally
    names: tuple[str, ...]
    waiting: deque[Step] = field(default_factory=deque)

    def add(self, parts: Sequence[PartialSums], seconds: float = 0.0) -> None:
        """Add the sums of the next batches to the tally, and count these batches.

        Args:
            parts: the sums.
            seconds: wall time of the whole pass so far.
        """
        steps = self.take(sum(part.count for part in parts))
        leaves = iter([(step.leaf, tokens) for step in steps if step.measured for tokens in step.tokens])
        tree, known = self.tally.tree, sums_so_far(self.tally.tree)
        for part in parts:
            rows = tokens = 0
            while rows < part.count:
                leaf, counted = next(leaves)
                rows, tokens = rows + leaf, tokens + counted
            own = sums_of(self.names, part.out, known)
            known = known | {name: sums for name, sums in own.items() if sums}
            tree = tree.add(DataBlock(part.count, tokens, own))
        # One assignment: an interrupt leaves a batch either counted with all its sums or not at all.
        self.tally = replace(_counted(self.tally, steps, seconds), tree=tree)

    def add_unmeasured(self, seconds: float = 0.0) -> None:
        """Count the last batches of the data, on which this process runs no model."""
        self.tally = _counted(self.tally, list(self.waiting), seconds)
        self.waiting.clear()

    def take(self, rows: int) -> list[Step]:
        """Remove and return waiting batches, from the first on, until they hold `rows` rows on which a model runs."""
        taken: list[Step] = []
        while rows > 0 and self.waiting:
            step = self.waiting.popleft()
            taken.append(step)
            if step.measured:
                rows -= len(step.tokens) * step.leaf
        return taken


def _counted(tally: Tally, steps: Sequence[Step], seconds: float) -> Tally:
    """Add the counts of more batches, but not their sums, to a tally, and set its time."""
    return replace(
        tally,
        batches=steps[-1].batches if steps else tally.batches,
        sequences=tally.sequences + sum(step.rows for step in steps),
        tokens=tally.tokens + sum(sum(step.tokens) for step in steps),
        digest=steps[-1].digest if steps else tally.digest,
        seconds=seconds,
    )


@dataclass
class DataPass:
    """One pass of kernels over the data, which can continue from a checkpoint and writes one.

    Attributes:
        analysis: models, data and analyzers.
        part: the batches to measure.
        label: "first" or "main".
        kernels: the kernels, by analyzer.
        file: the file that keeps the tallies.
        tallies: tallies of all passes of the run, by label; `run` adds the tally of this pass.
        total: number of counted tokens in the data; None if not known.
        rows: number of rows in the measured batches; None if not known.
        first: sums of the first pass over all data, by analyzer.
        state: sums so far, and the batches that wait for their sums.
    """

    analysis: Analysis
    part: DataPart
    label: str
    kernels: Mapping[str, AnyKernel]
    file: ResumableFile
    tallies: dict[str, Tally]
    total: int | None = None
    rows: int | None = None
    first: Mapping[str, Sums] = field(default_factory=dict)
    state: PassState = field(init=False)

    def __post_init__(self) -> None:
        whole = self.label == MAIN or self.analysis.first_needs_model
        self.sources = list(self.analysis.sources) if whole else []
        self.analyzers = {name: a for name, a in self.analysis.analyzers.items() if self.label == MAIN or name in self.kernels}
        within, counts = (self.part.within, self.part.counts) if self.sources else (None, None)
        # Blocks of known data do not depend on how it is divided.
        self.first_block = first_block_size(self.rows) if self.analysis.intervals and self.label == MAIN else None
        self.within, start = within, 0 if within is None or counts is None else within.start * counts.capacity
        fresh = Tally(tree=SumTree(self.first_block, start))
        self.state = PassState(self.tallies.get(self.label) or fresh, tuple(self.kernels))
        self._began = time.monotonic() - self.state.tally.seconds

    def run(self) -> None:
        """Run the pass to the end of the data, and add its tally to `tallies`.

        Raises:
            LayersimError: activations are not finite, or the data differs from the data of the checkpoint.
        """
        if self.label == FIRST and self.state.tally.done:
            # The main pass reads the same data, and the digests of both are compared afterwards.
            return
        rows = rows_in_data(self.analysis.batches.data) if self.total is None and self.within is None else None
        is_remote = any(isinstance(source, OnServer) for source in self.sources)
        with self.file.saved_on_interrupt(self._snapshot, self._summed), self._bar() as bar:
            for parts in self._partial_sums(bar.set_postfix_str):
                self._refuse_not_finite(parts)
                self.state.add(parts, time.monotonic() - self._began)
                if self.state.tally.tree.rows == sum(part.count for part in parts):
                    self._check_memory(sums_so_far(self.state.tally.tree), parts[0].count)
                tally = self.state.tally
                if rows is not None:
                    # Rows that are not read yet are taken to be as long as those that are.
                    bar.total = round(tally.tokens * rows / max(1, tally.sequences))
                bar.update(tally.tokens - bar.n)
                if is_remote or self.file.due:
                    self.file.save(*self._snapshot())
            self.state.add_unmeasured(time.monotonic() - self._began)
            bar.update(self.state.tally.tokens - bar.n)
        self.state.tally = self.tallies[self.label] = replace(self.state.tally, done=True)
        self.file.save(*self._snapshot())

    def read(self) -> Iterator[Batch]:
        """Yields the batches on which a model has to run, without those that a checkpoint holds already.

        Each batch that is read is checked and joins `state.waiting`.
        """
        batches, held, digest, number = self.analysis.batches, self.state.tally, new_digest(), 0
        needs_head = self.label == MAIN and any(analyzer.needs_unembed for analyzer in self.analyzers.values())
        unchecked, counted, taken = needs_head, -1, 0 if self.within is None else self.within.start
        for number, batch in enumerate(batches, start=1):
            fingerprint(digest, batch, batches.data.selection.marked)
            has_counted = bool(batch.counted.any())
            if has_counted:
                self._settle(batch)
            counted += has_counted
            deal = self.part.deal
            measured = has_counted and (number - 1) % deal.copies == deal.copy
            measured = measured and (self.within is None or counted in self.within)
            index, taken = taken * batch.capacity, taken + measured
            if number < held.batches:
                continue
            if number == held.batches:
                if digest.hexdigest() != held.digest:
                    raise _other_data(f"other rows among the first {number} batches")
                continue
            if held.done:
                raise _other_data(f"more than the {held.batches} batches of the finished run")
            if measured:
                for analyzer in self.analyzers.values():
                    analyzer.check_batch(batch, cast(Model, batches.model))
                if unchecked and self.sources:
                    self._check_lens(batch)
                    unchecked = False
            # Of rows that an earlier pass over the same data, or another process, may have counted: one rule for all.
            batch = replace(batch, leaf=min(ROWS, batch.capacity))
            if self.first_block is not None:
                leaf, block = min(batch.leaf, rows_in_block(index, 1)), rows_in_block(index, self.first_block)
                batch = replace(batch, leaf=leaf, block=block)
            tokens = batch.leaf_tokens() if measured else (int(batch.counted.sum()),)
            self.state.waiting.append(Step(measured, number, len(batch.tokens), tokens, digest.hexdigest(), batch.leaf))
            if measured:
                yield batch
        if number < held.batches:
            raise _other_data(f"only {number} batches, and the checkpoint has {held.batches}")

    def _settle(self, batch: Batch) -> None:
        """Run a batch on models whose sites are fully known only after a forward pass."""
        unsettled = [one for one in self.sources if isinstance(one, CanReadSites) and not one.is_settled]
        for source in unsettled:
            source.settle(batch)
            check_stream_sums(source, batch)
        if unsettled:
            self.analysis.plan.check_sites(self.analysis.analyzers)

    def _check_lens(self, batch: Batch) -> None:
        """Raise an error if a model's logit lens does not reproduce its logits. Models without a head are not checked."""
        for source in self.sources:
            if source.model.head is not None:
                check_lens(source, batch)

    def _check_memory(self, sums: Mapping[str, Sums], leaf: int) -> None:
        """Raise an error or warn if the sums do not fit into memory, judged by the sums of the first batches."""
        rows = rows_in_data(self.analysis.batches.data)
        # The number of leaves is not known to all runs; its logarithm counts.
        leaves = TYPICAL_LEAVES if rows is None else -(-rows // leaf)
        check_memory(sums, leaves, self.first_block is not None, self.analyzers)

    def _bar(self) -> Any:
        return tqdm(
            desc=TITLES[self.label],
            unit="token",
            unit_scale=True,
            total=self.total,
            initial=self.state.tally.tokens,
            disable=None if rank_and_size()[0] == 0 else True,
        )

    def _partial_sums(self, show: Callable[[str], None]) -> Iterator[list[PartialSums]]:
        """Yields partial sums of the remaining batches, in the order of the data."""
        sources, batches = self.sources, self.read()
        one = sources[0] if len(sources) == 1 else self.analysis.together if sources else None
        if one is not None:
            return one.stream(batches, self.kernels, self.state.tally.tree.end, show, self.first_block)
        by_statistics = self.label == MAIN and any(analyzer.by_statistics for analyzer in self.analyzers.values())
        if sources and (by_statistics or self.analysis.is_remote):
            return exchange(sources, batches, self.analyzers, self.analysis.plan, show)
        run = self._side_by_side if sources else _tokens_of
        return ([PartialSums(batch.leaf, *own) for own in run_batch(run, batch, self.kernels)] for batch in batches)

    def _side_by_side(self, batch: Batch, kernels: Mapping[str, Kernel]) -> Reduced:
        """Run each model forward once, and run kernels on the activations of all models."""
        return reduce_batch(batch, kernels, *(source.collect(batch) for source in self.sources))

    def _refuse_not_finite(self, parts: Sequence[PartialSums]) -> None:
        names = [source.sites for source in self.sources]
        start = self.state.tally.tree.end
        # The last leaf of the data may be larger than the rest of the data.
        read = self.state.tally.sequences + sum(step.rows for step in self.state.waiting)
        for part in parts:
            last = min(start + part.count, max(read, start + 1)) - 1
            refuse_not_finite(part.not_finite, names, f"rows {start} to {last}")
            start += part.count

    def _snapshot(self) -> Snapshot:
        """The tallies of all passes, for the checkpoint."""
        return self.analysis.snapshot(self.part, {**self.tallies, self.label: self.state.tally})

    def _summed(self) -> str:
        """First words of the note that says where an interrupted run was saved."""
        return f"The sums of {self.state.tally.tree.total().tokens} tokens are"


def run(analysis: Analysis, part: DataPart, file: ResumableFile, tallies: dict[str, Tally], blocking: bool = True) -> DataPass:
    """Run the passes over one part of the data. Batches whose sums the checkpoint holds are not run again.

    Args:
        analysis: models, data and analyzers.
        part: the batches and the passes.
        file: the file that keeps the tallies.
        tallies: tallies by pass, from the file; the tallies of these passes are added.
        blocking: False to leave the main pass to the caller.

    Returns:
        The last pass: complete, or not begun if `blocking` is False.

    Raises:
        LayersimError: activations are not finite, or two passes read different rows.
    """
    kernels, first = analysis.first_kernels, dict[str, Sums]()
    # Sizes of batches of a run on servers are printed before it.
    sizes = batch_sizes(analysis.batches) if analysis.is_remote and not analysis.batches.one_shot else None
    tokens, rows = analysis.batches.data.max_tokens, None
    if sizes is not None:
        passes = (part.stage == MAIN) + (analysis.first_needs_model and not tallies.get(FIRST, Tally()).done)
        _announce(analysis, passes, sizes if part.within is None else sizes[part.within.start : part.within.stop])
        tokens, rows = sum(size.tokens for size in sizes), sum(size.rows for size in sizes)
    if part.counts is not None:
        tokens, rows = part.counts.tokens, part.counts.rows
    about = (file, tallies, tokens, rows)
    with analysis.running():
        if kernels:
            last = DataPass(analysis, part, FIRST, kernels, *about)
            last.run()
        if part.stage == MAIN:
            if kernels:
                first = add_over_ranks(tallies[FIRST].sums(kernels), part.deal)
                if not any(first.values()):
                    refuse_empty(tallies[FIRST].tokens, tallies[FIRST].sequences)
            last = DataPass(analysis, part, MAIN, analysis.plan.kernels(analysis.analyzers, first), *about, first)
            if blocking:
                last.run()
    expected = part.counts or tallies.get(FIRST)
    for tally in tallies.values():
        if expected is not None and tally.done and tally.digest != expected.digest:
            raise LayersimError(
                f"`data` gave different rows on the second data pass: {expected.tokens} tokens, then {tally.tokens}"
                + (" others" if tally.tokens else "")
                + ". Pass list(data)."
            )
    return last


def _announce(analysis: Analysis, passes: int, sizes: Sequence[BatchSize]) -> None:
    """Print the cost of a run on servers before it starts.

    Args:
        analysis: models, data and analyzers.
        passes: number of passes that run the model.
        sizes: sizes of the batches.
    """
    if len(analysis.sources) > 1 and analysis.together is None:
        # Printed also where stderr is no terminal, unlike progress bars.
        tqdm.write(crossing(analysis.analyzers, len(analysis.sources), analysis.plan, sizes), file=sys.stderr)
    elif sizes:
        source = analysis.sources[0]
        assert isinstance(source, OnServer)
        rows, positions = max((size.pass_size for size in sizes), key=lambda size: size[1])
        source.refuse_larger(rows, positions)
        count, tokens = sum(math.ceil(size.rows / rows) for size in sizes), sum(size.tokens for size in sizes)
        tqdm.write(source.plan(passes, count, tokens), file=sys.stderr)


def _tokens_of(batch: Batch, kernels: Mapping[str, Kernel]) -> Reduced:
    """Run kernels that need no model, because they read only tokens and labels."""
    return [], reduce(kernels, tokens_alone(batch))[1]


def _other_data(given: str) -> LayersimError:
    return LayersimError(f"`data` differs from the data of the checkpoint: `data` has {given}.")


def rows_in_data(data: Data) -> int | None:
    """Number of rows in the data; None if the data has no length or if rows are packed.

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


def check_memory(
    sums: Mapping[str, Sums], leaves: int, intervals: bool, analyzers: Mapping[str, Analyzer] = MappingProxyType({})
) -> None:
    """Raise an error if an analyzer's sums exceed its `max_memory_gb`, and warn if all sums exceed the free memory.

    Sums are added in pairs, so several copies are held at once.

    Args:
        sums: sums of one batch, by kernel.
        leaves: number of groups of rows (leaves) whose sums are added, or an upper limit.
        intervals: whether blocks are kept.
        analyzers: analyzers by name, which may have a limit `max_memory_gb`.

    Raises:
        LayersimError: the sums of an analyzer need more than its limit.
    """
    copies, needs = most_nodes(max(leaves, 1), intervals) + ADDED, Counter[str]()
    for name, own in sums.items():
        needs[analyzer_of(name)] += copies * sum(value.nbytes for value in own.fields.values())
    for name, need in needs.items():
        limit = getattr(analyzers.get(name), "max_memory_gb", math.inf)
        if need > limit * 1e9:
            raise LayersimError(
                f"`max_memory_gb` is {limit:g}, but the sums of {name!r} need {need / 1e9:.2g} GB ({copies} copies). Read "
                "fewer sites with `at`."
            )
    free = psutil.virtual_memory().available
    if needs.total() > free:
        warn(
            f"The sums of this run may not fit into memory: up to {copies} copies take {in_words(needs.total())}, but only "
            f"{in_words(free)} are free. {needs.most_common(1)[0][0]!r} has the largest sums. Read fewer sites with at=[...]"
            f"{', or measure without intervals' if intervals else ''}."
        )


def sums_so_far(tree: SumTree) -> dict[str, Sums]:
    """Sums of earlier rows by kernel, for their shapes: sums of further rows must have the same shapes."""
    return {name: sums for node in tree.nodes for name, sums in node.sums.items() if sums}


def sums_of(names: Sequence[str], out: Mapping[str, Any], before: Mapping[str, Sums]) -> dict[str, Sums]:
    """Convert the outputs of kernels for the next batches to `Sums`, by analyzer.

    Args:
        names: names of the analyzers.
        out: outputs of the kernels, by analyzer.
        before: sums of other batches, to which these will be added; empty for the first batches.

    Raises:
        LayersimError: a kernel's output cannot be added; the message names its analyzer.
    """
    sums = {}
    for name in names:
        try:
            sums[name] = own = out[name] if isinstance(out[name], Sums) else Sums.of(out[name])
            before.get(name, Sums()).refuse_others(own)
        except (AttributeError, KeyError, ValueError) as error:
            raise LayersimError(
                f"The kernel of {name!r} must return a dict of tensors whose shapes do not depend on the batch: {error}"
            ) from error
    return sums


def exchanges(analyzers: Mapping[str, Analyzer]) -> dict[str, Exchange]:
    """The `Exchange` of each analyzer, which compares two models on different machines.

    Raises:
        LayersimError: an analyzer needs the activations of both models in one place.
    """
    by_name = {}
    for name, analyzer in analyzers.items():
        statistics = analyzer.exchange()
        if statistics is None:
            raise LayersimError(
                f"{analyzer!r} needs the activations of both models on one machine, but a model is on a server. Load both "
                'models here, pass two edits of one model on the server, or use CKA(estimator="minibatch").'
            )
        by_name[name] = statistics
    return by_name


def exchange(
    sources: Sequence[Source],
    batches: Iterator[Batch],
    analyzers: Mapping[str, Analyzer],
    plan: SitePlan,
    show: Callable[[str], None],
) -> Iterator[list[PartialSums]]:
    """Run each batch on one model after the other, and join the statistics of all models.

    Args:
        sources: the models.
        batches: the batches, in the order of the data.
        analyzers: the analyzers, by name.
        plan: the sites that each analyzer reads.
        show: function that shows a few words on the model that runs.
    """
    by_name = exchanges(analyzers)
    kernels = [
        {name: plan.kernel(name, item.kernel, number) for name, item in by_name.items()}
        | plan.kernels_of_sizes(analyzers, number)
        for number in range(len(sources))
    ]
    for batch in batches:
        sides = []
        for number, source in enumerate(sources):
            show(f"model {number + 1} of {len(sources)}")
            sides.append(source.sums(batch, kernels[number]))
        if any(len(leaves) != len(sides[0]) for leaves in sides):
            # Of a model whose activations are not finite.
            yield [PartialSums(batch.leaf, [count for leaves in sides for count in leaves[0][0]], {})]
            continue
        yield [PartialSums(batch.leaf, *_joined(by_name, leaves)) for leaves in zip(*sides, strict=True)]


def _joined(by_name: Mapping[str, Exchange], leaves: Sequence[Reduced]) -> Reduced:
    """Join the statistics of all models to sums of a group of rows. An analyzer has none if its pool ends in another group."""
    not_finite = [count for counts, _ in leaves for count in counts]
    if any(bool(count.any()) for count in not_finite):
        return not_finite, {}
    out = {}
    for name, item in by_name.items():
        statistics = [own[name] for _, own in leaves]
        out[name] = item.join(*map(item.prepare, statistics)) if all(statistics) else {}
        sizes = [own.get(SIZES + name, {}) for _, own in leaves]
        # Each was number 0 in its own pass.
        out[SIZES + name] = {f"{i}{key[1:]}": value for i, each in enumerate(sizes) for key, value in each.items()}
    return not_finite, out


def crossing(analyzers: Mapping[str, Analyzer], models: int, plan: SitePlan, sizes: Sequence[BatchSize]) -> str:
    """A sentence on the number of bytes that the comparison of models transfers.

    Args:
        analyzers: the analyzers, by name.
        models: number of models.
        plan: the sites that each analyzer reads.
        sizes: sizes of the batches.
    """
    size = sum(
        item.size(batch.rows, batch.density, len(choice.numbers))
        for name, item in exchanges(analyzers).items()
        for choice in plan.choices[name]
        for batch in sizes
    )
    how = "on one model and then on the other" if models == 2 else f"on {models} models in turn"
    return f"{len(sizes)} batches, each run {how}; {in_words(size)} are transferred in all."
