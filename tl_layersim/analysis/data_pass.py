"""One pass over the data: batches to wherever the models are, sums of them into a tally, now and then a checkpoint."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

from tqdm.auto import tqdm

from ..analyzers.base import Analyzer
from ..core.distributed import ALONE, Deal, rank_and_size
from ..core.errors import LayersimError
from ..core.pairwise_summation import fold, push
from ..core.resumable import ResumableFile
from ..core.sums import Sums
from ..core.tally import Tally
from ..data.batches import Batch, Batches
from ..data.digest import fingerprint, new_digest
from ..models.hooks import kernels_alone
from ..models.model_info import Model
from ..models.source import PartialSums, Source
from ..models.validation import lens_gap, refuse_not_finite, refuse_other_logits
from ..models.view import Kernel, reduce, tokens_alone
from .checkpoint import tallies_snapshot
from .cross_model import exchange


class Step(NamedTuple):
    """A batch that was read and is not in the tally yet: how the tally stands once it is."""

    measured: bool
    batches: int
    rows: int
    tokens: int
    digest: str


def one_pass(
    label: str,
    title: str,
    sources: list[Source],
    batches: Batches,
    analyzers: Mapping[str, Analyzer],
    kernels: Mapping[str, Kernel],
    tallies: dict[str, Tally],
    checkpoint: ResumableFile,
    total: int | None = None,
    deal: Deal = ALONE,
) -> None:
    """One pass over the data into `tallies[label]`, from wherever a checkpoint left it.

    Args:
        label: key of the tally: "first" or "main".
        title: of the progress bar.
        sources: where views come from: none for tokens alone, one, or two to compare.
        batches: the data.
        analyzers: those whose kernels run, by name.
        kernels: theirs.
        tallies: of all passes; this one's is read and written.
        checkpoint: file that keeps them.
        total: how many tokens there will be, where that is known.
        deal: which batches this process takes.
    """
    tally = tallies.setdefault(label, Tally({name: Sums() for name in kernels}))
    if tally.done and label == "first":
        # The main pass sees the same data, and the two digests are compared in the end.
        return
    unsure = bool(sources) and label == "main" and any(analyzer.needs_unembed for analyzer in analyzers.values())
    steps: deque[Step] = deque()
    bar = tqdm(
        desc=title,
        unit="token",
        unit_scale=True,
        total=total,
        initial=tally.tokens,
        disable=None if rank_and_size()[0] == 0 else True,
    )
    is_remote = any(source.is_remote for source in sources)
    block = max((source.sum_group for source in sources), default=1) if len(sources) == 1 else 1
    clock = time.monotonic()
    kept = checkpoint.saved_on_interrupt(
        lambda: tallies_snapshot(tallies), lambda: f"The sums of {tallies[label].tokens} tokens are"
    )
    with kept, bar:
        unsettled = [source for source in sources if source.model.stream == "unknown"]
        reading = read(batches, analyzers, tally, steps, sources[0] if unsure else None, unsettled, deal)
        for parts in _run(sources, reading, analyzers, kernels, tally.measured, bar.set_postfix_str):
            names = [source.model.layers for source in sources]
            for part in parts:
                refuse_not_finite(part.not_finite, names, _which(tally.measured, part.count))
            now = time.monotonic()
            # One assignment: an interrupt finds a batch either counted with all its sums or not at all.
            tallies[label] = tally = settle(tally, parts, steps, block, now - clock)
            clock = now
            bar.update(tally.tokens - bar.n)
            if is_remote or checkpoint.due:
                checkpoint.save(*tallies_snapshot(tallies))
        tallies[label] = tally = settle(tally, [], steps, block, time.monotonic() - clock)
        bar.update(tally.tokens - bar.n)
    tallies[label] = closed(tally)
    checkpoint.save(*tallies_snapshot(tallies))


def read(
    batches: Batches,
    analyzers: Mapping[str, Analyzer],
    tally: Tally,
    steps: deque[Step],
    unsure: Source | None,
    unsettled: Sequence[Source] = (),
    deal: Deal = ALONE,
) -> Iterator[Batch]:
    """The batches that a model has to run on, after those of a checkpoint; each that is read leaves a step.

    Args:
        batches: the data.
        analyzers: by name.
        tally: of the pass so far.
        steps: is added to.
        unsure: whose lens is yet to be compared with its logits.
        unsettled: those of which a forward pass is to show whether their modules hand on one stream.
        deal: which batches this process takes.
    """
    digest, resumed, seen = new_digest(), tally.batches, 0
    for index, batch in enumerate(batches):
        fingerprint(digest, batch)
        seen = index + 1
        if unsettled and bool(batch.counted.any()):
            for source in unsettled:
                source.settle(batch)
                for analyzer in analyzers.values():
                    analyzer.check_sites(source.model)
            unsettled = ()
        if index < resumed:
            if seen == resumed and digest.hexdigest() != tally.digest:
                raise _other_data(f"other rows among the first {resumed} batches")
            continue
        if tally.done:
            raise _other_data(f"more than the {resumed} batches of the finished run")
        measured = index % deal.copies == deal.copy and bool(batch.counted.any())
        if measured:
            for analyzer in analyzers.values():
                analyzer.check_batch(batch, cast(Model, batches.model))
            if unsure is not None:
                refuse_other_logits(lens_gap(unsure.model, partial(unsure.unembed_gap, batch)), unsure.model)
                unsure = None
        steps.append(Step(measured, seen, len(batch.tokens), int(batch.counted.sum()), digest.hexdigest()))
        if measured:
            yield batch
    if seen < resumed:
        raise _other_data(f"{seen} batches, where {resumed} had been read")


def _run(
    sources: list[Source],
    batches: Iterator[Batch],
    analyzers: Mapping[str, Analyzer],
    kernels: Mapping[str, Kernel],
    start: int,
    say: Callable[[str], None],
) -> Iterator[list[PartialSums]]:
    if not sources:
        return ([PartialSums(1, [], reduce(kernels, tokens_alone(batch))[1])] for batch in batches)
    if len(sources) == 1:
        return sources[0].stream(batches, kernels, start, say)
    if any(source.is_remote for source in sources):
        return exchange(sources, batches, analyzers, say)
    return ([_together(sources, batch, kernels)] for batch in batches)


def _together(sources: list[Source], batch: Batch, kernels: Mapping[str, Kernel]) -> PartialSums:
    views = [source.collect(batch) for source in sources]
    with kernels_alone():
        return PartialSums(1, *reduce(kernels, *views))


def settle(tally: Tally, parts: Iterable[PartialSums], steps: deque[Step], block: int, seconds: float) -> Tally:
    """The tally with these parts in it, and with the steps that they belong to; without parts, with all steps that are left."""
    sums, pending = tally.sums, list(tally.pending)
    count = 0
    for part in parts:
        push(pending, part.count, add_sums({name: Sums() for name in sums}, part.out), add_sums)
        count += part.count
        if pending[0][0] >= block:
            sums = add_sums(sums, pending.pop(0)[1])
    measured, rows, tokens, last = 0, 0, 0, None
    while steps and not (count and measured == count):
        last = steps.popleft()
        measured, rows, tokens = measured + last.measured, rows + last.rows, tokens + last.tokens
    return Tally(
        sums,
        tally.batches if last is None else last.batches,
        tally.sequences + rows,
        tally.tokens + tokens,
        tally.digest if last is None else last.digest,
        tally.seconds + seconds,
        tally.done,
        tuple(pending),
        tally.measured + measured,
    )


def closed(tally: Tally) -> Tally:
    """The tally of a pass that is over: with all that was pending in its sums."""
    sums = tally.sums if not tally.pending else add_sums(tally.sums, fold(list(tally.pending), add_sums))
    return replace(tally, sums=sums, pending=(), done=True)


def _which(start: int, count: int) -> str:
    return f"batch {start}" if count == 1 else f"batches {start} to {start + count - 1}"


def _other_data(given: str) -> LayersimError:
    return LayersimError(
        "The data is not that of the checkpoint.",
        given=given,
        expected="the same data in the same order",
        do="pass the data of the interrupted run, or another checkpoint path",
    )


def add_sums(sums: Mapping[str, Sums], out: Mapping[str, Any]) -> dict[str, Sums]:
    """The sums with one batch more, or with other sums; an error names the analyzer whose kernel gives what cannot be added."""
    total = {}
    for name, before in sums.items():
        try:
            more = out[name]
            total[name] = before + (more if isinstance(more, Sums) else Sums.of(more))
        except (AttributeError, KeyError, ValueError) as error:
            raise LayersimError(
                f"What the kernel of {name!r} returned cannot be added up.",
                given=str(error),
                expected="a dict of tensors whose names and shapes do not depend on the batch",
                do="sum over the token axis inside the kernel",
            ) from error
    return total


class Size(NamedTuple):
    """Of a batch: its counted tokens, its rows, and all its positions."""

    tokens: int
    rows: int
    positions: int


def batch_sizes(batches: Batches) -> list[Size]:
    """The size of each batch that has something to measure. Reads the data once."""
    return [
        Size(int(batch.counted.sum()), len(batch.tokens), batch.tokens.numel())
        for batch in batches
        if bool(batch.counted.any())
    ]
