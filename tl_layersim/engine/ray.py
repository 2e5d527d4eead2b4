"""`analyze_on_ray`: runs `analyze` on a Ray cluster; each worker loads the model and measures shards of the data."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tqdm.auto import tqdm

from ..core.arguments import PositiveInt, typed
from ..core.distributed import rank_and_size
from ..core.errors import LayersimError
from ..core.results import Report
from ..core.resumable_file import plain
from ..core.sums import Tally
from ..core.wording import brief, with_article
from ..data import data as data_module
from ..data.data import Data
from ..sources.open import OpenedModel
from .analyze_and_compare import opened_analysis
from .chosen_analyzers import AnalyzersArgument, choose_analyzers
from .merge import FirstStage, differing_entries, merged_first, merged_report
from .plan import DEFAULT, AtArgument
from .report_assembly import refuse_empty
from .run import TITLES, Analysis
from .shard_run import ShardRun
from .shards import FIRST, MAIN, DataCounts, ShardPart, count_data, digest_of, read_part

# Small shards: little is lost with a worker, and all workers end at about the same time.
SHARDS_PER_WORKER = 6
# Ray starts a worker that is lost again, and repeats its call.
WORKER_OPTIONS = {"num_cpus": 1, "max_restarts": -1, "max_task_retries": 5}


class RunDescription(NamedTuple):
    """A worker's description of the run, which the driver compares.

    Attributes:
        identity: model, analyzers, options and version, as plain data.
        counts: counts of rows and tokens of all data.
        in_two_stages: whether the model makes a first pass.
    """

    identity: dict[str, Any]
    counts: DataCounts
    in_two_stages: bool


class ModelCopy:
    """A copy of the model and the data in a worker. The first call opens both, so that errors reach the driver.

    Args:
        load_model: function that returns the model, or an `OpenedModel`.
        argument: name of the argument that holds the run's folder, see `Model.identity`.
        how: Ray's reference to the data, the analyzers and the options, see `opened_analysis`.
    """

    def __init__(self, load_model: Callable[[], Any], argument: str | None, how: list[Any]) -> None:
        self._load_model, self._argument, self._how = load_model, argument, how

    @cached_property
    def _analysis(self) -> Analysis:
        import ray

        # Every shard reads the rows of all data.
        data_module.MOST_KEPT = sys.maxsize
        analysis = opened_analysis(_loaded(self._load_model), *ray.get(self._how[0]))
        analysis.check()
        return analysis

    @cached_property
    def _described(self) -> RunDescription:
        identity = plain(self._analysis.identity(self._argument))
        return RunDescription(identity, count_data(self._analysis.batches), self._analysis.first_needs_model)

    def describe(self) -> RunDescription:
        """Load the model, count the data and describe the run."""
        return self._described

    def measure(self, number: int, of: int, first: FirstStage | None) -> ShardPart:
        """Measure one shard.

        Args:
            number: index of the shard.
            of: number of shards.
            first: the result of the first stage; None in the first stage, or if there is none.
        """
        identity, counts, _ = self._described
        return ShardRun(self._analysis, identity, number, of, first).measure(counts, {})


class Workers:
    """The workers of a run: free workers, and the calls that are running.

    Args:
        ray: the package ray.
        actors: Ray actors of `ModelCopy`.
    """

    def __init__(self, ray: Any, actors: list[Any]) -> None:
        self._ray, self._free = ray, list[Any]()
        self._running: dict[Any, tuple[Any, tuple[str, int] | None]] = {}
        for actor in actors:
            self._running[actor.describe.remote()] = (actor, None)
        self.run: RunDescription = self._wait()[1]

    def measured(
        self, stage: str, identity: Mapping[str, Any], first: FirstStage | None, of: int, folder: Path | None
    ) -> list[ShardPart]:
        """Measure all shards; the sums of a shard come from the first worker that returns them.

        Args:
            stage: "first" or "main".
            identity: identity of the run, including the digest of the first stage.
            first: the result of the first stage, for the main stage.
            of: number of shards, if `folder` holds none.
            folder: folder of the sums; shards in it are not measured again.

        Raises:
            LayersimError: the folder holds sums of another run.
        """
        kept = [] if folder is None else [read_part(path) for path in folder.glob(f"{stage}-*.safetensors")]
        parts: dict[int, ShardPart] = {}
        with tqdm(desc=TITLES[stage], unit="token", unit_scale=True, total=self.run.counts.tokens, disable=None) as bar:
            for part in kept:
                _refuse_other_run(
                    f"`checkpoint` is {folder}, where {Path(part.path).name} has", part, identity, self.run.counts
                )
                of, parts[part.number] = part.of, part
            bar.update(sum(map(_tokens, kept)))
            while len(parts) < of:
                self._give(stage, [number for number in range(of) if number not in parts], of, first)
                task, part = self._wait()
                if task is None or task[0] != stage or task[1] in parts:
                    continue
                _refuse_other_run("`load_model` or `data` gave a worker", part, identity, self.run.counts)
                parts[part.number] = part
                if folder is not None:
                    part.save(folder / f"{stage}-{part.number}.safetensors")
                bar.update(_tokens(part))
        return list(parts.values())

    def _give(self, stage: str, missing: list[int], of: int, first: FirstStage | None) -> None:
        """Give missing shards to free workers, then shards in work a second time, because a machine may be lost."""
        given = [task[1] for _, task in self._running.values() if task is not None and task[0] == stage]
        for number in sorted(missing, key=given.count):
            if self._free and given.count(number) < 2:
                actor = self._free.pop()
                self._running[actor.measure.remote(number, of, first)] = (actor, (stage, number))

    def _wait(self) -> tuple[tuple[str, int] | None, Any]:
        """Wait for the next call to end; return its key (None for a description) and its result."""
        [reference], _ = self._ray.wait([*self._running], num_returns=1)
        actor, task = self._running.pop(reference)
        try:
            found = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, Exception):
                raise
            error.cause.add_note(f"Raised in a worker of Ray:\n{error}")
            raise error.cause from None
        self._free.append(actor)
        return task, found


@typed
def analyze_on_ray(
    load_model: Callable[[], Any],
    data: Any,
    analyzers: AnalyzersArgument,
    *,
    num_workers: PositiveInt,
    resources: Mapping[str, Any] | None = None,
    at: AtArgument = DEFAULT,
    per_head: bool = False,
    intervals: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Report:
    """Run analyzers over data on copies of one model in the workers of a Ray cluster.

    Each worker loads the model and gets the data once, and measures one shard of the data at a time. The report equals the
    report of `analyze` in one process to the last bit, for any number of workers and even if some are lost, if forward passes
    give equal bits on all machines: the same hardware, versions and number of threads (`torch.get_num_threads()`; Ray gives a
    worker `num_cpus` threads).

    If this process is not connected to a cluster, the call connects it by `ray.init()`, which joins the cluster at
    `RAY_ADDRESS` or on this machine, or starts one on this machine.

    Args:
        load_model: a function without arguments that returns the model, of any kind that `analyze` takes, or what `open_model`
            returns with `layers` and `unembed`. It runs once on each worker, where this package must be installed.
        data: a `Data`, or raw data: any data that `analyze` takes, or a `ray.data.Dataset`, whose rows this process reads in
            order.
        analyzers: see `analyze`.
        num_workers: number of processes that hold the model. The run begins as soon as the first one has loaded it.
        resources: options of `ray.remote` for each worker: `num_cpus` (1 by default), `num_gpus`, `memory`, `resources`,
            `runtime_env`, `max_restarts` (without limit by default), `max_task_retries` (5 by default), ...
        at: see `analyze`.
        per_head: see `analyze`.
        intervals: see `analyze`.
        checkpoint: a folder for the sums of each shard; the same call continues from it, with any number of workers.

    Returns:
        A `Report`, as `analyze` returns.

    Raises:
        LayersimError: Ray is not installed, or an argument does not fit.
        ray.exceptions.RayError: a worker was lost with each of the attempts of `max_task_retries`.

    Examples:
        >>> from tl_layersim.engine.ray import analyze_on_ray
        >>> import tl_layersim as lsim
        >>> report = analyze_on_ray(lsim.demo_model, lsim.demo_text(), [lsim.Cosine()], num_workers=2)  # doctest: +SKIP
    """
    chosen, data = choose_analyzers(analyzers), Data.of(data)
    if (processes := rank_and_size()[1]) > 1:
        raise LayersimError(
            "`analyze_on_ray` cannot be called in a torch.distributed group, in which every process would start workers: "
            f"this one has {processes} processes."
        )
    if hasattr(load_model, "parameters") or hasattr(load_model, "trace"):
        raise LayersimError(
            f"`load_model` is {with_article(type(load_model).__name__)}; it must be a function that loads the model, which "
            "each worker loads itself."
        )
    folder = None if checkpoint is None else Path(checkpoint)
    if folder is not None:
        folder.mkdir(exist_ok=True)
    with _connected() as ray:
        # Once for all workers; the data without the rows that this process keeps.
        given = ray.put((replace(data, source=_rows(data)), chosen, at, per_head, intervals))
        kind = ray.remote(**WORKER_OPTIONS | dict(resources or {}))(ModelCopy)
        argument = None if checkpoint is None else "checkpoint"
        actors = [kind.remote(load_model, argument, [given]) for _ in range(num_workers)]
        try:
            workers = Workers(ray, actors)
            identity, counts, in_two_stages = workers.run
            refuse_empty(Tally(sequences=counts.sequences, tokens=counts.tokens))
            of, first, digest = min(counts.measured, SHARDS_PER_WORKER * num_workers), None, ""
            if in_two_stages:
                first = merged_first(workers.measured(FIRST, identity | {"first": ""}, None, of, folder), identity)
                digest = digest_of(first.sums)
            return merged_report(workers.measured(MAIN, identity | {"first": digest}, first, of, folder), chosen)
        finally:
            for actor in actors:
                ray.kill(actor)


def _rows(data: Data) -> Any:
    """The data in a form that can be sent to workers: iterators and Ray data sets are read in order."""
    source = data.source
    if not any(cls.__module__.startswith("ray.data") for cls in type(source).__mro__):
        return list(source) if data.read_once else source
    options = source.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        return list(source.iter_rows())
    finally:
        options.preserve_order = before


def _loaded(load_model: Callable[[], Any]) -> OpenedModel:
    opened = OpenedModel.of(load_model())
    for name in ("remote", "verify"):
        if value := getattr(opened, name):
            raise LayersimError(
                f"`load_model` returns a model opened with `{name}` set to {brief(value)}; workers take `layers` and `unembed` "
                "alone."
            )
    return opened


def _tokens(part: ShardPart) -> int:
    return sum(node.tokens for node in part.tally.tree.nodes)


def _refuse_other_run(given: str, part: ShardPart, identity: Mapping[str, Any], counts: DataCounts) -> None:
    if words := differing_entries(identity, part.identity):
        raise LayersimError(f"{given} a different run from the other parts, with {words}.")
    if part.counts != counts:
        raise LayersimError(f"{given} different rows from the other parts, which have {counts.tokens} tokens.")


@contextmanager
def _connected() -> Iterator[Any]:
    """A context manager that connects this process to a Ray cluster, unless it is connected, and yields the package ray."""
    try:
        import ray
    except ImportError as error:
        raise LayersimError(
            "`analyze_on_ray` needs the package ray, which is not installed: pip install 'tl_layersim[ray]'."
        ) from error
    was_connected = ray.is_initialized()
    if not was_connected:
        ray.init()
    try:
        yield ray
    finally:
        if not was_connected:
            ray.shutdown()
