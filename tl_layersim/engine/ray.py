"""`analyze_on_ray`: runs `analyze` on a Ray cluster.

Each worker loads the model and measures shards of the data.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tqdm.auto import tqdm

from ..core.arguments import FilePath, PositiveInt, typed
from ..core.errors import LayersimError
from ..core.file_format import replacing
from ..core.results import Report
from ..core.resumable_file import plain
from ..core.wording import with_article
from ..data import data as data_module
from ..data.data import Data
from ..sources.open_local import OpenedModel
from .analyze_and_compare import opened_analysis
from .report_assembly import refuse_empty
from .run import TITLES
from .run_arguments import AnalyzersArgument, choose_analyzers
from .run_description import FIRST, MAIN, Analysis, DataCounts
from .shards import ShardPart, differing_entries, merge, merged_first, read_part, run_shard
from .site_plan import DEFAULT, AtArgument

# Small shards: little is lost with a worker, and all workers end at about the same time.
SHARDS_PER_WORKER = 6
# Ray starts a worker that is lost again, and repeats its call.
WORKER_OPTIONS = {"num_cpus": 1, "max_restarts": -1, "max_task_retries": 5}


# A worker's description of the run, which the driver compares: its identity as plain data, the counts of all data, and whether
# the model makes a first pass.
Description = tuple[dict[str, Any], DataCounts, bool]


class ShardWorker:
    """The model and the data in a Ray worker. The first call opens both, so that errors reach the driver.

    Args:
        load_model: function that returns the model, or an `OpenedModel`.
        argument: name of the argument that holds the run's folder, see `ModelDescription.identity`.
        inputs: a list of one item, Ray's reference to the data, the analyzers and the options, see `opened_analysis`. Ray
            fetches a reference that is an argument itself, but not one in a list.
    """

    def __init__(self, load_model: Callable[[], Any], argument: str | None, inputs: list[Any]) -> None:
        self._load_model = load_model
        self._argument = argument
        self._inputs = inputs

    @cached_property
    def _analysis(self) -> Analysis:
        import ray

        # Every shard reads the rows of all data.
        data_module.MOST_KEPT = sys.maxsize
        [reference] = self._inputs
        return opened_analysis([OpenedModel.of(self._load_model())], *ray.get(reference))

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return plain(self._analysis.identity(self._argument))

    def describe(self) -> Description:
        """Check the run, and return its identity, its `DataCounts`, and whether its first pass runs the model."""
        analysis = self._analysis
        analysis.check()
        return self._identity, analysis.counts, analysis.first_needs_model

    def measure(self, number: int, shard_count: int, first_pass: ShardPart | None) -> bytes:
        """Measure one shard.

        Args:
            number: index of the shard.
            shard_count: number of shards.
            first_pass: the first pass over all shards; None to measure the first pass, or if no first pass runs the model.

        Returns:
            The content of the shard's file.
        """
        with TemporaryDirectory() as folder:
            path = Path(folder) / "shard"
            run_shard(self._analysis, self._identity, (number, shard_count), path, first_pass)
            return path.read_bytes()


class Workers:
    """The Ray workers of a run.

    Args:
        ray: the package ray.
        actors: Ray actors of `ShardWorker`.
        folder: folder for the files of shards; shards in it are not measured again.
    """

    def __init__(self, ray: Any, actors: list[Any], folder: Path) -> None:
        self._ray = ray
        self._folder = folder
        # Actors without a running call.
        self._free: list[Any] = []
        # By Ray's reference to a running call: its worker, and the pass and the index of the shard.
        self._running: dict[Any, tuple[Any, str, int]] = {actor.describe.remote(): (actor, "", 0) for actor in actors}
        self.identity: dict[str, Any]
        # The description of the worker that is ready first; those of the others are dropped as they come.
        self.identity, self.counts, self.needs_first_pass = self._wait()[2]

    def measure(self, pass_name: str, shard_count: int, first_pass: ShardPart | None) -> list[Path]:
        """Measure all shards and return their files.

        If two workers measure a shard, the file of the faster worker is kept.

        Args:
            pass_name: "first" or "main".
            shard_count: number of shards, if the folder holds none.
            first_pass: the first pass over all shards, for the main pass.

        Raises:
            LayersimError: the folder holds sums of another run.
        """
        files: dict[int, Path] = {}
        # Number of workers that each shard was given to.
        attempts = Counter[int]()
        with tqdm(desc=TITLES[pass_name], unit="token", unit_scale=True, total=self.counts.tokens, disable=None) as bar:
            for path in self._folder.glob(f"{pass_name}-*.safetensors"):
                statement = f"`checkpoint` is {self._folder}, and its file {path.name} was measured with"
                shard_count = self._add(path, files, bar, statement)
            while len(files) < shard_count:
                unfinished = set(range(shard_count)) - files.keys()
                # Shards in work are given a second time, because a machine may be lost.
                for number in sorted(unfinished, key=attempts.__getitem__):
                    if self._free and attempts[number] < 2:
                        attempts[number] += 1
                        actor = self._free.pop()
                        reference = actor.measure.remote(number, shard_count, first_pass)
                        self._running[reference] = actor, pass_name, number
                finished_pass, number, content = self._wait()
                # A worker that was given a shard a second time may end it in the next pass.
                if finished_pass == pass_name and number not in files:
                    path = self._folder / f"{pass_name}-{number}.safetensors"
                    with replacing(path) as file:
                        file.write(content)
                    self._add(path, files, bar, "`load_model` or `data` differs between machines: a worker has")
        return list(files.values())

    def _add(self, path: Path, files: dict[int, Path], bar: Any, statement: str) -> int:
        """Check the file of a shard and add its path to `files`. Returns the number of shards of the run.

        `statement` is the beginning of an error's message.
        """
        part = read_part(path)
        identity = {key: value for key, value in part.identity.items() if key != "first"}
        differing = differing_entries(self.identity, identity)
        if differing:
            raise LayersimError(f"{statement} other models, analyzers or options than this run: {differing}.")
        if part.counts != self.counts:
            raise LayersimError(
                f"{statement} other rows, counted positions, labels or texts than this run, which has {self.counts.tokens} "
                "tokens."
            )
        files[part.number] = path
        bar.update(sum(node.tokens for node in part.tally.tree.nodes))
        return part.shard_count

    def _wait(self) -> tuple[str, int, Any]:
        """Wait until a worker has finished a call. Returns the pass, the shard index and the result of the call."""
        [reference], _ = self._ray.wait([*self._running], num_returns=1)
        actor, pass_name, number = self._running.pop(reference)
        self._free.append(actor)
        try:
            return pass_name, number, self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, Exception):
                raise
            error.cause.add_note(f"Raised in a worker of Ray:\n{error}")
            raise error.cause from None


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
    checkpoint: FilePath | None = None,
) -> Report:
    """Run `analyze` in the workers of a Ray cluster.

    Each worker loads the model and gets the data once, and measures one shard of the data at a time. The report equals the
    report of `analyze` in one process to the last bit, for any number of workers, even if some are lost. Forward passes must
    give equal bits on all machines: use the same hardware, versions and number of threads (`torch.get_num_threads()`; Ray gives
    a worker `num_cpus` threads).

    If this process is not connected to a cluster, Ray connects it as `ray.init()` does: it joins the cluster at `RAY_ADDRESS`
    or on this machine, or starts one on this machine. The process stays connected until `ray.shutdown()`.

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
        LayersimError: an argument does not fit.
        ImportError: Ray is not installed.
        ray.exceptions.RayError: a worker was lost with each of the attempts of `max_task_retries`.

    Examples:
        >>> from tl_layersim.engine.ray import analyze_on_ray
        >>> import tl_layersim as lsim
        >>> report = analyze_on_ray(lsim.demo_model, lsim.demo_text(), [lsim.Cosine()], num_workers=2)  # doctest: +SKIP
    """
    import ray

    chosen = choose_analyzers(analyzers)
    data = Data.of(data)
    if hasattr(load_model, "parameters") or hasattr(load_model, "trace"):
        raise LayersimError(
            f"`load_model` is {with_article(type(load_model).__name__)}; it must be a function that returns the model, because "
            "each worker loads its own copy."
        )
    with TemporaryDirectory() as temporary:
        folder = Path(checkpoint or temporary)
        folder.mkdir(exist_ok=True)
        # Once for all workers; the data without the rows that this process keeps.
        inputs = ray.put((replace(data, source=_rows(data)), chosen, at, per_head, intervals))
        worker_class = ray.remote(**WORKER_OPTIONS | dict(resources or {}))(ShardWorker)
        argument = None if checkpoint is None else "checkpoint"
        actors = [worker_class.remote(load_model, argument, [inputs]) for _ in range(num_workers)]
        try:
            workers = Workers(ray, actors, folder)
            refuse_empty(workers.counts.tokens, workers.counts.sequences)
            shard_count = min(workers.counts.measured, SHARDS_PER_WORKER * num_workers)
            first_pass = None
            if workers.needs_first_pass:
                first_pass = merged_first(workers.measure(FIRST, shard_count, None))
            return merge(workers.measure(MAIN, shard_count, first_pass), analyzers=chosen)
        finally:
            for actor in actors:
                ray.kill(actor)


def _rows(data: Data) -> Any:
    """The rows of the data in a form that Ray can send to workers.

    Iterators and Ray data sets are read into a list, in order.
    """
    source = data.source
    if not any(cls.__module__.startswith("ray.data") for cls in type(source).__mro__):
        return list(source) if data.read_once else source
    options = source.context.execution_options
    preserve_order = options.preserve_order
    options.preserve_order = True
    try:
        return list(source.iter_rows())
    finally:
        options.preserve_order = preserve_order
