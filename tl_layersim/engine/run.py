"""Runs kernels on batches and adds their outputs.

Local runs, ranks, shards, workers on Ray and runs on servers call `run`, each with another `DataPart`. Outputs are summed over
leaves (groups of up to 16 consecutive texts), which a `SumTree` adds in pairs.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import psutil
from torch import Tensor
from tqdm.auto import tqdm

from ..activations.row_pools import TEXTS_OF_POOL, AnyKernel, run_batch
from ..activations.view import Kernel, Reduced, reduce, tokens_alone
from ..analyzers.analyzer import Analyzer
from ..core.distributed import add_over_ranks, rank_and_size
from ..core.errors import LayersimError, in_words, warn
from ..core.resumable_file import ResumableFile, Snapshot
from ..core.sums import DataBlock, Sums, SumTree, Tally, analyzer_of, first_block_size, most_copies, texts_in_block
from ..core.wording import brief, with_article
from ..data.batches import Batch, BatchSize, RowDigests, batch_sizes
from ..data.data import Data
from ..data.texts import LEAST_TEXTS, GroupNumbers, groups_as_list
from ..sources.activation_checks import check_lens, check_stream_sums, refuse_not_finite
from ..sources.model_description import ModelDescription
from ..sources.source import CanReadSites, OnServer, PartialSums
from .report_assembly import refuse_empty
from .run_description import FIRST, MAIN, Analysis, DataPart
from .run_identity import refuse_other_data_on_ranks
from .two_models import crossing, one_after_another, side_by_side

# Leaves of a run whose number is not known, for the memory of its sums.
TYPICAL_LEAVES = 1024
TITLES = {FIRST: "first pass", MAIN: "layers"}


class Step(NamedTuple):
    """Token counts of one batch, and a digest of all rows read so far.

    Attributes:
        measured: whether this process runs the kernels on the batch.
        batches: number of batches read so far, this one included.
        tokens: number of counted positions in each text.
        digest: SHA-256 of all rows read so far, the batch's own included.
        inputs: digest of these rows with their counted positions, labels and texts.
        rows: number of rows.
    """

    measured: bool
    batches: int
    tokens: tuple[int, ...]
    digest: str
    inputs: str
    rows: int


@dataclass
class PassState:
    """Progress of a pass over the data. The counts of a batch wait until its sums arrive.

    Attributes:
        tally: tally of the complete batches.
        names: names of the kernels.
        waiting: the waiting batches, in the order of the data.
    """

    tally: Tally
    names: tuple[str, ...]
    waiting: deque[Step] = field(default_factory=deque)

    def add(self, parts: Sequence[PartialSums], seconds: float = 0.0) -> None:
        """Add the sums and the counts of the next batches to `tally`.

        Args:
            parts: the sums.
            seconds: wall time of the whole pass so far.
        """
        steps = self.take(sum(part.count for part in parts))
        tokens_of_texts: list[int] = []
        for step in steps:
            if step.measured:
                tokens_of_texts += step.tokens
        remaining_texts = iter(tokens_of_texts)
        tree = self.tally.tree
        for part in parts:
            tokens = sum(islice(remaining_texts, part.count))
            tree = tree.add(DataBlock(part.count, tokens, sums_of(self.names, part.out)))
        # One assignment: an interrupt leaves a batch either counted with all its sums or not at all.
        self.tally = replace(_counted(self.tally, steps, seconds), tree=tree)

    def add_unmeasured(self, seconds: float = 0.0) -> None:
        """Move the counts of all waiting batches to `tally`. This process runs no kernels on these batches."""
        self.tally = _counted(self.tally, list(self.waiting), seconds)
        self.waiting.clear()

    def take(self, texts: int) -> list[Step]:
        """Remove and return the first waiting batches that together have at least `texts` measured texts.

        At the end of the data fewer texts may wait, as kernels round up to a whole leaf.
        """
        steps: list[Step] = []
        while texts > 0 and self.waiting:
            step = self.waiting.popleft()
            steps.append(step)
            if step.measured:
                texts -= len(step.tokens)
        return steps


def _counted(tally: Tally, steps: Sequence[Step], seconds: float) -> Tally:
    """Copy of `tally` with the batch, row, text and token counts of `steps` added. The sums stay the same."""
    return replace(
        tally,
        batches=steps[-1].batches if steps else tally.batches,
        sequences=tally.sequences + sum(step.rows for step in steps),
        texts=tally.texts + sum(len(step.tokens) for step in steps),
        tokens=tally.tokens + sum(sum(step.tokens) for step in steps),
        digest=steps[-1].digest if steps else tally.digest,
        inputs=steps[-1].inputs if steps else tally.inputs,
        seconds=seconds,
    )


@dataclass
class DataPass:
    """One pass over the data. It continues from a checkpoint and writes one.

    Attributes:
        analysis: models, data and analyzers.
        part: the batches to measure.
        name: "first" or "main".
        kernels: the kernels, by name.
        file: the file that keeps the tallies.
        tallies: tallies of all passes of the run, by name; `run` adds the tally of this pass.
        total: number of counted tokens in the data; None if not known.
        texts: number of texts in the measured batches; None if not known.
        first_sums: sums of the first pass over all data, by analyzer.
        state: sums so far, and the batches that wait for their sums.
    """

    analysis: Analysis
    part: DataPart
    name: str
    kernels: Mapping[str, AnyKernel]
    file: ResumableFile
    tallies: dict[str, Tally]
    total: int | None = None
    texts: int | None = None
    first_sums: Mapping[str, Sums] = field(default_factory=dict)
    state: PassState = field(init=False)

    def __post_init__(self) -> None:
        is_main = self.name == MAIN
        self.sources = list(self.analysis.sources) if is_main or self.analysis.first_needs_model else []
        self.analyzers = dict(self.analysis.analyzers)
        if not is_main:
            self.analyzers = {name: analyzer for name, analyzer in self.analyzers.items() if name in self.kernels}
        # A pass without a model reads tokens alone, those of all batches.
        self.within = self.part.within if self.sources else None
        start = 0
        if self.within is not None and self.part.counts is not None:
            start = self.within.start * self.part.counts.capacity
        # Jackknife blocks of known data do not depend on how the data is divided.
        self.first_block = first_block_size(self.texts) if self.analysis.intervals and is_main else None
        fresh = Tally(tree=SumTree(self.first_block, start))
        self.state = PassState(self.tallies.get(self.name) or fresh, tuple(self.kernels))
        self._began = time.monotonic() - self.state.tally.seconds
        self._memory_is_checked = False
        needs_lens = is_main and any(analyzer.needs.unembeds for analyzer in self.analyzers.values())
        self._lens_is_checked = not needs_lens

    def run(self) -> None:
        """Run the pass to the end of the data.

        Raises:
            LayersimError: activations are not finite, or the data differs from the data of the checkpoint.
        """
        if self.name == FIRST and self.state.tally.done:
            # The main pass reads the same data, and the digests of both are compared afterwards.
            return
        rows = rows_in_data(self.analysis.batches.data)
        is_remote = any(isinstance(source, OnServer) for source in self.sources)

        def summed() -> str:
            return f"The sums of {self.state.tally.tree.total().tokens} tokens are"

        with self.file.saved_on_interrupt(self._snapshot, summed), self._bar() as bar:
            for parts in self._partial_sums(bar.set_postfix_str):
                self._add(parts)
                # No variable holds sums while the next batch runs.
                del parts
                tokens = self.state.tally.tokens
                sequences = self.state.tally.sequences
                if rows is not None and self.total is None and self.within is None:
                    # Rows that are not read yet are taken to be as long as those that are.
                    bar.total = round(tokens * rows / max(1, sequences))
                bar.update(tokens - bar.n)
                if is_remote or self.file.due:
                    self.file.save(*self._snapshot())
            self.state.add_unmeasured(time.monotonic() - self._began)
            bar.update(self.state.tally.tokens - bar.n)
        self.state.tally = replace(self.state.tally, done=True)
        self.tallies[self.name] = self.state.tally
        self.file.save(*self._snapshot())

    def _add(self, parts: Sequence[PartialSums]) -> None:
        """Add the sums of a batch, and check the memory that the run needs after the first one."""
        self._refuse_not_finite(parts)
        self.state.add(parts, time.monotonic() - self._began)
        tree = self.state.tally.tree
        if tree.texts == sum(part.count for part in parts):
            self._check_memory(bytes_of(tree.total().sums), parts[0].count, len(parts))

    def read(self) -> Iterator[Batch]:
        """Yields the batches on which this process runs the kernels.

        Batches in the checkpoint are left out. Counts of all other batches join `state.waiting`.
        """
        resumed = self.state.tally
        batches_read = 0
        for step, batch in self._batches_with_steps():
            batches_read = step.batches
            if batches_read == resumed.batches and step.inputs != resumed.inputs:
                differing = "rows" if step.digest != resumed.digest else "counted positions, labels or texts"
                raise _other_data(f"other {differing} among the first {batches_read} batches")
            if batches_read <= resumed.batches:
                continue
            if resumed.done:
                raise _other_data(f"more than the {resumed.batches} batches of the finished run")
            if step.measured:
                self._check(batch)
            self.state.waiting.append(step)
            if step.measured:
                yield batch
        if batches_read < resumed.batches:
            raise _other_data(f"only {batches_read} batches, and the checkpoint has {resumed.batches}")

    def _batches_with_steps(self) -> Iterator[tuple[Step, Batch]]:
        """Yields all batches with their counts. Rank and shard decide which batches this process measures."""
        batches = self.analysis.batches
        deal = self.part.deal
        digests = RowDigests(batches.data.selection.marked)
        # Number of batches so far with a counted position.
        with_counted = 0
        # Number of texts before the next measured batch.
        text = self.state.tally.tree.start
        for number, batch in enumerate(batches):
            digests.add(batch)
            measured = bool(batch.counted.any())
            if measured:
                self._settle(batch)
                is_of_rank = number % deal.copies == deal.copy
                is_of_shard = self.within is None or with_counted in self.within
                measured = is_of_rank and is_of_shard
                with_counted += 1
            step = Step(measured, number + 1, batch.tokens_of_texts, digests.rows, digests.inputs, len(batch.tokens))
            yield step, self._with_leaf(batch, text)
            if measured:
                text += batch.capacity

    def _with_leaf(self, batch: Batch, text: int) -> Batch:
        """Copy of a batch that sets `leaf` and `block`, which limit how many texts are summed together.

        Args:
            batch: the batch.
            text: index of the first text of the batch; with intervals, both attributes depend on it.
        """
        leaf = min(TEXTS_OF_POOL, batch.capacity)
        if self.first_block is None:
            return replace(batch, leaf=leaf)
        return replace(batch, leaf=min(leaf, texts_in_block(text, 1)), block=texts_in_block(text, self.first_block))

    def _settle(self, batch: Batch) -> None:
        """Find the order of a model's sites, if unknown, by running the model on the batch. Then the sites are checked."""
        unsettled = []
        for source in self.sources:
            if isinstance(source, CanReadSites) and not source.is_settled:
                unsettled.append(source)
        described = [(source.model.basis, source.model.head) for source in unsettled]
        for source in unsettled:
            source.settle(batch)
            check_stream_sums(source, batch)
        if unsettled:
            self.analysis.plan.check_sites(self.analysis.analyzers)
        if described != [(source.model.basis, source.model.head) for source in unsettled]:
            # The forward pass has shown that the blocks or the head are of another kind than their description said.
            for name, models in self.analysis.plan.models().items():
                self.analysis.analyzers[name].check(*models)

    def _check_memory(self, sizes: Mapping[str, int], leaf: int, at_once: int) -> None:
        """Raise an error if the sums of an analyzer exceed its limit, see `check_memory`.

        Args:
            sizes: bytes of the sums of each analyzer.
            leaf: number of texts in a leaf of the first batch.
            at_once: number of leaves of the first batch.
        """
        texts = texts_in_data(self.analysis.batches.data)
        leaves = TYPICAL_LEAVES if texts is None else math.ceil(texts / leaf)
        check_memory(sizes, leaves, self.first_block is not None, self.analyzers, at_once)

    def _check(self, batch: Batch) -> None:
        """Raise an error if an analyzer cannot read the batch. Before the first batch, memory and the lens are checked too."""
        for analyzer in self.analyzers.values():
            analyzer.check_batch(batch, cast(ModelDescription, self.analysis.batches.model))
        if not self._memory_is_checked:
            self._memory_is_checked = True
            models = self.analysis.plan.models()
            sizes = {}
            for name, analyzer in self.analyzers.items():
                if analyzer.needs.largest_sums == self.name:
                    # A number of a sum is a float64, of 8 bytes.
                    sizes[name] = round(8 * analyzer.sum_numbers(*models[name]))
            self._check_memory(sizes, batch.leaf, batch.leaf_texts // batch.leaf)
        if not self._lens_is_checked:
            for source in self.sources:
                if source.model.head is not None:
                    check_lens(source, batch)
        self._lens_is_checked = True

    def _bar(self) -> Any:
        return tqdm(
            desc=TITLES[self.name],
            unit="token",
            unit_scale=True,
            total=self.total,
            initial=self.state.tally.tokens,
            disable=None if rank_and_size()[0] == 0 else True,
        )

    def _partial_sums(self, show: Callable[[str], None]) -> Iterator[list[PartialSums]]:
        """Yields the sums of the remaining batches, in the order of the data."""
        batches = self.read()
        if not self.sources:
            return self._sums_without_model(batches)
        single = self.analysis.single_source
        if single is not None:
            return single.stream(batches, self.kernels, self.state.tally.tree.end, show, self.first_block)
        one_at_a_time = any(analyzer.needs.one_model_at_a_time for analyzer in self.analyzers.values())
        if (self.name == MAIN and one_at_a_time) or self.analysis.is_remote:
            return one_after_another(self.sources, batches, self.analyzers, self.analysis.plan, show)
        return side_by_side(self.sources, batches, self.kernels)

    def _sums_without_model(self, batches: Iterator[Batch]) -> Iterator[list[PartialSums]]:
        """Yields the sums of kernels that read tokens alone."""
        for batch in batches:
            # No variable holds sums while the next batch runs.
            yield [PartialSums(batch.leaf, *reduced) for reduced in run_batch(_run_without_model, batch, self.kernels)]

    def _refuse_not_finite(self, parts: Sequence[PartialSums]) -> None:
        names = [source.sites for source in self.sources]
        tally = self.state.tally
        waiting = self.state.waiting
        texts_read = tally.texts + sum(len(step.tokens) for step in waiting)
        rows_read = tally.sequences + sum(step.rows for step in waiting)
        unit = "rows" if rows_read == texts_read else "texts"
        start = tally.tree.end
        for part in parts:
            # The last leaf of the data may be larger than the rest of the data.
            end = min(start + part.count, max(texts_read, start + 1))
            refuse_not_finite(part.not_finite, names, f"{unit} {start} to {end - 1}")
            start += part.count

    def _snapshot(self) -> Snapshot:
        return self.analysis.snapshot(self.part, {**self.tallies, self.name: self.state.tally})


def run(analysis: Analysis, part: DataPart, file: ResumableFile, tallies: dict[str, Tally], blocking: bool = True) -> DataPass:
    """Run the passes over one part of the data. Batches in the checkpoint are not run again.

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
    first_kernels = analysis.first_kernels
    first_sums: dict[str, Sums] = {}
    # Sizes of batches of a run on servers are printed before it.
    sizes = batch_sizes(analysis.batches) if analysis.is_remote and not analysis.batches.one_shot else None
    tokens = analysis.batches.data.max_tokens
    texts = None
    if sizes is not None:
        runs_first = analysis.first_needs_model and not tallies.get(FIRST, Tally()).done
        runs_main = part.last_pass == MAIN
        measured_sizes = sizes if part.within is None else sizes[part.within.start : part.within.stop]
        _announce(analysis, runs_first + runs_main, measured_sizes)
        tokens = sum(size.tokens for size in sizes)
        texts = sum(size.texts for size in sizes)
    if part.counts is not None:
        tokens = part.counts.tokens
        texts = part.counts.measured_texts
    with analysis.running():
        if first_kernels:
            data_pass = DataPass(analysis, part, FIRST, first_kernels, file, tallies, tokens, texts)
            data_pass.run()
        if part.last_pass == MAIN:
            if first_kernels:
                refuse_other_data_on_ranks(tallies[FIRST])
                first_sums = add_over_ranks(tallies[FIRST].sums(first_kernels), part.deal)
                if not any(first_sums.values()):
                    refuse_empty(tallies[FIRST].tokens, tallies[FIRST].sequences)
            main_kernels = analysis.plan.kernels(analysis.analyzers, first_sums) | analysis.kernels_of_texts
            data_pass = DataPass(analysis, part, MAIN, main_kernels, file, tallies, tokens, texts, first_sums)
            if blocking:
                data_pass.run()
    expected = part.counts or tallies.get(FIRST)
    for tally in tallies.values():
        if expected is not None and tally.done and tally.inputs != expected.inputs:
            raise LayersimError(
                f"`data` gave different rows on the second data pass: {expected.tokens} tokens on the first pass, and "
                f"{tally.tokens} on the second. Pass list(data)."
            )
    return data_pass


def _announce(analysis: Analysis, passes: int, sizes: Sequence[BatchSize]) -> None:
    """Print the cost of a run on servers before it starts.

    Args:
        analysis: models, data and analyzers.
        passes: number of passes that run the model.
        sizes: sizes of the batches.
    """
    source = analysis.single_source
    if source is None:
        # Printed also where stderr is no terminal, unlike progress bars.
        tqdm.write(crossing(analysis.analyzers, len(analysis.sources), analysis.plan, sizes), file=sys.stderr)
    elif sizes:
        assert isinstance(source, OnServer)
        rows, positions = max((size.pass_size for size in sizes), key=lambda size: size[1])
        source.refuse_larger(rows, positions)
        forward_passes = sum(math.ceil(size.rows / rows) for size in sizes)
        tokens = sum(size.tokens for size in sizes)
        tqdm.write(source.plan(passes, forward_passes, tokens), file=sys.stderr)


def _run_without_model(batch: Batch, kernels: Mapping[str, Kernel]) -> Reduced:
    return [], reduce(kernels, tokens_alone(batch))[1]


def _other_data(content: str) -> LayersimError:
    return LayersimError(f"`data` has {content}; it must be the data of the checkpoint.")


def rows_in_data(data: Data) -> int | None:
    """Number of rows in the data; None if not known.

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


def texts_in_data(data: Data) -> int | None:
    """Largest number of texts that the data may have; None if not known.

    Args:
        data: the data of the run.

    Examples:
        >>> texts_in_data(Data(list("abcdef"))), texts_in_data(Data(list("abcdef"), groups=[0, 0, 1, 1, 2, 2]))
        (6, 3)
    """
    values = groups_as_list(data.groups)
    if values is not None:
        numbers = GroupNumbers(values)
        return len({numbers.of(row, None) for row in range(len(values))})
    rows = rows_in_data(data)
    if rows is not None and rows < LEAST_TEXTS and data.groups is None:
        # The rows that are cut from a few texts stand for texts.
        return None
    return rows


def bytes_of(sums: Mapping[str, Sums]) -> dict[str, int]:
    """Bytes of the sums of each analyzer.

    Args:
        sums: sums of one batch, by kernel.
    """
    sizes = Counter[str]()
    for kernel, kernel_sums in sums.items():
        sizes[analyzer_of(kernel)] += sum(value.nbytes for value in kernel_sums.fields.values())
    return dict(sizes)


def check_memory(
    sizes: Mapping[str, int],
    leaves: int,
    intervals: bool,
    analyzers: Mapping[str, Analyzer] = MappingProxyType({}),
    at_once: int = 1,
) -> None:
    """Raise an error if the sums of an analyzer exceed its limit; warn if all sums exceed the free memory.

    Sums are added in pairs, so several copies are held at once.

    Args:
        sizes: bytes of the sums of each analyzer.
        leaves: number of groups of texts (leaves) whose sums are added, or an upper limit.
        intervals: whether jackknife blocks are kept.
        analyzers: analyzers by name, which may have a limit `max_memory_gb`.
        at_once: number of leaves that one batch returns.

    Raises:
        LayersimError: the sums of an analyzer need more than its limit.
    """
    copies = most_copies(max(leaves, 1), intervals, at_once)
    needs = Counter({name: copies * size for name, size in sizes.items()})
    for name, need in needs.items():
        limit = getattr(analyzers.get(name), "max_memory_gb", math.inf)
        if need > limit * 1e9:
            raise LayersimError(
                f"`max_memory_gb` is {limit:g}, but the run holds {copies} copies of the sums of {name!r}, which need "
                f"{need / 1e9:.2g} GB. Read fewer sites with `at`."
            )
    free = psutil.virtual_memory().available
    if needs.total() > free:
        warn(
            f"The sums of this run may not fit into memory: the run holds {copies} copies of them, which need up to "
            f"{in_words(needs.total())}, and {in_words(free)} are free. "
            f"{needs.most_common(1)[0][0]!r} has the largest sums. Read fewer sites with at=[...]"
            f"{', or measure without intervals' if intervals else ''}."
        )


def sums_of(names: Sequence[str], out: Mapping[str, Any]) -> dict[str, Sums]:
    """Convert the outputs of kernels to `Sums`.

    Args:
        names: names of the kernels.
        out: outputs by kernel.

    Raises:
        LayersimError: a value that a kernel returned is not a tensor.
    """
    sums = {}
    for name in names:
        output = out[name]
        if isinstance(output, Sums):
            sums[name] = output
            continue
        for key, value in output.items():
            if not isinstance(value, Tensor):
                raise LayersimError(
                    f"The kernel of {analyzer_of(name)!r} must return a dict of tensors; its {key!r} is {brief(value)}, "
                    f"{with_article(type(value).__name__)}."
                )
        sums[name] = Sums.of(output)
    return sums
