"""One pass over the data: runs kernels on every batch, adds up what they return and saves the sums at intervals."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast

from tqdm.auto import tqdm

from ..analyzers.base import Analyzer
from ..core.blocks import DataBlock, rows_in_block
from ..core.data_pass_progress import Tally
from ..core.distributed import ALONE, Deal, rank_and_size
from ..core.errors import LayersimError
from ..core.resumable_file import ResumableFile, Snapshot
from ..core.sum_tree import SumTree
from ..core.sums import Sums
from ..data.batches import Batch, Batches
from ..data.digest import fingerprint, new_digest
from ..models.activation_checks import lens_gap, refuse_not_finite, refuse_other_logits
from ..models.hooks import kernels_alone
from ..models.model_info import Model
from ..models.out_of_memory import refusing_full_memory
from ..models.pools import ROWS, AnyKernel, run_batch
from ..models.source import PartialSums, Source
from ..models.stream_sums_check import check_stream_sums
from ..models.view import Kernel, Reduced, reduce, tokens_alone
from .checkpoint import tallies_snapshot
from .cross_model_statistics import exchange
from .long_run_notice import LongRunNotice, rows_in_data
from .memory_of_sums import refuse_large_blocks, refuse_sums_over_limits, warn_of_large_sums
from .site_plan import SitePlan

# Leaves of a run whose number is not known, for the memory of its sums.
TYPICAL_LEAVES = 1024
TITLES = {"first": "first pass", "main": "layers"}


class Step(NamedTuple):
    """A batch that was read but whose sums have not arrived, and the counts that it adds to the tally.

    Attributes:
        measured: whether the model of this process runs on it.
        batches: number of batches read up to and including it.
        rows: number of its rows.
        tokens: number of the counted positions of each of its leaves; one number for a batch on which no model runs.
        digest: SHA-256 of all rows up to and including its own.
        leaf: rows of a leaf.
    """

    measured: bool
    batches: int
    rows: int
    tokens: tuple[int, ...]
    digest: str
    leaf: int = 1


@dataclass
class PassState:
    """Progress of a pass: sums and counts of the complete batches, and the batches that were read and have no sums yet.

    Attributes:
        tally: of the batches that are complete.
        names: of the analyzers.
        waiting: the batches that wait, in the order of the data.
    """

    tally: Tally
    names: tuple[str, ...]
    waiting: deque[Step] = field(default_factory=deque)

    def add(self, parts: Sequence[PartialSums], seconds: float = 0.0) -> None:
        """Add the sums of all leaves of the next batches to the tally, and count these batches."""
        steps = take_steps(self.waiting, sum(part.count for part in parts))
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
        """Count the last batches of the data, on which no model of this process runs."""
        self.tally = _counted(self.tally, list(self.waiting), seconds)
        self.waiting.clear()

    def close(self) -> None:
        """Mark the pass as complete."""
        self.tally = replace(self.tally, done=True)


def take_steps(waiting: deque[Step], rows: int) -> list[Step]:
    """Remove and return the first steps of `waiting`, up to so many rows of those on which a model runs."""
    taken: list[Step] = []
    while rows > 0 and waiting:
        taken.append(waiting.popleft())
        rows -= taken[-1].measured * len(taken[-1].tokens) * taken[-1].leaf
    return taken


def sums_so_far(tree: SumTree) -> dict[str, Sums]:
    """Sums of each analyzer that has any, to which further ones are added."""
    return {name: sums for node in tree.nodes for name, sums in node.sums.items() if sums}


def _counted(tally: Tally, steps: Sequence[Step], seconds: float) -> Tally:
    """The tally with the counts of more batches added; its sums are unchanged."""
    return replace(
        tally,
        batches=steps[-1].batches if steps else tally.batches,
        sequences=tally.sequences + sum(step.rows for step in steps),
        tokens=tally.tokens + sum(sum(step.tokens) for step in steps),
        digest=steps[-1].digest if steps else tally.digest,
        seconds=tally.seconds + seconds,
    )


@dataclass
class PassReader:
    """The batches of a pass on which a model has to run, without those that a checkpoint holds already.

    Each batch that is read is checked and joins `state.waiting`.

    Attributes:
        batches: the data.
        analyzers: by name; each may refuse a batch.
        state: of the pass.
        plan: the sites that each analyzer reads.
        lens_of: the source whose lens is compared with its logits on the first batch, or None.
        sources: the models; the first batch shows what is not known of their sites before a forward pass.
        deal: which batches this process takes.
        within: numbers of the batches with a counted position that this process takes; None for all that it is dealt.
        first_block: number of rows in the first block of the data; the first batches then have small leaves. None to keep no
            blocks.
    """

    batches: Batches
    analyzers: Mapping[str, Analyzer]
    state: PassState
    plan: SitePlan
    lens_of: Source | None = None
    sources: Sequence[Source] = ()
    deal: Deal = ALONE
    within: range | None = None
    first_block: int | None = None

    def __iter__(self) -> Iterator[Batch]:
        held, digest, number, marked = self.state.tally, new_digest(), 0, self.batches.data.selection.marked
        counted, taken = -1, 0 if self.within is None else self.within.start
        for number, batch in enumerate(self.batches, start=1):
            fingerprint(digest, batch, marked)
            self._settle(batch)
            has_counted = bool(batch.counted.any())
            counted += has_counted
            measured = has_counted and self._takes(number - 1, counted)
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
                self._check(batch)
            # Of rows that an earlier pass over the same data, or another process, may have counted: one rule for all.
            batch = replace(batch, leaf=min(ROWS, batch.capacity))
            if self.first_block is not None:
                leaf, block = min(batch.leaf, rows_in_block(index, 1)), rows_in_block(index, self.first_block)
                batch = replace(batch, leaf=leaf, block=block)
            tokens = batch.leaf_tokens() if measured else (int(batch.counted.sum()),)
            step = Step(measured, number, len(batch.tokens), tokens, digest.hexdigest(), batch.leaf)
            self.state.waiting.append(step)
            if measured:
                yield batch
        if number < held.batches:
            raise _other_data(f"{number} batches, where {held.batches} had been read")

    def _takes(self, number: int, counted: int) -> bool:
        """Whether this process takes a batch, by its number among all and among those with a counted position."""
        return number % self.deal.copies == self.deal.copy and (self.within is None or counted in self.within)

    def _settle(self, batch: Batch) -> None:
        """Find out from the first batch with a counted position what is not known of the sites before a forward pass."""
        unsettled = [source for source in self.sources if not source.is_settled]
        if not unsettled or not bool(batch.counted.any()):
            return
        for source in unsettled:
            source.settle(batch)
            check_stream_sums(source, source.stream_sums(), batch)
        self.plan.check_sites(self.analyzers, self.sources)

    def _check(self, batch: Batch) -> None:
        """Refuse a batch that an analyzer cannot take, and on the first one a lens that differs from the model's logits."""
        for analyzer in self.analyzers.values():
            analyzer.check_batch(batch, cast(Model, self.batches.model))
        # An analyzer may measure a model without a head too, and omit its logits.
        if self.lens_of is not None and self.lens_of.model.head is not None:
            refuse_other_logits(lens_gap(self.lens_of.model, partial(self.lens_of.unembed_gap, batch)), self.lens_of.model)
            self.lens_of = None


@dataclass
class DataPass:
    """One pass of kernels over the data, which continues from a checkpoint and writes one.

    Attributes:
        label: the pass's key in the checkpoint: "first" or "main".
        sources: the models: none for kernels that read tokens only, one, or several to compare.
        batches: the data.
        analyzers: by name.
        kernels: of the analyzers, by the same names.
        tallies: of all passes of the run, by label; `run` adds this pass's.
        checkpoint: the file that keeps the tallies.
        plan: the sites that each analyzer reads.
        total: number of counted tokens in the data, None where it is not known.
        deal: which batches this process takes.
        first_block: number of rows in a block of the data at the start, see `SumTree`; None to keep no blocks.
        within: numbers of the batches with a counted position that this process takes; None for all that it is dealt.
        start: number of rows before those batches.
        state: sums so far, and the batches that wait for theirs.
    """

    label: str
    sources: Sequence[Source]
    batches: Batches
    analyzers: Mapping[str, Analyzer]
    kernels: Mapping[str, AnyKernel]
    tallies: MutableMapping[str, Tally]
    checkpoint: ResumableFile
    plan: SitePlan
    total: int | None = None
    deal: Deal = ALONE
    first_block: int | None = None
    within: range | None = None
    start: int = 0
    state: PassState = field(init=False)

    def __post_init__(self) -> None:
        fresh = Tally(tree=SumTree(self.first_block, self.start))
        self.state = PassState(self.tallies.get(self.label) or fresh, tuple(self.kernels))
        self._added_at = time.monotonic()

    def run(self) -> None:
        """Run the pass to the end of the data, and put its tally into `tallies`.

        Raises:
            LayersimError: activations are not finite, or the data differs from that of the checkpoint.
        """
        if self.label == "first" and self.state.tally.done:
            # The main pass reads the same data, and the digests of both are compared afterwards.
            return
        is_remote = any(source.is_remote for source in self.sources)
        notice = LongRunNotice(self.total, rows_in_data(self.batches.data), self.sources)
        with self.checkpoint.saved_on_interrupt(self._snapshot, self._summed), self._bar() as bar:
            for parts in self._partial_sums(bar.set_postfix_str):
                self._refuse_not_finite(parts)
                self.state.add(parts, self._seconds())
                if self.state.tally.tree.rows == sum(part.count for part in parts):
                    self._check_memory(sums_so_far(self.state.tally.tree), parts[0].count)
                bar.update(self.state.tally.tokens - bar.n)
                notice.note(self.state.tally)
                if is_remote or self.checkpoint.due:
                    self.checkpoint.save(*self._snapshot())
            self.state.add_unmeasured(self._seconds())
            bar.update(self.state.tally.tokens - bar.n)
        self.state.close()
        self.tallies[self.label] = self.state.tally
        self.checkpoint.save(*self._snapshot())

    def _check_memory(self, sums: Mapping[str, Sums], leaf: int) -> None:
        """Refuse or warn of sums that do not fit into memory, by those of the first batches, of leaves of so many rows."""
        rows = rows_in_data(self.batches.data)
        leaves = TYPICAL_LEAVES if rows is None else -(-rows // leaf)
        refuse_sums_over_limits(sums, self.analyzers, leaves, self.first_block is not None)
        if self.first_block is not None:
            refuse_large_blocks(sums)
        else:
            # The number of leaves is not known to all runs; its logarithm counts.
            warn_of_large_sums(sums, leaves)

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
        """Partial sums of the remaining batches, in the order of the data."""
        sources, batches = list(self.sources), self._reader()
        if not sources:
            return ([PartialSums(batch.leaf, *own) for own in run_batch(_tokens_of, batch, self.kernels)] for batch in batches)
        if len(sources) == 1:
            return sources[0].stream(batches, self.kernels, self.state.tally.tree.end, show, self.first_block)
        by_statistics = self.label == "main" and any(analyzer.by_statistics for analyzer in self.analyzers.values())
        if by_statistics or any(source.is_remote for source in sources):
            return exchange(sources, batches, self.analyzers, self.plan, show)
        run = self._side_by_side
        return ([PartialSums(batch.leaf, *own) for own in run_batch(run, batch, self.kernels)] for batch in batches)

    def _reader(self) -> Iterator[Batch]:
        reads_head = self.label == "main" and any(analyzer.needs_unembed for analyzer in self.analyzers.values())
        lens_of = self.sources[0] if self.sources and reads_head else None
        about = (self.state, self.plan, lens_of, self.sources, self.deal, self.within, self.first_block)
        return iter(PassReader(self.batches, self.analyzers, *about))

    def _side_by_side(self, batch: Batch, kernels: Mapping[str, Kernel]) -> Reduced:
        """One forward pass of each model, and kernels that take the activations of all."""
        views = [source.collect(batch) for source in self.sources]
        with kernels_alone(), refusing_full_memory(batch, ", ".join(kernels)):
            return reduce(kernels, *views)

    def _refuse_not_finite(self, parts: Sequence[PartialSums]) -> None:
        names = [source.sites for source in self.sources]
        start = self.state.tally.tree.end
        # The last leaf of the data may be larger than the rest of the data.
        read = self.state.tally.sequences + sum(step.rows for step in self.state.waiting)
        for part in parts:
            last = min(start + part.count, max(read, start + 1)) - 1
            refuse_not_finite(part.not_finite, names, f"rows {start} to {last}")
            start += part.count

    def _seconds(self) -> float:
        """Seconds since sums were last added."""
        before, self._added_at = self._added_at, time.monotonic()
        return self._added_at - before

    def _snapshot(self) -> Snapshot:
        """The tallies of all passes, for the checkpoint."""
        return tallies_snapshot({**self.tallies, self.label: self.state.tally})

    def _summed(self) -> str:
        """The first words of the note on where an interrupted run was saved."""
        return f"The sums of {self.state.tally.tree.total().tokens} tokens are"


def _tokens_of(batch: Batch, kernels: Mapping[str, Kernel]) -> Reduced:
    """Kernels that read tokens and labels alone."""
    return [], reduce(kernels, tokens_alone(batch))[1]


def _other_data(given: str) -> LayersimError:
    return LayersimError(f"`data` differs from the data of the checkpoint: it has {given}.")


def sums_of(names: Sequence[str], out: Mapping[str, Any], before: Mapping[str, Sums]) -> dict[str, Sums]:
    """What kernels returned for the next batches, as sums by analyzer.

    Args:
        names: of the analyzers.
        out: by analyzer.
        before: sums of other batches, to which these will be added; empty for the first.

    Raises:
        LayersimError: a kernel returned something that cannot be added; its analyzer is named.
    """
    return {name: own for name, _, own in _addable({name: before.get(name, Sums()) for name in names}, out)}


def _addable(sums: Mapping[str, Sums], out: Mapping[str, Any]) -> Iterator[tuple[str, Sums, Sums]]:
    for name, before in sums.items():
        try:
            more = out[name]
            own = more if isinstance(more, Sums) else Sums.of(more)
            before.refuse_others(own)
        except (AttributeError, KeyError, ValueError) as error:
            raise LayersimError(
                f"The kernel of {name!r} must return a dict of tensors whose shapes do not depend on the batch: {error}"
            ) from error
        yield name, before, own
