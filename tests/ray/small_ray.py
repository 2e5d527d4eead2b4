"""A stand-in for the package `ray` in one process: calls run when they are made, and the newest result is found first."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class SmallRay:
    """What `Workers` uses of Ray.

    Args:
        exceptions: Ray's own.

    Attributes:
        actors: all that were started.
        calls: names of all calls.
        lost: numbers of calls of `sums` with which the worker is lost.
        loss: the error of such a call.
        on_wait: called before each wait for results.
    """

    def __init__(self, exceptions: Any) -> None:
        self.exceptions = exceptions
        self.actors: list[SmallActor] = []
        self.calls: list[str] = []
        self.lost: set[int] = set()
        self.loss: Exception = exceptions.ActorDiedError()
        self.on_wait: Callable[[], None] = lambda: None

    def is_initialized(self) -> bool:
        return True

    def remote(self, **_options: Any) -> Callable[[type], SmallActorClass]:
        return lambda kind: SmallActorClass(self, kind)

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 4.0}}]

    def put(self, value: Any) -> Outcome:
        return Outcome(value)

    def get(self, outcome: Outcome) -> Any:
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def wait(self, outcomes: list[Outcome], num_returns: int) -> tuple[list[Outcome], list[Outcome]]:
        self.on_wait()
        return outcomes[-num_returns:], outcomes[:-num_returns]

    def kill(self, actor: SmallActor) -> None:
        actor.instance = None


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a call returned or raised, or an object that was put."""

    value: Any = None
    error: Exception | None = None

    def hex(self) -> str:
        return str(id(self))


@dataclass
class SmallActorClass:
    ray: SmallRay
    kind: type

    def remote(self, *arguments: Any) -> SmallActor:
        actor = SmallActor(self.ray, lambda: self.kind(*arguments))
        self.ray.actors.append(actor)
        return actor


class SmallActor:
    def __init__(self, ray: SmallRay, start: Callable[[], Any]) -> None:
        self.ray, self.start, self.instance = ray, start, start()

    def __getattr__(self, name: str) -> SmallCall:
        return SmallCall(self, name)


@dataclass
class SmallCall:
    actor: SmallActor
    name: str

    def options(self, **_options: Any) -> SmallCall:
        return self

    def remote(self, *arguments: Any) -> Outcome:
        ray = self.actor.ray
        ray.calls.append(self.name)
        if self.name == "sums" and ray.calls.count("sums") in ray.lost:
            self.actor.instance = self.actor.start()
            return Outcome(error=ray.loss)
        try:
            # As between processes.
            return Outcome(pickle.loads(pickle.dumps(getattr(self.actor.instance, self.name)(*arguments))))
        except Exception as error:
            raised = ray.exceptions.RayTaskError(
                self.name, traceback.format_exc(), error, proctitle="worker", pid=1, ip="127.0.0.1"
            )
            return Outcome(error=raised.make_dual_exception_instance())
