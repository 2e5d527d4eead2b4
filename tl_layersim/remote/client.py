"""The conversation with an NDIF server: what it can do, one request, and what is done when a request fails."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from ..core.addresses import without_login
from ..core.errors import LayersimError
from .address import host_of, keep_logins_out_of_logs, redacted

T = TypeVar("T")
# Seconds between attempts: nine minutes in all, in which a server can be started again and load a large model.
WAITS = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, *[60.0] * 8)
# What a server says of a failure that is not the request's; a traceback is the request's own, but for this one.
PASSING = ("unavailable", "reconnecting", "try again", "evicted", "preempted", "could not be read", "internal server error")
LOG = logging.getLogger("tl_layersim")
NO_SANDBOX = "waiting for the runner socket"
# A LayersimError that a kernel raised there, as a traceback ends with it.
REFUSAL = re.compile(
    r"LayersimError: (?P<what>.+)\n\s+given:\s+(?P<given>.+)\n\s+expected:\s+(?P<expected>.+)\n\s+do:\s+(?P<do>.+)"
)
TOO_LONG = "exceeded the execution timeout"
CRITICAL = ("nnsight", "transformers", "torch")
SILENCE = 60.0


class JobTooLong(Exception):
    """The server ended a job that took longer than its operator allows."""


class Passing(Exception):
    """A failure of the network or the server that may be over at the next attempt."""


@dataclass(frozen=True)
class Standing:
    """What a server says of itself and of one model, before it is asked to run anything.

    Attributes:
        running: names of the models that it has loaded.
        loaded: whether this one is among them.
        dtype: of this model's weights there, "" where it does not say.
        job_limit: seconds a job may take, None where there is no limit or it does not say.
        versions: of Python and of the packages that matter, there.
        differences: where they are not those here, in words.
    """

    running: tuple[str, ...]
    loaded: bool
    dtype: str
    job_limit: float | None
    versions: Mapping[str, str]
    differences: tuple[str, ...]


@dataclass(frozen=True)
class Word:
    """What a server says of a job that nobody waits for.

    Attributes:
        state: its name for it, None where it knows no such job or cannot be reached.
        found: the answer, once there is one.
        failure: why the job has none and may be sent again, "" where it has not failed.
        halve: whether it was too long.
        reached: whether the server could be asked.
        final: the refusal that sending it again would not change, None where it might.
    """

    state: str | None
    found: Any = None
    failure: str = ""
    halve: bool = False
    reached: bool = True
    final: Exception | None = None


def quiet(text: str) -> None:
    """Says nothing."""


class NdifClient:
    """One server, one model on it.

    Args:
        remote: True, or the server's address.
        model_key: the model's name there.
        env: what nnsight says of the model with each request.
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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @property
    def patience(self) -> float:
        """Seconds for which a server may be away."""
        return sum(WAITS)

    def request(self, run: Callable[[Any], T], patient: bool = True) -> T:
        """What `run` returns for a backend to trace with; attempted again while the failure may pass.

        A request gives sums and changes nothing there: the answer to an attempt that was lost is asked for again, and only an
        answer that arrived is counted.

        Args:
            run: opens a trace or a session with the backend that it is given.
            patient: whether to wait for a server that was there before; False for the first request of all.

        Raises:
            JobTooLong: the job was ended by the server.
            LayersimError: the failure is the request's, or does not pass.
        """
        waits = WAITS if patient else WAITS[:2]
        for attempt in range(len(waits) + 1):
            try:
                return self._attempt(run)
            except Passing as error:
                if attempt == len(waits):
                    raise self.given_up(error, len(waits) + 1) from None
                if "could not be read" in str(error) and attempt == 2:
                    # Not a matter of the line, then.
                    raise self.given_up(error, 3) from None
                reason, wait = _last(str(error)), waits[attempt]
                LOG.warning("%s: attempt %d of %d in %g s: %s", self.name, attempt + 2, len(waits) + 1, wait, reason)
                for left in range(int(wait), 0, -1):
                    self.say(f"attempt {attempt + 2} of {len(waits) + 1} in {left} s: {reason[:80]}")
                    time.sleep(wait / int(wait))
        raise AssertionError

    def _attempt(self, run: Callable[[Any], T]) -> T:
        backend = self.backend(blocking=True)
        try:
            found = run(backend)
        except LayersimError:
            raise
        except Exception as error:
            raise self.in_words(error) from None
        self.requests += 1
        self.sent, self.received = self.sent + backend.sent, self.received + backend.received
        self.seconds = backend.display.seconds
        return found

    def backend(self, blocking: bool, job_id: str | None = None) -> Any:
        """Nnsight's own way to a server, which counts bytes and reports through `say`."""
        backend = _courier()(self.model_key, host=self.host, env=self.env, blocking=blocking, job_id=job_id)
        # Who does not wait is not shown a download either.
        backend.display = Display(self, enabled=blocking)
        return backend

    def send_off(self, run: Callable[[Any], Any]) -> str:
        """Send a request and return the server's name for it, without waiting."""
        names: list[str] = []

        def sent(backend: Any) -> None:
            backend.blocking = backend.display.enabled = False
            run(backend)
            names.append(backend.job_id)

        self.request(sent)
        return names[0]

    def look(self, job_id: str) -> Word:
        """The server's last word on a job that was sent off."""
        backend = self.backend(blocking=False, job_id=job_id)
        try:
            found = backend.poll()
        except Exception as error:
            failure, state = self.in_words(error), None if backend.status is None else backend.status.value
            if state != "ERROR" and isinstance(failure, Passing):
                # The connection failed, or the download of an answer, and not the job.
                return Word(state if state != "COMPLETED" else "RUNNING", failure=_last(str(failure)), reached=False)
            if isinstance(failure, JobTooLong | Passing):
                return Word("ERROR", failure=_last(str(failure)), halve=isinstance(failure, JobTooLong))
            return Word("ERROR", failure=str(failure), final=failure)
        self.received += backend.received
        return Word(None if backend.status is None else backend.status.value, found)

    def get(self, path: str, timeout: float = 30.0) -> Any:
        """The JSON that the server has at a path."""
        import httpx

        try:
            answer = httpx.get(f"{self.host}{path}", timeout=httpx.Timeout(10.0, read=timeout))
            answer.raise_for_status()
            return answer.json()
        except httpx.HTTPStatusError as error:
            code = error.response.status_code
            if code in (502, 503, 504):
                raise Passing(redacted(f"{self.name} is not ready ({code}): {error.response.text[:200]}", self.host)) from None
            raise self._no_server(f"{path}: HTTP {code}") from None
        except httpx.TransportError as error:
            raise self._no_server(f"{type(error).__name__}: {error}") from None
        except (ValueError, RecursionError):
            raise self._no_server(f"{path}: an answer that is no JSON") from None

    @cached_property
    def standing(self) -> Standing:
        """What the server says of itself, asked once."""
        try:
            self.get("/ping", timeout=10.0)
            status, there = self.get("/status", timeout=60.0), self.get("/env", timeout=60.0)
        except Passing as error:
            raise self.given_up(error, 1) from None
        try:
            return _standing(self.model_key, status, there)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._no_server(f"/status or /env: an answer of another form ({type(error).__name__}: {error})") from error

    def in_words(self, error: Exception) -> Exception:
        """What a failed request means: `Passing`, `JobTooLong`, or the refusal that ends the run."""
        import httpx
        import pydantic
        import websocket
        from nnsight.intervention.backends.remote import RemoteError

        text = redacted(str(error), self.host)
        # What the server said is in the text; the code that it came with, where there is one, hangs on the cause.
        answer = getattr(error.__cause__, "response", None) if isinstance(error, RemoteError) else None
        code = getattr(answer, "status_code", None)
        broken = (websocket.WebSocketException, httpx.HTTPError, pydantic.ValidationError, json.JSONDecodeError)
        if isinstance(error, (*broken, Stalled, OSError, EOFError)):
            # An address that gives access to an answer may stand in the words.
            return Passing(
                f"{type(error).__name__}: {re.sub(r'https?://[^ ]*', self.name, text.splitlines()[0] if text else '')}"
            )
        if not isinstance(error, RemoteError):
            return error
        lower = text.lower()
        if TOO_LONG in lower:
            return JobTooLong(text.strip())
        if code in (401, 403) or (code == 400 and "api key" in lower):
            return LayersimError(
                f"{self.name} does not take this key.",
                given=f"{'a' if self._has_key() else 'no'} key; it says: {_last(text)}",
                expected="the key of an account on this server",
                do="nnsight.login(), or set NDIF_API_KEY before Python starts; keys are given out where the server says",
            )
        if code == 400 and "version" in lower:
            return LayersimError(
                f"{self.name} does not take requests from these versions.",
                given=_last(text),
                expected=", ".join(f"{name} {version}" for name, version in self.standing.versions.items()),
                do="pip install the versions that it asks for",
            )
        if "error provisioning" in lower or "error starting model" in lower:
            return NotRunning(text)
        if ours := re.search(REFUSAL, text):
            return LayersimError(ours["what"], given=ours["given"], expected=ours["expected"], do=ours["do"])
        unreached = isinstance(error.__cause__, httpx.TransportError)
        words = (NO_SANDBOX,) if "traceback (most recent" in lower else PASSING
        if unreached or code in (408, 429, 500, 502, 503, 504) or any(word in lower for word in words):
            return Passing(text)
        if "out of memory" in lower:
            return LayersimError(
                "A forward pass does not fit into the memory that is free there.",
                given=_last(text),
                expected="fewer tokens at once",
                do="a smaller batch_size=, or a smaller seq_len=",
            )
        do = "try the same with remote='local', which runs here what would run there"
        if self.standing.differences:
            do += f"; if that works, versions matter: {'; '.join(self.standing.differences)}"
        frames = re.findall(r'File "(?:\[[^]]*\] )?([^"]+)", line (\d+), in (\w+)', text)
        where = " (line {1} of {0}, in {2})".format(*frames[-1]) if frames else ""
        return LayersimError(
            f"The request failed on {self.name}.",
            given=_last(text) + where,
            expected="kernels that run there as they do here",
            do=do,
        )

    def given_up(self, error: Exception, attempts: int) -> LayersimError:
        """The refusal that ends a run after so many attempts."""
        if isinstance(error, NotRunning):
            running = ", ".join(self.standing.running) or "none"
            return LayersimError(
                f"{self.name} does not run this model, and could not start it.",
                given=f"{self.model_key.partition(':')[2]}: {_last(str(error))}",
                expected=f"a model that runs there; those are: {running}",
                do="nnsight.status() lists them with their tasks and revisions; or ask its operator for this one",
            )
        return LayersimError(
            f"{self.name} {f'gave no answer, asked {attempts} times' if attempts > 1 else 'does not answer'}.",
            given=_last(str(error)),
            expected="a server that takes requests",
            do="the same call later: a checkpoint= goes on where it was, and so does a RemoteRun that was saved",
        )

    def _no_server(self, given: str) -> LayersimError:
        return LayersimError(
            "There is no NDIF server at this address.",
            given=f"{self.name}: {redacted(given, self.host)}",
            expected="a server that answers /ping, /status and /env",
            do="check the address and the network; remote='http://host:port' for your own, NDIF_HOST for nnsight's default",
        )

    @staticmethod
    def _has_key() -> bool:
        from nnsight.schema.config import CONFIG

        return bool(CONFIG.API.APIKEY)


class NotRunning(Passing):
    """The server has not got the model and cannot load it now."""


class Stalled(Exception):
    """Nothing was heard for long, and the server does not answer."""


@dataclass
class Display:
    """What nnsight shows a job's progress on: here the bar of the whole run, and a watch on the connection.

    Attributes:
        server: whose `say` is told.
        seconds: how long the job ran, from the server's first word of it to its last.
        enabled: nnsight wakes up ten times a second for a display that is.
    """

    server: NdifClient
    seconds: float = 0.0
    enabled: bool = True
    _heard: float = field(default_factory=time.monotonic)
    _started: float | None = None

    def update(self, response: Any) -> None:
        """A word from the server."""
        self._heard = time.monotonic()
        status = response.status.value
        if status == "RUNNING" and self._started is None:
            self._started = self._heard
        if status == "COMPLETED" and self._started is not None:
            self.seconds = self._heard - self._started
        if status in ("PROVISIONING", "DEPLOYING") or (status == "QUEUED" and "position 1." not in response.description):
            self.server.say(redacted(f"{status.lower()}: {response.description}", self.server.host)[:80])
        elif status == "RUNNING":
            sent, received = self.server.sent / 1e3, self.server.received / 1e3
            self.server.say(f"request {self.server.requests + 1}, {sent:.0f} kB sent, {received:.0f} kB back")

    def refresh(self) -> None:
        """A tenth of a second without a word."""
        if time.monotonic() - self._heard < SILENCE:
            return
        try:
            # A queue may be silent for hours; a server that is gone does not answer this.
            self.server.get("/ping", timeout=10.0)
        except (LayersimError, Passing) as error:
            raise Stalled(f"nothing heard for {SILENCE:.0f} s, and no answer to /ping") from error
        self._heard = time.monotonic()


def _standing(model_key: str, status: Any, there: Any) -> Standing:
    """What the answers to /status and /env say; raises whatever an answer of another form leads to."""
    from nnsight.ndif import EnvComparison, get_local_env

    # Another user's deployment of which nothing is said is no reason to refuse this one.
    known = [entry for entry in status["deployments"].values() if isinstance(entry, dict)]
    entries = [entry for entry in known if entry.get("application_state") == "RUNNING"]
    own: dict[str, Any] = next((entry for entry in entries if entry.get("model_key") == model_key), {})
    limit = own.get("execution_timeout_seconds")
    compared = EnvComparison(get_local_env(), there)
    differing = [f"Python {compared.local_python} here, {compared.remote_python} there"] if _minor(compared) else []
    for package, found in compared.critical_mismatches.items():
        differing.append(f"{package} {found['local']} here, {found['remote']} there")
    packages = there.get("packages", {})
    return Standing(
        running=tuple(sorted({str(entry.get("repo_id")) for entry in entries})),
        loaded=bool(own),
        dtype=str(own.get("dtype") or ""),
        job_limit=float(limit) if limit else None,
        versions={"python": compared.remote_python} | {name: str(packages[name]) for name in CRITICAL if name in packages},
        differences=tuple(differing),
    )


def _courier() -> Any:
    """Nnsight's backend, with a count of what it carries. A class made here, because nnsight is imported when needed."""
    from nnsight.intervention.backends.remote import RemoteBackend

    class Courier(RemoteBackend):  # type: ignore[misc]  # nnsight has no types
        sent = 0
        received = 0

        def _serialize(self, tracer: Any) -> bytes:
            try:
                payload: bytes = super()._serialize(tracer)
            except Exception as error:
                raise LayersimError(
                    "The request cannot be packed.",
                    given=redacted(f"{type(error).__name__}: {error}")[:300],
                    expected="kernels that are functions of a module, with plain options",
                    do="keep models, locks and open files out of the analyzer's options and its module's globals",
                ) from error
            self.sent = len(payload)
            return payload

        @staticmethod
        def parse(message: str | bytes) -> Any:
            if not message:
                # What a connection gives that was closed.
                raise ConnectionError("the server closed the connection")
            return RemoteBackend.parse(message)

        def download_result(self, url: Any) -> Any:
            # The bar of the whole run is enough.
            self.display.enabled = False
            return super().download_result(url)

        def finalize(self, content: bytes) -> Any:
            self.received = len(content)
            return super().finalize(content)

    return Courier


def _minor(compared: Any) -> bool:
    local, there = (str(v).split(".")[:2] for v in (compared.local_python, compared.remote_python))
    return local != there


def _last(text: str) -> str:
    """The line of a traceback, or of a server's words, that says what happened."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing"
