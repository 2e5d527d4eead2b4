"""Jobs on an NDIF server: the backend that carries one request, the display of its progress, and its status."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import LayersimError
from .address import redacted
from .failures import ConnectionStalled, TransientFailure

# Seconds without a message after which the connection is checked.
SILENCE = 60.0


@dataclass(frozen=True)
class JobStatus:
    """Status of a non-blocking job.

    Attributes:
        state: the server's name for the state of the job; None where the server does not know the job or is unreachable.
        result: what the job returned, None before the job has completed.
        failure: why the job failed, where it may be sent again; "" where it has not failed.
        halve: whether the job was too long, and its batches belong into two jobs.
        reached: whether the server responded.
        final: the error that would be the same for the same job sent again, None where there is none.
    """

    state: str | None
    result: Any = None
    failure: str = ""
    halve: bool = False
    reached: bool = True
    final: Exception | None = None


@dataclass
class JobDisplay:
    """Receives the status of one job from nnsight, in place of nnsight's own progress bar, and watches the connection.

    Attributes:
        report: called with each status message of the server.
        ping: raises where the server does not respond.
        enabled: whether nnsight calls `refresh` ten times a second.
        shown: whether messages are reported; False while the results of an earlier request are awaited.
        abandoned: whether nobody waits for the job any more.
        seconds: how long the job ran, from status RUNNING to status COMPLETED.
        queue_position: the highest place in the server's queue that the job had; 1 for the next job to run.
    """

    report: Callable[[Any], None]
    ping: Callable[[], Any]
    enabled: bool = True
    shown: bool = True
    abandoned: bool = False
    seconds: float = 0.0
    queue_position: int = 1
    _last_message: float = field(default_factory=time.monotonic)
    _started: float | None = None
    _last_response: Any = None

    def show(self) -> None:
        """Report the last message, and all further ones."""
        self.shown = True
        if self._last_response is not None:
            self.report(self._last_response)

    def update(self, response: Any) -> None:
        """Note the time of a status message, and pass the message to `report` where it is shown."""
        self._last_message = time.monotonic()
        self._last_response = response
        if place := re.search(r"position (\d+)", response.description or ""):
            self.queue_position = max(self.queue_position, int(place[1]))
        status = response.status.value
        if status == "RUNNING" and self._started is None:
            self._started = self._last_message
        if status == "COMPLETED" and self._started is not None:
            self.seconds = self._last_message - self._started
        if self.shown:
            self.report(response)

    def refresh(self) -> None:
        """Check the connection if no message has arrived for `SILENCE` seconds.

        Raises:
            ConnectionStalled: the server does not respond; or nobody waits for the job any more.
        """
        if self.abandoned:
            raise ConnectionStalled("the job is not waited for any more")
        if time.monotonic() - self._last_message < SILENCE:
            return
        try:
            # A job may be queued for hours without a message; a server that is gone does not respond to a ping.
            self.ping()
        except (LayersimError, TransientFailure) as error:
            raise ConnectionStalled(f"no message for {SILENCE:.0f} s, and no response to /ping") from error
        self._last_message = time.monotonic()


def counting_backend() -> Any:
    """A subclass of nnsight's remote backend that counts bytes. Made in a function, because nnsight is imported when needed."""
    from nnsight.intervention.backends.remote import RemoteBackend
    from nnsight.schema.request import RequestModel

    class CountingBackend(RemoteBackend):  # type: ignore[misc]  # nnsight has no types
        sent = 0
        received = 0
        # Whether a trace is serialised only, and sent by `exchange` later.
        prepares = False
        payload: bytes | None = None

        def __call__(self, tracer: Any = None) -> Any:
            if not self.prepares:
                return super().__call__(tracer)
            self.payload = self._serialize(tracer)
            return None

        def exchange(self) -> Any:
            """Send the serialised trace and return its result. Touches no trace, so any thread may call it."""
            return self.request(RequestModel(model_key=self.model_key, compress=self.compress, env=self.env), None)

        def _serialize(self, tracer: Any) -> bytes:
            if self.payload is not None:
                self.sent = len(self.payload)
                return self.payload
            try:
                payload: bytes = super()._serialize(tracer)
            except Exception as error:
                raise LayersimError(
                    f"The request cannot be serialized: {redacted(f'{type(error).__name__}: {error}')[:300]}. Keep models, "
                    "locks and open files out of the analyzer's options and its module's globals."
                ) from error
            self.sent = len(payload)
            return payload

        @staticmethod
        def parse(message: str | bytes) -> Any:
            if not message:
                # A closed connection gives an empty message.
                raise ConnectionError("the server closed the connection")
            return RemoteBackend.parse(message)

        def download_result(self, url: Any) -> Any:
            # Hides nnsight's download bar: the bar of the whole run is shown already.
            self.display.enabled = False
            return super().download_result(url)

        def finalize(self, content: bytes) -> Any:
            self.received = len(content)
            return super().finalize(content)

    return CountingBackend
