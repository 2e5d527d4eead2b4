"""`analyze_on_ray`: `analyze` with copies of the model in the workers of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Unpack

from ..analysis.api import OneModelOptions, analyze
from ..analysis.validation import AnalyzersArgument, DataArgument, choose_analyzers
from ..core.argument_checks import typed
from ..core.distributed import rank_and_size
from ..core.errors import LayersimError
from ..core.results import Report
from ..core.wording import brief
from .model_copy import refuse_model
from .rows import OrderedRows, is_ray_dataset
from .source import ModelOnRay
from .workers import Workers, import_ray

# Options of `analyze` for models that are elsewhere, or that this process holds.
NOT_HERE = {
    "remote": "the model of `load_model` runs on the workers: leave it out",
    "tokens_per_request": "leave it out: workers get as many batches as they run in about 2 s",
    "blocking": "leave it out",
    "verify": "lsim.analyze(model, data, analyzers, max_tokens=1, verify='hf') once, in one process",
}


@typed
def analyze_on_ray(
    load_model: Callable[[], Any],
    dataset: DataArgument,
    analyzers: AnalyzersArgument,
    *,
    num_workers: int,
    resources: Mapping[str, Any] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    **options: Unpack[OneModelOptions],
) -> Report:
    """Run analyzers over a Ray data set on one model, whose copies run in the workers of a Ray cluster.

    Each worker loads the model once and turns batches into sums. This process reads and tokenises the rows, and adds the
    sums in the order of the data. The report equals that of `analyze` in one process to the last bit, however many workers
    there are and also if some were lost, provided that a forward pass gives equal bits on all machines: the same
    hardware, versions and number of threads (`torch.get_num_threads()`; Ray gives a worker as many as its `num_cpus`).

    A process that is not connected to a cluster is connected for the call by `ray.init()`, which joins the cluster of
    `RAY_ADDRESS` or one that runs on this machine, and starts one on this machine where there is none.

    Args:
        load_model: a function without arguments that returns the model, of any kind that `analyze` takes. It runs once on each
            worker, where this package must be installed.
        dataset: a `ray.data.Dataset`, whose rows are read in order, or any data that `analyze` takes.
        analyzers: as in `analyze`.
        num_workers: number of processes that hold the model. The run begins as soon as the first one has loaded it.
        resources: options of `ray.remote` for each worker: `num_cpus` (1 by default), `num_gpus`, `memory`, `resources`,
            `runtime_env`, `max_restarts` (without limit by default), ...
        checkpoint: as in `analyze`.
        **options: of `analyze`: `seq_len`, `max_tokens`, `batch_size`, `at`, `intervals`, ...

    Returns:
        A `Report`, as `analyze` returns.

    Raises:
        LayersimError: Ray is not installed, an argument does not fit, or all workers were lost.

    Examples:
        >>> from tl_layersim.ray import analyze_on_ray
        >>> import tl_layersim as lsim
        >>> report = analyze_on_ray(lsim.demo_model, lsim.demo_text(), [lsim.Cosine()], num_workers=2)  # doctest: +SKIP
    """
    chosen = choose_analyzers(analyzers)
    _refuse_arguments(load_model, num_workers, options)
    opening = {
        "layers": options.get("layers"),
        "unembed": options.get("unembed"),
        "either_stack": True,
        "at": options.get("at"),
    }
    data = OrderedRows(dataset) if is_ray_dataset(dataset) else dataset
    with _connected(), closing(Workers(load_model, {**opening, "either_stack": True}, num_workers, resources or {})) as workers:
        return analyze(ModelOnRay(workers), data, chosen, checkpoint=checkpoint, **options)


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


def _refuse_arguments(load_model: Any, num_workers: int, options: Mapping[str, Any]) -> None:
    for name, do in NOT_HERE.items():
        if name in options:
            raise LayersimError(
                f"`{name}` cannot be given on Ray.", given=f"{name}={brief(options[name])}", expected="other options", do=do
            )
    if num_workers < 1:
        raise LayersimError("`num_workers` must be at least 1.", given=num_workers, expected="1 or more", do="num_workers=4")
    if rank_and_size()[1] > 1:
        raise LayersimError(
            "`analyze_on_ray` cannot be called in a torch.distributed group: every process would start workers.",
            given=f"{rank_and_size()[1]} processes",
            expected="one process",
            do="call it in one process; the workers do the work",
        )
    refuse_model(load_model)
