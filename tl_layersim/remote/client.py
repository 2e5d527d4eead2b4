"""`NdifClient`: requests to an NDIF server, their retries and their error messages."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from ..core.errors import LOG, LayersimError, without_login
from .backend import Expectation, Form, PreparedRequest, sending_backend
from .connection import fetched
from .failures import (
    LONGEST_READ,
    LONGEST_SERVER_TEXT,
    DamagedAnswer,
    JobTooLong,
    ModelNotRunning,
    RequestFailed,
    TransientFailure,
    UnsafeAnswer,
    is_network_error,
    last_line,
    server_text,
)
from .server_status import ServerStatus, host_of, parse_status, remove_secrets_of_record

# Words that name a failure of the server. In a traceback only NO_SANDBOX does: the request may use the other words.
TRANSIENT = ("unavailable", "reconnecting", "try again", "evicted", "preempted", "could not be read", "internal server error")
NO_SANDBOX = "waiting for the runner socket"
TOO_LONG = "exceeded the execution timeout"
# Last line of the traceback of a LayersimError that a kernel raised on the server.
REFUSAL = re.compile(r"LayersimError: (?P<message>.+)")
# Longest refusal of a kernel in a message: those of this package are one or two sentences.
LONGEST_REFUSAL = 600

# Seconds between two checks for Ctrl-C.
SECONDS_PER_CHECK = 1.0
# Seconds without a message after which the connection is checked.
SILENCE = 60.0
# Seconds without a message after which a running job counts as lost. Queued jobs may wait for any time.
LONGEST_RUN = 24 * 3600.0


@dataclass
class JobDisplay:
    """Replaces nnsight's status display, and checks the connection to the server.

    Attributes:
        report: called with each status message of the server.
        ping: raises an error if the server does not respond.
        abandoned: whether the result of the job is not needed any more.
        seconds: how long the job ran, from status RUNNING to status COMPLETED.
    """

    report: Callable[[Any], None]
    ping: Callable[[], Any]
    abandoned: bool = False
    seconds: float = 0.0
    _last_message: float = field(default_factory=time.monotonic)
    _last_sign: float = field(default_factory=time.monotonic)
    _started: float | None = None

    def update(self, response: Any) -> None:
        """Pass a status message to `report`, and record its time."""
        self._last_message = time.monotonic()
        self._last_sign = self._last_message
        status = response.status.value
        if status == "RUNNING" and self._started is None:
            self._started = self._last_message
        if status == "COMPLETED":
            # A job that this process did not see running has no known time.
            self.seconds = 0.0 if self._started is None else self._last_message - self._started
        self.report(response)

    def refresh(self) -> bool:
        """Check the server after `SILENCE` seconds without a message. Returns whether it was checked.

        Raises:
            ConnectionError: the server does not respond, a running job is lost, or the result of the job is not needed any
                more.
        """
        if self.abandoned:
            raise ConnectionError("the result of the job is not needed any more")
        now = time.monotonic()
        if self._started is not None and now - self._last_message > LONGEST_RUN:
            raise ConnectionError(f"a job has been running for {LONGEST_RUN:.0f} s without a message")
        if now - self._last_sign < SILENCE:
            return False
        try:
            # A queued job may be silent for hours, but a running server responds to a ping.
            self.ping()
        except (LayersimError, TransientFailure) as error:
            raise ConnectionError(f"no message for {SILENCE:.0f} s, and no response to /ping") from error
        self._last_sign = time.monotonic()
        return True


T = TypeVar("T")
# Attempts to get a result that can be read.
ATTEMPTS_TO_READ = 3
# Seconds between attempts: nine minutes in all, in which a server can restart and load a large model.
WAITS = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, *[60.0] * 8)


def quiet(text: str) -> None:
    """Discard a message."""


@dataclass(frozen=True)
class SentJob:
    """A request that was sent and is not waited for.

    Attributes:
        id: name of the job on the server.
        ticket: see `Expectation`.
        largest: see `Expectation`.
    """

    id: str
    ticket: str
    largest: int


class NdifClient:
    """Sends requests for one model to one NDIF server.

    Args:
        remote: True, or the server's address.
        model_key: the model's name on the server.
        env: nnsight's description of the model, which is sent with each request.
    """

    def __init__(self, remote: bool | str, model_key: str, env: Mapping[str, Any]) -> None:
        self.host = host_of(remote)
        # The logger of httpx logs the address of each request at level INFO.
        logging.getLogger("httpx").addFilter(remove_secrets_of_record)
        self.name = without_login(self.host)
        self.model_key = model_key
        self.env = dict(env)
        self.say: Callable[[str], None] = quiet
        self.requests = 0
        self.bytes_sent = 0
        self.bytes_received = 0
        # How long the last job ran on the server.
        self.seconds = 0.0

    def request(self, run: Callable[[Any], T], patient: bool = True) -> T:
        """Send a request and return its result; retry after transient failures.

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
        """Call `attempt` until it succeeds; wait longer after each transient failure."""
        waits = WAITS if patient else WAITS[:2]
        number = 1
        most = len(waits) + 1
        while True:
            try:
                return attempt()
            except TransientFailure as error:
                # What the server or this process cannot read at the third attempt is no failure of the network.
                unreadable = isinstance(error, DamagedAnswer) or "could not be read" in str(error)
                if number == most or (unreadable and number == ATTEMPTS_TO_READ):
                    raise self.given_up(error, number) from None
                reason = server_text(last_line(str(error)), self.host)
                seconds = waits[number - 1]
            number += 1
            LOG.warning("%s: attempt %d of %d in %g s: %s", self.name, number, most, seconds, reason)
            for remaining in range(int(seconds), 0, -1):
                self.say(f"attempt {number} of {most} in {remaining} s: {reason[:80]}")
                time.sleep(seconds / int(seconds))

    def _attempt(self, run: Callable[[Any], T], backend: Any = None) -> T:
        backend = backend or self.backend()
        try:
            result = run(backend)
        except LayersimError:
            raise
        except Exception as error:
            raise self.classify(error) from None
        self.requests += 1
        self.bytes_sent += backend.sent
        self.bytes_received += backend.received
        self.seconds = backend.display.seconds
        return result

    def prepare(self, run: Callable[[Any], Any]) -> PreparedRequest:
        """Trace and serialise a request without sending it.

        Args:
            run: see `request`; its traces return nothing.
        """
        backend = self.backend()
        backend.prepares = True
        run(backend)
        return PreparedRequest(backend.payload, backend.expectation)

    @contextmanager
    def sent(self, request: PreparedRequest) -> Iterator[Callable[[], Any]]:
        """Context manager that sends a prepared request in another thread, while the caller continues.

        That thread also downloads the result. The caller's thread traces and serialises, because nnsight reads its frames and
        changes global state.

        Args:
            request: the request, which `prepare` made.

        Yields:
            Function that waits for the result and returns it. After transient failures it sends the request again. It raises
            the exceptions of `request`.
        """
        # The first attempt, until the caller waits for it; further attempts begin when the caller waits.
        sending = [self._send(request)]

        def attempt() -> Any:
            backend, answer = sending.pop() if sending else self._send(request)
            try:
                return self._attempt(lambda _: _waited_for(answer), backend)
            finally:
                backend.display.abandoned = True

        try:
            yield lambda: self._repeated(attempt)
        finally:
            for backend, _ in sending:
                backend.display.abandoned = True

    def _send(self, request: PreparedRequest) -> tuple[Any, Future[Any]]:
        """Start a thread that sends a prepared request; return the backend and a future of the result."""
        backend = self.backend()
        backend.payload = request.payload
        backend.expectation = request.expectation
        answer = Future[Any]()

        def exchange() -> None:
            try:
                answer.set_result(backend.exchange())
            except BaseException as error:
                answer.set_exception(error)

        # A daemon, so that Python may end while a job is queued.
        threading.Thread(target=exchange, daemon=True, name="ndif-request").start()
        return backend, answer

    def backend(self, job_id: str | None = None) -> Any:
        """An nnsight backend for one job on this server."""
        backend = sending_backend()(self.model_key, host=self.host, env=self.env, job_id=job_id)
        backend.display = JobDisplay(self._report, lambda: self.get("/ping", timeout=10.0))
        return backend

    def _report(self, response: Any) -> None:
        """Show the status of a job in the run's progress bar."""
        status = response.status.value
        waits_in_queue = status == "QUEUED" and "position 1." not in response.description
        if status in ("PROVISIONING", "DEPLOYING") or waits_in_queue:
            self.say(server_text(f"{status.lower()}: {response.description}", self.host, 80))
        elif status == "RUNNING":
            self.say(
                f"request {self.requests + 1}, {self.bytes_sent / 1e3:.0f} kB sent, {self.bytes_received / 1e3:.0f} kB back"
            )

    def submit(self, run: Callable[[Any], Any]) -> SentJob:
        """Send a non-blocking request and return its job.

        Args:
            run: see `request`.
        """

        def send(backend: Any) -> SentJob:
            backend.blocking = False
            run(backend)
            return SentJob(backend.job_id, backend.ticket, backend.expectation.largest)

        return self.request(send)

    def poll(self, job: SentJob, form: Form) -> tuple[str | None, Any]:
        """Return the state of a non-blocking job, and its result or failure.

        The state is None if the server does not know the job.

        Args:
            job: the job.
            form: see `Expectation`.

        Raises:
            TransientFailure: the server cannot be reached, or the result cannot be downloaded now.
        """
        backend = self.backend(job.id)
        backend.expectation = Expectation(form, job.largest, job.ticket)
        try:
            result = backend.poll()
        except Exception as error:
            failure = self.classify(error)
            job_failed = backend.status is not None and backend.status.value == "ERROR"
            if not job_failed and isinstance(failure, TransientFailure):
                raise failure from None
            return "ERROR", failure
        self.bytes_received += backend.received
        state = None if backend.status is None else backend.status.value
        return state, result

    def get(self, path: str, timeout: float = 30.0) -> Any:
        """Return the JSON at a path of the server.

        Raises:
            TransientFailure: the server is not ready.
            LayersimError: no NDIF server responds at this address.
        """
        try:
            answer = fetched("GET", f"{self.host}{path}", seconds=timeout)
            if answer.code in (502, 503, 504):
                raise TransientFailure(f"{self.name} is not ready ({answer.code}): {server_text(answer.text, self.host, 200)}")
            if not answer.is_success:
                raise self.no_server(f"{path}: HTTP {answer.code}")
            return answer.json()
        except (LayersimError, TransientFailure) as error:
            if not isinstance(error, DamagedAnswer):
                raise
            raise self.no_server(f"{path}: {error}") from None
        except UnsafeAnswer as error:
            raise self.no_server(f"{path}: the answer {error}") from None
        except Exception as error:
            if not is_network_error(error):
                raise
            raise self.no_server(f"{path}: {type(error).__name__}: {error}") from None

    @cached_property
    def status(self) -> ServerStatus:
        """Status of the server, requested once.

        Raises:
            LayersimError: the server does not respond, or its JSON has another form.
        """
        try:
            self.get("/ping", timeout=10.0)
            status = self.get("/status", timeout=60.0)
            env = self.get("/env", timeout=60.0)
        except TransientFailure as error:
            raise self.given_up(error, 1) from None
        try:
            return parse_status(self.model_key, status, env)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            reason = f"/status or /env: a response of another form ({type(error).__name__}: {error})"
            raise self.no_server(reason) from None

    def classify(self, error: Exception) -> Exception:
        """Turn a failure into `TransientFailure`, `JobTooLong` or the error that ends the run."""
        if isinstance(error, UnsafeAnswer):
            return LayersimError(f"The result from {self.name} is refused, because it {error}.")
        if is_network_error(error):
            # The message may contain an address that gives access to a result.
            lines = str(error).splitlines()
            first_line = re.sub(r"https?://[^ ]*", self.name, lines[0]) if lines else ""
            return TransientFailure(server_text(f"{type(error).__name__}: {first_line}", self.host))
        if not isinstance(error, RequestFailed):
            return error
        return self._reported(str(error), error.code)

    def _reported(self, text: str, code: int | None) -> Exception:
        """Turn a failure that the server reports into an exception.

        Args:
            text: the text of the server.
            code: the HTTP status; None for a job.
        """
        from nnsight.schema.config import CONFIG

        lower = text.lower()
        last = self.quoted(last_line(text))
        if TOO_LONG in lower:
            return JobTooLong(server_text(text, self.host))
        if code in (401, 403) or (code == 400 and "api key" in lower):
            return LayersimError(
                f"{self.name} rejected the API key ({'a' if CONFIG.API.APIKEY else 'no'} key was sent); it says: {last}. Set "
                "the environment variable NDIF_API_KEY before Python starts, or call nnsight.login()."
            )
        if "error provisioning" in lower or "error starting model" in lower:
            return ModelNotRunning(last)
        refusal = re.search(REFUSAL, text)
        if refusal:
            return LayersimError(
                f"An analyzer failed on {self.name}, which says: {self.quoted(refusal['message'], LONGEST_REFUSAL)}"
            )
        transient_words = (NO_SANDBOX,) if "traceback (most recent" in lower else TRANSIENT
        if code in (408, 429, 500, 502, 503, 504) or any(word in lower for word in transient_words):
            unreadable = "could not be read" in lower
            return DamagedAnswer(last) if unreadable else TransientFailure(last)
        return self._failed_on_server(text)

    def quoted(self, text: str, most: int = LONGEST_SERVER_TEXT) -> str:
        """A text of the server in quotation marks."""
        return f"'{server_text(text, self.host, most)}'"

    def _failed_on_server(self, text: str) -> LayersimError:
        statement = f"it says: {self.quoted(last_line(text))}"
        if "out of memory" in text.lower():
            return LayersimError(
                f"{self.name} has too little free memory for this forward pass; {statement}. Use a smaller batch_size= or "
                "seq_len=."
            )
        differences = self.status.differences
        versions = f" Versions differ: {'; '.join(differences)}." if differences else ""
        frames = re.findall(r'File "(?:\[[^]]*\] )?([^"]+)", line (\d+), in (\w+)', text[-LONGEST_READ:])
        location = ""
        if frames:
            path, line, function = frames[-1]
            location = " " + server_text(f"(line {line} of {path}, in {function})", self.host)
        return LayersimError(
            f"The request failed on {self.name}{location}; {statement}. Try remote='local', which simulates the server in this "
            f"process.{versions}"
        )

    def given_up(self, error: Exception, attempts: int) -> LayersimError:
        """The error to raise after the last failed attempt to send a request."""
        reason = server_text(last_line(str(error)), self.host)
        if isinstance(error, ModelNotRunning):
            running = ", ".join(self.status.running) or "none"
            return LayersimError(
                f"{self.name} does not run the model {self.model_key.partition(':')[2]} and could not start the model; it "
                f"says: {reason}. Running models: {running}."
            )
        in_attempts = f" in {attempts} attempts" if attempts > 1 else ""
        if isinstance(error, DamagedAnswer):
            return LayersimError(f"{self.name} gave no result that can be read{in_attempts}: {reason}. Repeat the call later.")
        return LayersimError(
            f"{self.name} does not respond{in_attempts}: {reason}. Repeat the call later; the run continues from checkpoint= "
            "or from a saved RemoteRun."
        )

    def no_server(self, reason: str) -> LayersimError:
        """Error for an address without an NDIF server."""
        return LayersimError(
            f"There is no NDIF server at {self.name}: {server_text(reason, self.host)}. Check `remote`, or nnsight's setting "
            "NDIF_HOST if remote=True."
        )


def _waited_for(answer: Future[T]) -> T:
    # On some systems, a wait without a timeout does not notice Ctrl-C.
    while not answer.done():
        wait([answer], SECONDS_PER_CHECK)
    return answer.result()
