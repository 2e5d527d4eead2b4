"""Workers: processes on a Ray cluster that hold a copy of the model each; calls of lost workers go to other ones."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..core.errors import LOG, LayersimError, warn
from ..core.wording import first_line
from .model_copy import ModelCopy

# Calls that wait at a worker, so that it has none to wait for.
QUEUED = 2
# Results that are held for each worker until those before them arrive.
AHEAD = 4
# How often a call is repeated whose worker was lost.
REPEATS = 3
# A worker that is lost is started again, as often as it is lost.
DEFAULTS = {"num_cpus": 1, "max_restarts": -1}


class WorkerCall(NamedTuple):
    """A call of a worker.

    Attributes:
        number: in the order in which results are returned.
        method: of `ModelCopy`.
        arguments: of the method.
        losses: how many workers were lost with it.
    """

    number: int
    method: str
    arguments: tuple[Any, ...]
    losses: int = 0


@dataclass(frozen=True)
class OnCluster:
    """An object that is kept once on each machine of the cluster.

    Attributes:
        key: of the object.
        reference: Ray's, in a list, so that Ray does not fetch it for each call.
    """

    key: str
    reference: list[Any]

    def get(self) -> Any:
        """Fetch the object."""
        return import_ray().get(self.reference[0])


class Workers:
    """Processes on a Ray cluster that hold a copy of the model each.

    Args:
        load_model: returns the model.
        at: the sites of the run.
        count: number of workers.
        resources: options of `ray.remote` for each.
    """

    def __init__(self, load_model: Callable[[], Any], at: Any, count: int, resources: Mapping[str, Any]) -> None:
        self._ray = import_ray()
        self._tell: Callable[[str], None] = _quiet
        options = {**DEFAULTS, **resources}
        kind = self._ray.remote(**options)(ModelCopy)
        self._warn_of_scarce(options)
        # Loaders and analyzers may be large, or closures: Ray sends them once.
        self._actors = [kind.remote(load_model, at) for _ in range(count)]
        self._starting: dict[Any, int] = {}
        self._busy: dict[int, int] = {}
        for number in range(count):
            self._start(number)

    def _warn_of_scarce(self, options: Mapping[str, Any]) -> None:
        """Say that no worker starts where no machine has the resources; an autoscaler may add one that has."""
        plain = {"CPU": options.get("num_cpus"), "GPU": options.get("num_gpus"), "memory": options.get("memory")}
        needed = {name: amount for name, amount in {**plain, **(options.get("resources") or {})}.items() if amount}
        machines = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if not any(all(machine.get(name, 0) >= amount for name, amount in needed.items()) for machine in machines):
            held = "; ".join(str({name: machine.get(name, 0) for name in needed}) for machine in machines[:4])
            needs = f"`resources`: each worker needs {needed}, and no worker starts before a machine has them."
            warn(f"{needs} Machines have {held}.")

    def close(self) -> None:
        """End all workers."""
        for actor in self._actors:
            self._ray.kill(actor)

    @property
    def are_starting(self) -> bool:
        """Whether some of them still load the model."""
        return bool(self._starting)

    def share(self, value: Any) -> OnCluster:
        """Keep an object once on each machine of the cluster, for as long as the result is held."""
        reference = self._ray.put(value)
        return OnCluster(reference.hex(), [reference])

    @contextmanager
    def saying(self, say: Callable[[str], None]) -> Iterator[None]:
        """A context in which `say` takes the number of workers that have loaded the model, whenever it changes."""
        self._tell = say
        self._say()
        try:
            yield
        finally:
            self._tell = _quiet

    def ask(self, method: str, *arguments: Any) -> Any:
        """The result of one call, on any worker."""
        [result] = self.in_order([(method, arguments)])
        return result

    def in_order(self, calls: Iterable[tuple[str, tuple[Any, ...]]]) -> Iterator[Any]:
        """The results of calls in their order, which run on all workers.

        Args:
            calls: method of `ModelCopy` and its arguments. They are taken as workers become free.

        Raises:
            Exception: as a worker raised it.
            LayersimError: no worker is left, or several were lost with one call.
        """
        coming = (WorkerCall(number, *call) for number, call in enumerate(calls))
        pending: dict[Any, tuple[int, WorkerCall]] = {}
        again: list[WorkerCall] = []
        results: dict[int, Any] = {}
        due, ended = 0, False
        while True:
            while self._free() is not None:
                call = heapq.heappop(again) if again else None
                if call is None and not ended and len(results) + len(pending) < AHEAD * len(self._actors):
                    call = next(coming, None)
                    ended = call is None
                if call is None:
                    break
                # Reading the next batches may have called workers too, and may have found one lost.
                worker = self._free()
                if worker is None:
                    heapq.heappush(again, call)
                    break
                pending[getattr(self._actors[worker], call.method).remote(*call.arguments)] = (worker, call)
                self._busy[worker] += 1
            if due in results:
                yield results.pop(due)
                due += 1
                continue
            if ended and not pending and not again:
                return
            [reference], _ = self._ray.wait([*pending, *self._starting], num_returns=1)
            if reference in self._starting:
                self._started(reference)
                continue
            worker, call = pending.pop(reference)
            if worker in self._busy:
                self._busy[worker] -= 1
            try:
                results[call.number] = self._get(reference)
            except _Lost as lost:
                heapq.heappush(again, self._repeated(call, lost.reason))
                if worker in self._busy:
                    why = loss_of(lost.reason).cause
                    LOG.warning("Worker %d of %d was lost and is started again: %s", worker + 1, len(self._actors), why)
                    self._start(worker)

    def _free(self) -> int | None:
        """The worker with the fewest calls, None where all have enough."""
        worker = min(self._busy, key=lambda number: self._busy[number], default=None)
        return None if worker is None or self._busy[worker] >= QUEUED else worker

    def _start(self, number: int) -> None:
        """Wait for a worker to load the model, before it gets calls."""
        self._busy.pop(number, None)
        reference = self._actors[number].open.options(max_task_retries=REPEATS).remote()
        self._starting[reference] = number
        self._say()

    def _started(self, reference: Any) -> None:
        number = self._starting.pop(reference)
        try:
            self._get(reference)
        except _Lost as lost:
            if self._busy or self._starting:
                LOG.warning("Worker %d of %d does not start: %s", number + 1, len(self._actors), loss_of(lost.reason).cause)
                return
            loss = loss_of(lost.reason)
            raise LayersimError(
                f"`load_model` could not be run: every worker was lost, the last one by {loss.cause}. {loss.remedy}"
            ) from None
        self._busy[number] = 0
        self._say()

    def _say(self) -> None:
        self._tell(f"{len(self._busy)} of {len(self._actors)} workers")

    def _get(self, reference: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as error:
            raise _original(error) from None
        except errors.RayError as error:
            raise _Lost(error) from None

    def _repeated(self, call: WorkerCall, reason: Exception) -> WorkerCall:
        if call.losses == REPEATS:
            loss = loss_of(reason)
            raise LayersimError(
                f"Workers were lost {call.losses + 1} times with the same batches, the last one by {loss.cause}. {loss.remedy}"
            )
        return call._replace(losses=call.losses + 1)


class _Lost(Exception):
    """A worker's process ended, or its machine.

    Attributes:
        reason: Ray's error.
    """

    def __init__(self, reason: Exception) -> None:
        super().__init__(reason)
        self.reason = reason


class Loss(NamedTuple):
    """Why a worker was lost, as far as Ray knows it.

    Attributes:
        cause: the name of Ray's error, and the line of its text that tells the cause.
        remedy: a sentence.
    """

    cause: str
    remedy: str


def loss_of(reason: Exception) -> Loss:
    """Why a worker was lost.

    Ray raises `OutOfMemoryError` if its memory monitor ended the process. An `ActorDiedError` or `ActorUnavailableError` may
    have any cause, a machine that left the cluster among them, which only some of their texts name.

    Args:
        reason: Ray's error.
    """
    errors = import_ray().exceptions
    # The first line of an `ActorDiedError` names no cause, and the lines with tabs are the actor's.
    lines = [line for line in str(reason).strip().splitlines() if line.strip() and not line.startswith("\t")]
    line = next(iter(lines[1:] if isinstance(reason, errors.ActorDiedError) else lines), first_line(reason))
    cause = f"{type(reason).__name__}: {line[:200].rstrip('.')}"
    if isinstance(reason, errors.OutOfMemoryError):
        return Loss(cause, "Pass a smaller `batch_size`, or more memory for each worker: resources={'memory': bytes}.")
    if isinstance(reason, errors.NodeDiedError | errors.LocalRayletDiedError) or "node has died" in str(reason):
        return Loss(cause, "`ray status` lists the machines that are left; with `checkpoint` the same call continues.")
    return Loss(cause, "`ray status` shows whether its machine left the cluster, and Ray's logs there why its process ended.")


def _original(error: Any) -> Exception:
    """The exception that a worker raised, without Ray's around it."""
    cause = error.cause
    if not isinstance(cause, Exception):
        original: Exception = error
        return original
    if not isinstance(cause, LayersimError):
        cause.add_note(f"Raised in a worker of Ray:\n{error}")
    return cause


def _quiet(_text: str) -> None:
    """Say nothing."""


def import_ray() -> Any:
    """The package `ray`.

    Raises:
        LayersimError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise LayersimError(
            "`analyze_on_ray` needs the package ray, which is not installed: pip install 'tl_layersim[ray]'."
        ) from error
    return ray
