"""`analyze_on_ray`: `analyze` with copies of the model in the workers of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

from ..analysis.api import analyze
from ..analysis.site_plan import DEFAULT, AtArgument
from ..analysis.validation import AnalyzersArgument, choose_analyzers
from ..core.argument_checks import typed
from ..core.bounds import PositiveInt
from ..core.distributed import rank_and_size
from ..core.errors import LayersimError
from ..core.results import Report
from ..data.data import Data
from .model_copy import refuse_model
from .rows import OrderedRows, is_ray_dataset
from .source import ModelOnRay
from .workers import Workers, import_ray


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
    """Run analyzers over a Ray data set on one model, whose copies run in the workers of a Ray cluster.

    Each worker loads the model once and turns batches into sums. This process reads and tokenises the rows, and adds the
    sums in the order of the data. The report equals that of `analyze` in one process to the last bit, however many workers
    there are and also if some were lost, provided that a forward pass gives equal bits on all machines: the same
    hardware, versions and number of threads (`torch.get_num_threads()`; Ray gives a worker as many as its `num_cpus`).

    A process that is not connected to a cluster is connected for the call by `ray.init()`, which joins the cluster of
    `RAY_ADDRESS` or one that runs on this machine, and starts one on this machine where there is none.

    Args:
        load_model: a function without arguments that returns the model, of any kind that `analyze` takes, or what `open_model`
            returns with `layers` and `unembed`. It runs once on each worker, where this package must be installed.
        data: a `Data`, or raw data: a `ray.data.Dataset`, whose rows are read in order, or any data that `analyze` takes.
        analyzers: as in `analyze`.
        num_workers: number of processes that hold the model. The run begins as soon as the first one has loaded it.
        resources: options of `ray.remote` for each worker: `num_cpus` (1 by default), `num_gpus`, `memory`, `resources`,
            `runtime_env`, `max_restarts` (without limit by default), ...
        at: see `analyze`.
        per_head: see `analyze`.
        intervals: see `analyze`.
        checkpoint: as in `analyze`.

    Returns:
        A `Report`, as `analyze` returns.

    Raises:
        LayersimError: Ray is not installed, an argument does not fit, or all workers were lost.

    Examples:
        >>> from tl_layersim.ray import analyze_on_ray
        >>> import tl_layersim as lsim
        >>> report = analyze_on_ray(lsim.demo_model, lsim.demo_text(), [lsim.Cosine()], num_workers=2)  # doctest: +SKIP
    """
    chosen, data = choose_analyzers(analyzers), Data.of(data)
    if (processes := rank_and_size()[1]) > 1:
        raise LayersimError(
            "`analyze_on_ray` cannot be called in a torch.distributed group, in which every process would start workers: "
            f"this one has {processes} processes."
        )
    refuse_model(load_model)
    if is_ray_dataset(data.source):
        data = replace(data, source=OrderedRows(data.source))
    with _connected(), closing(Workers(load_model, at, num_workers, resources or {})) as workers:
        model = replace(workers.ask("opened"), model=ModelOnRay(workers))
        return analyze(model, data, chosen, at=at, per_head=per_head, intervals=intervals, checkpoint=checkpoint)


@contextmanager
def _connected() -> Iterator[None]:
    """A context in which this process is connected to a cluster: as before, or as `ray.init()` connects it."""
    ray = import_ray()
    if ray.is_initialized():
        yield
        return
    ray.init()
    try:
        yield
    finally:
        ray.shutdown()
