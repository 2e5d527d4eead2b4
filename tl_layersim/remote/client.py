"""Client of an NDIF server: sends one request, repeats it after transient failures, and reads the server's status."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from typing import Any, TypeVar

from ..core.errors import LOG, LayersimError
from ..core.server_addresses import without_login
from .address import host_of, keep_logins_out_of_logs, redacted
from .failures import FailureMap, JobTooLong, TransientFailure, last_line
from .job_backend import JobDisplay, JobStatus, counting_backend
from .prepared_request import PreparedRequest
from .server_status import ServerStatus, parse_status

T = TypeVar("T")
# Seconds between attempts: nine minutes in all, in which a server can restart and load a large model.
WAITS = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, *[60.0] * 8)


def quiet(text: str) -> None:
    """Discard a message."""


@cache
def _tls() -> ssl.SSLContext:
    """TLS context with the certificates that httpx trusts, cached because httpx would otherwise read them at every call."""
    import httpx

    return httpx.create_ssl_context()


class NdifClient:
    """Client of one model on one server.

    Args:
        remote: True, or the server's address.
        model_key: the model's name on the server.
        env: what nnsight sends about the model with each request.
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
        """Seconds for which a server may be unreachable before a run ends."""
        return sum(WAITS)

    def request(self, run: Callable[[Any], T], patient: bool = True) -> T:
        """Send a request, again after transient failures, and return its result.

        A request computes sums and changes nothing on the server. The result of a lost attempt is therefore requested again;
        only results that arrived are counted.

        Args:
            run: opens a trace or a session with the backend that it is given.
            patient: whether to wait for a server that responded before; False for the first request of all.

        Raises:
            JobTooLong: the server ended the job.
            LayersimError: the failure belongs to the request, or is not transient.
        """
        return self._repeated(lambda: self._attempt(run), patient)

    def _repeated(self, attempt: Callable[[], T], patient: bool = True) -> T:
        """The result of an attempt, which is repeated after transient failures with growing pauses."""
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
        """Trace and serialise a request, without sending it.

        Args:
            run: as in `request`; its traces return nothing.
        """
        backend = self.backend(blocking=True)
        backend.prepares = True
        run(backend)
        return PreparedRequest(backend.payload)

    def send(self, request: PreparedRequest) -> None:
        """Send a prepared request, whose result another thread receives until `finish` takes it."""
        backend = self.backend(blocking=True)
        backend.payload, backend.display.shown = request.payload, False
        request.start(backend)

    def finish(self, request: PreparedRequest) -> Any:
        """Wait for a prepared request, which is sent unless it was, and again after transient failures; return its result.

        Raises:
            JobTooLong: the server ended the job.
            LayersimError: as `request`.
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
        """Say in the run's progress bar what the server reports of a job."""
        status = response.status.value
        if status in ("PROVISIONING", "DEPLOYING") or (status == "QUEUED" and "position 1." not in response.description):
            self.say(redacted(f"{status.lower()}: {response.description}", self.host)[:80])
        elif status == "RUNNING":
            self.say(f"request {self.requests + 1}, {self.sent / 1e3:.0f} kB sent, {self.received / 1e3:.0f} kB back")

    def submit(self, run: Callable[[Any], Any]) -> str:
        """Send a non-blocking request and return the id of its job.

        Args:
            run: as in `request`.
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
        """The status of the server, requested once.

        Raises:
            LayersimError: the server does not respond, or with JSON of another form.
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
