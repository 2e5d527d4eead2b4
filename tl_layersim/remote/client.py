"""`NdifClient`: sends requests to an NDIF server, and repeats them after transient failures."""

from __future__ import annotations

import re
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, TypeVar

from ..core.errors import LOG, LayersimError, without_login
from .failures import ConnectionStalled, FailureMap, JobTooLong, TransientFailure, last_line
from .server_status import ServerStatus, host_of, keep_logins_out_of_logs, parse_status, redacted

# Seconds between two looks for Ctrl-C on systems whose locks do not notice it.
SECONDS_PER_LOOK = 1.0


class PreparedRequest:
    """A serialised request. It can be sent again until its result arrives.

    The caller's thread traces and serialises, because nnsight reads its frames and changes global state. Another thread sends
    the bytes, receives messages, and downloads and decodes the result.

    Args:
        payload: the serialised trace.
    """

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self._backend: Any = None
        self._result: Any = None
        self._error: BaseException | None = None
        self._ended = threading.Event()

    @property
    def is_sent(self) -> bool:
        """Whether the request was sent, and `wait` has not returned its result yet."""
        return self._backend is not None

    @property
    def queue_position(self) -> int:
        """The request's highest position in the server's queue; 1 if no other request waited."""
        return 1 if self._backend is None else int(self._backend.display.queue_position)

    def start(self, backend: Any) -> None:
        """Send the request in another thread.

        Args:
            backend: a backend from `NdifClient.backend` that holds the payload.
        """
        self._backend, self._result, self._error = backend, None, None
        self._ended.clear()
        # A daemon, so that Python may end while a job is queued.
        threading.Thread(target=self._exchange, args=(backend,), daemon=True, name="ndif-request").start()

    def _exchange(self, backend: Any) -> None:
        try:
            self._result = backend.exchange()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def wait(self) -> tuple[Any, Any]:
        """Wait for the result, and return it with the backend that received it.

        Raises:
            Exception: the exception of the other thread. The request can then be sent again.
        """
        backend = self._backend
        backend.display.show()
        while not self._ended.wait(SECONDS_PER_LOOK):
            pass
        if self._error is not None:
            self._backend = None
            raise self._error
        return self._result, backend

    def abandon(self) -> None:
        """Close the connection of a sent request whose result is not needed any more."""
        if self._backend is not None:
            self._backend.display.abandoned = True


# Seconds without a message after which the connection is checked.
SILENCE = 60.0


@dataclass(frozen=True)
class JobStatus:
    """Status of a non-blocking job.

    Attributes:
        state: the server's name for the state of the job; None if the server does not know the job or is unreachable.
        result: result of the job; None before it has completed.
        failure: reason of a failure after which the job can be sent again; "" without such a failure.
        halve: whether the job was too long, so that its batches are split into two jobs.
        reached: whether the server responded.
        final: an error that another attempt would raise again; None without such an error.
    """

    state: str | None
    result: Any = None
    failure: str = ""
    halve: bool = False
    reached: bool = True
    final: Exception | None = None


@dataclass
class JobDisplay:
    """Receives the status of a job from nnsight, in place of nnsight's progress bar, and watches the connection.

    Attributes:
        report: called with each status message of the server.
        ping: raises an error if the server does not respond.
        enabled: whether nnsight calls `refresh` ten times a second.
        shown: whether messages are reported; False while an earlier request is running.
        abandoned: whether the result of the job is not needed any more.
        seconds: how long the job ran, from status RUNNING to status COMPLETED.
        queue_position: the job's highest position in the server's queue; 1 for the next job to run.
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
        """Report the last message and all later ones."""
        self.shown = True
        if self._last_response is not None:
            self.report(self._last_response)

    def update(self, response: Any) -> None:
        """Record the time of a status message, and pass the message to `report` if messages are shown."""
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
            ConnectionStalled: the server does not respond, or the result of the job is not needed any more.
        """
        if self.abandoned:
            raise ConnectionStalled("the result of the job is not needed any more")
        if time.monotonic() - self._last_message < SILENCE:
            return
        try:
            # A job may be queued for hours without a message; a server that is gone does not respond to a ping.
            self.ping()
        except (LayersimError, TransientFailure) as error:
            raise ConnectionStalled(f"no message for {SILENCE:.0f} s, and no response to /ping") from error
        self._last_message = time.monotonic()


def counting_backend() -> Any:
    """A subclass of nnsight's remote backend that counts bytes. A function defines it, because nnsight is imported only when
    needed.
    """
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
            """Send the serialised trace and return its result. Any thread may call this method."""
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


T = TypeVar("T")
# Seconds between attempts: nine minutes in all, in which a server can restart and load a large model.
WAITS = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, *[60.0] * 8)


def quiet(text: str) -> None:
    """Discard a message."""


@cache
def _tls() -> ssl.SSLContext:
    """TLS context with the certificates that httpx trusts. It is cached, because httpx reads them at every call."""
    import httpx

    return httpx.create_ssl_context()


class NdifClient:
    """Client of one model on one NDIF server.

    Args:
        remote: True, or the server's address.
        model_key: the model's name on the server.
        env: nnsight's description of the model, which is sent with each request.
    """

    def __init__(self, remote: bool | str, model_key: str, env: Mapping[str, Any]) -> None:
        self.host = host_of(remote)
        keep_logins_out_of_logs()
        self.name = without_login(self.host)
        self.model_key = model_key
        self.env = dict(env)
        self.say: Callable[[str], None] = quiet
        self.requests, self.sent, self.received = 0, 0, 0
        self.seconds = 0.0
        self.failures = FailureMap(self.host, self.name, model_key, lambda: self.status)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @property
    def patience(self) -> float:
        """Seconds that a server may be unreachable before a run ends."""
        return sum(WAITS)

    def request(self, run: Callable[[Any], T], patient: bool = True) -> T:
        """Send a request and return its result. After transient failures the request is sent again.

        Sending again is safe, because a request computes sums and changes nothing on the server. Only results that arrived are
        counted.

        Args:
            run: function that opens a trace or a session with the given backend.
            patient: whether to wait for a server that responded before; False for the very first request.

        Raises:
            JobTooLong: the server ended the job.
            LayersimError: the failure is not transient.
        """
        return self._repeated(lambda: self._attempt(run), patient)

    def _repeated(self, attempt: Callable[[], T], patient: bool = True) -> T:
        """The result of an attempt. Transient failures are retried with growing pauses."""
        waits = WAITS if patient else WAITS[:2]
        for number in range(len(waits) + 1):
            try:
                return attempt()
            except TransientFailure as error:
                if number == len(waits):
                    raise self.failures.given_up(error, len(waits) + 1) from None
                if "could not be read" in str(error) and number == 2:
                    # Three times the same failure of a payload is not the network's.
                    raise self.failures.given_up(error, 3) from None
                reason, wait = last_line(str(error)), waits[number]
                LOG.warning("%s: attempt %d of %d in %g s: %s", self.name, number + 2, len(waits) + 1, wait, reason)
                for left in range(int(wait), 0, -1):
                    self.say(f"attempt {number + 2} of {len(waits) + 1} in {left} s: {reason[:80]}")
                    time.sleep(wait / int(wait))
        raise AssertionError

    def _attempt(self, run: Callable[[Any], T]) -> T:
        backend = self.backend(blocking=True)
        try:
            result = run(backend)
        except LayersimError:
            raise
        except Exception as error:
            raise self.failures.classify(error) from None
        self._count(backend)
        return result

    def _count(self, backend: Any) -> None:
        """Count a request whose result has arrived."""
        self.requests += 1
        self.sent, self.received = self.sent + backend.sent, self.received + backend.received
        self.seconds = backend.display.seconds

    def prepare(self, run: Callable[[Any], Any]) -> PreparedRequest:
        """Trace and serialise a request without sending it.

        Args:
            run: see `request`; its traces return nothing.
        """
        backend = self.backend(blocking=True)
        backend.prepares = True
        run(backend)
        return PreparedRequest(backend.payload)

    def send(self, request: PreparedRequest) -> None:
        """Send a prepared request; another thread receives the result, and `finish` returns it."""
        backend = self.backend(blocking=True)
        backend.payload, backend.display.shown = request.payload, False
        request.start(backend)

    def finish(self, request: PreparedRequest) -> Any:
        """Return the result of a prepared request. It is sent if necessary, and again after transient failures.

        Raises:
            JobTooLong: the server ended the job.
            LayersimError: see `request`.
        """
        return self._repeated(lambda: self._finish_attempt(request))

    def _finish_attempt(self, request: PreparedRequest) -> Any:
        if not request.is_sent:
            self.send(request)
        try:
            result, backend = request.wait()
        except Exception as error:
            raise self.failures.classify(error) from None
        self._count(backend)
        return result

    def backend(self, blocking: bool, job_id: str | None = None) -> Any:
        """An nnsight backend for one job on this server, which counts bytes and reports progress through `say`."""
        backend = counting_backend()(self.model_key, host=self.host, env=self.env, blocking=blocking, job_id=job_id)
        # Hides nnsight's download bar for non-blocking jobs.
        backend.display = JobDisplay(self._report, lambda: self.get("/ping", timeout=10.0), enabled=blocking)
        return backend

    def _report(self, response: Any) -> None:
        """Show the server's report on a job in the run's progress bar."""
        status = response.status.value
        if status in ("PROVISIONING", "DEPLOYING") or (status == "QUEUED" and "position 1." not in response.description):
            self.say(redacted(f"{status.lower()}: {response.description}", self.host)[:80])
        elif status == "RUNNING":
            self.say(f"request {self.requests + 1}, {self.sent / 1e3:.0f} kB sent, {self.received / 1e3:.0f} kB back")

    def submit(self, run: Callable[[Any], Any]) -> str:
        """Send a non-blocking request and return the id of its job.

        Args:
            run: see `request`.
        """
        job_ids: list[str] = []

        def send(backend: Any) -> None:
            backend.blocking = backend.display.enabled = False
            run(backend)
            job_ids.append(backend.job_id)

        self.request(send)
        return job_ids[0]

    def poll(self, job_id: str) -> JobStatus:
        """The status of a non-blocking job."""
        backend = self.backend(blocking=False, job_id=job_id)
        try:
            result = backend.poll()
        except Exception as error:
            failure, state = self.failures.classify(error), None if backend.status is None else backend.status.value
            if state != "ERROR" and isinstance(failure, TransientFailure):
                # The connection or the download of the result failed, not the job.
                return JobStatus(state if state != "COMPLETED" else "RUNNING", failure=last_line(str(failure)), reached=False)
            if isinstance(failure, JobTooLong | TransientFailure):
                return JobStatus("ERROR", failure=last_line(str(failure)), halve=isinstance(failure, JobTooLong))
            return JobStatus("ERROR", failure=str(failure), final=failure)
        self.received += backend.received
        return JobStatus(None if backend.status is None else backend.status.value, result)

    def get(self, path: str, timeout: float = 30.0) -> Any:
        """The JSON at a path of the server.

        Raises:
            TransientFailure: the server is not ready.
            LayersimError: no NDIF server responds at this address.
        """
        import httpx

        try:
            response = httpx.get(f"{self.host}{path}", timeout=httpx.Timeout(10.0, read=timeout), verify=_tls())
            response.raise_for_status()
            return response.json()
        except httpx.HTTPStatusError as error:
            code = error.response.status_code
            if code in (502, 503, 504):
                text = f"{self.name} is not ready ({code}): {error.response.text[:200]}"
                raise TransientFailure(redacted(text, self.host)) from None
            raise self.failures.no_server(f"{path}: HTTP {code}") from None
        except httpx.TransportError as error:
            raise self.failures.no_server(f"{type(error).__name__}: {error}") from None
        except (ValueError, RecursionError):
            raise self.failures.no_server(f"{path}: a response that is not JSON") from None

    @cached_property
    def status(self) -> ServerStatus:
        """The status of the server; it is requested once.

        Raises:
            LayersimError: the server does not respond, or its JSON has another form.
        """
        try:
            self.get("/ping", timeout=10.0)
            status, env = self.get("/status", timeout=60.0), self.get("/env", timeout=60.0)
        except TransientFailure as error:
            raise self.failures.given_up(error, 1) from None
        try:
            return parse_status(self.model_key, status, env)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            given = f"/status or /env: a response of another form ({type(error).__name__}: {error})"
            raise self.failures.no_server(given) from error
