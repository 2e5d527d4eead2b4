"""Worker: turns rows into the sums of analyzers, in Spark, `concurrent.futures` or any other engine that runs functions."""

from __future__ import annotations

import copy
import hashlib
import os
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from ..analysis.api import analyze
from ..analysis.merging import merged_report
from ..analysis.shard_files import MAIN, DataCounts, ShardPart, read_part
from ..analysis.site_plan import DEFAULT, AtArgument
from ..analysis.validation import AnalyzersArgument, choose_analyzers
from ..core.argument_checks import typed
from ..core.blocks import DataBlock
from ..core.data_pass_progress import Tally
from ..core.errors import LayersimError
from ..core.results import Report
from ..core.sum_tree import SumTree
from ..data.data import Data
from ..models.open import OpenedModel
from ..models.source import Source
from ..remote.open import open_source
from .model_copy import loaded, refuse_model

# What a call of a worker returns, or the path of a file that holds it.
PartArgument: TypeAlias = bytes | str | os.PathLike[str]
# Models of this process by worker, because engines copy a worker for each call.
_models: dict[str, OpenedModel] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class KeptSource:
    """The model of a worker, opened by its first call in a process.

    Attributes:
        source: of the model.
    """

    source: Source

    def open_source(self, layers: list[str] | None, unembed: list[str] | None) -> Source:
        """A copy of the source, which was opened with `layers` and `unembed`.

        A run finds out what modules that were named pass on, and notes it in its source. Each run begins without such notes,
        so that the runs of all calls describe the model alike.
        """
        return copy.copy(self.source)


class Worker:
    """A function of rows that returns the sums of analyzers as bytes, for engines that divide rows over processes.

    Calls are independent: each reads its rows as `analyze` does, and numbers them from 0. `report` adds what the calls
    returned. It equals `analyze` over all rows in one process to the last bit, intervals included, if

    * the calls take consecutive rows, and `report` gets what they returned in the order of the rows,
    * each call but the last takes `batch_size` times the same power of two rows, such as 16 * 64 = 1024,
    * each row of the data is one row of the model: no `pack`, and no text longer than `seq_len`,
    * a forward pass gives equal bits everywhere: the same hardware, versions and number of threads.

    Otherwise sums are added in another order or of other batches, and numbers are equal to rounding, except where an analyzer
    depends on which rows a batch holds: CKA draws other minibatches. Analyzers that hold out rows (`LinearProbe`,
    `LinearPredictivity`) choose them by their number within a call. `provenance.data` is a digest of the digests of all calls.

    A worker can be pickled (by `pickle` if `load_model` is a function of a module). It loads the model with the first call in a
    process and keeps it there; its calls in several threads of a process run one after another.

    Args:
        load_model: a function without arguments that returns the model, of any kind that `analyze` takes, or what `open_model`
            returns with `layers` and `unembed`.
        analyzers: as in `analyze`, without those that read all data twice.
        at: see `analyze`.
        per_head: see `analyze`.
        intervals: see `analyze`.

    Raises:
        LayersimError: an analyzer needs two passes.

    Examples:
        >>> import tl_layersim as lsim
        >>> from tl_layersim.ray import Worker
        >>> texts = lsim.demo_text()[:48]
        >>> worker = Worker(lsim.demo_model, ["cka"])
        >>> report = worker.report(worker(lsim.Data(texts[i : i + 16], batch_size=4)) for i in (0, 16, 32))
        >>> whole = lsim.analyze(lsim.demo_model(), lsim.Data(texts, batch_size=4), ["cka"])
        >>> bool((report["cka"].values == whole["cka"].values).all())
        True
    """

    @typed
    def __init__(
        self,
        load_model: Callable[[], Any],
        analyzers: AnalyzersArgument,
        *,
        at: AtArgument = DEFAULT,
        per_head: bool = False,
        intervals: bool = False,
    ) -> None:
        self._load_model, self._analyzers = load_model, choose_analyzers(analyzers)
        self._at, self._per_head, self._intervals = at, per_head, intervals
        self._key = uuid.uuid4().hex
        refuse_model(load_model)
        for analyzer in self._analyzers.values():
            if analyzer.first_kernel() is not None:
                kind = type(analyzer).__name__
                raise LayersimError(
                    f"{kind} reads all data twice, and a Worker sees some of the rows once. Use "
                    + (f"{analyzer.one_pass} or " if analyzer.one_pass else "")
                    + "`analyze_on_ray`, which makes both passes."
                )

    def __call__(self, rows: Any) -> bytes:
        """Run the model on rows and return the sums.

        Args:
            rows: a `Data`, with the same options in each call, or raw data: a list of texts or of mappings, a pandas DataFrame,
                token ids, ...

        Raises:
            LayersimError: as `analyze`; or `max_tokens` is given, which concerns all data.
        """
        data = Data.of(rows)
        if data.max_tokens is not None:
            raise LayersimError(f"`max_tokens` is {data.max_tokens}; a Worker, which sees some of the rows, takes None.")
        if data.read_once:
            # Read twice: to count the rows, and to run them.
            data = replace(data, source=list(data.source))
        with _lock, tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "sums.safetensors")
            how: dict[str, Any] = {"at": self._at, "per_head": self._per_head, "intervals": self._intervals}
            try:
                analyze(self._model(), data, self._analyzers, shard=(0, 1), save_to=path, **how)
            except BaseException as error:
                # A note says that the file of this call, which will be gone, holds sums.
                error.__notes__ = [note for note in getattr(error, "__notes__", ()) if folder not in note]
                raise
            return path.read_bytes()

    def _model(self) -> OpenedModel:
        """The model of this process, which is loaded with the first call."""
        if self._key not in _models:
            opened = loaded(self._load_model)
            _models[self._key] = replace(opened, model=KeptSource(open_source(opened, either_stack=True, at=self._at)))
        return _models[self._key]

    def report(self, sums: Iterable[PartArgument]) -> Report:
        """The report over the rows of all calls; no model is loaded.

        Args:
            sums: what the calls returned, or paths of files that hold it, in the order of the rows.

        Raises:
            LayersimError: there is none, they are of other analyzers or models, or intervals cannot be computed from them.
        """
        parts, numbers = list[ShardPart](), dict[str, int]()
        for number, each in enumerate(sums):
            part, digest = _read_sums(number, each)
            if digest in numbers and part.tally.tokens:
                raise LayersimError(
                    f"`sums` holds what one call returned twice: number {numbers[digest]} and number {number} are equal, and "
                    f"{part.tally.tokens} tokens would be counted twice."
                )
            numbers[digest] = number
            parts.append(part)
        if not parts:
            raise LayersimError("`sums` is empty; it must hold what calls of the worker returned.")
        return merged_report([_one_part(parts)], self._analyzers)


def _read_sums(number: int, sums: PartArgument) -> tuple[ShardPart, str]:
    """What a call returned, and its digest; no two calls return equal bytes, which hold the time that they took."""
    if not isinstance(sums, bytes):
        return read_part(sums), hashlib.sha256(Path(sums).read_bytes()).hexdigest()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"sums-{number}.safetensors")
        path.write_bytes(sums)
        return read_part(path), hashlib.sha256(sums).hexdigest()


def _one_part(parts: Sequence[ShardPart]) -> ShardPart:
    """One part with the sums of all, which follow each other.

    Raises:
        LayersimError: they are of different runs, or their blocks do not fit together.
    """
    # A part without rows has not seen what a forward pass shows.
    head = next((part for part in parts if part.tally.tokens), parts[0])
    for number, part in enumerate(parts):
        if part.identity != head.identity or not part.is_done or part.stage != MAIN:
            keys = [key for key in part.identity if part.identity[key] != head.identity.get(key)]
            differing = "; ".join(f"{key} {part.identity[key]} and {head.identity.get(key)}" for key in keys)
            raise LayersimError(f"`sums` holds sums of different runs: number {number} differs in {differing or 'its stage'}.")
    tallies = [part.tally for part in parts]
    digest = tallies[0].digest if len(parts) == 1 else hashlib.sha256("".join(t.digest for t in tallies).encode()).hexdigest()
    batches, rows, tokens = (sum(getattr(tally, name) for tally in tallies) for name in ("batches", "sequences", "tokens"))
    tree = _one_tree([tally.tree for tally in tallies])
    total = Tally(batches, rows, tokens, digest, sum(tally.seconds for tally in tallies), True, tree)
    counts = DataCounts(batches, sum(part.counts.measured for part in parts if part.counts), rows, tokens, digest, tree.rows, 0)
    return replace(head, counts=counts, tallies={MAIN: total})


def _one_tree(trees: Sequence[SumTree]) -> SumTree:
    """The tree of all batches; where the trees do not fit together, all sums added one after another."""
    total = trees[0]
    for tree in trees[1:]:
        start = total.end
        offset = start
        for node in tree.nodes:
            if offset % node.rows:
                return _added(trees)
            offset += node.rows
        total = total.join(replace(tree, start=start))
    return total


def _added(trees: Sequence[SumTree]) -> SumTree:
    if trees[0].size is not None:
        raise LayersimError(
            "`sums` cannot be divided into blocks of equal size, from which intervals are computed: the calls have "
            f"{', '.join(str(tree.rows) for tree in trees[:8])}{', ...' if len(trees) > 8 else ''} rows. Every call but the "
            "last must take the same power of two of rows."
        )
    nodes: list[DataBlock] = [tree.total() for tree in trees if tree.nodes]
    whole = nodes[0]
    for node in nodes[1:]:
        whole = whole + node
    return SumTree(None, 0, (whole,))
