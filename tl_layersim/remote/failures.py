"""Failures of requests to an NDIF server: transient ones, too long jobs, and errors that end the run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from ..core.errors import LayersimError
from .server_status import ServerStatus, redacted

# Words in a server's message that name a failure of the server. In a traceback only NO_SANDBOX does; others are the request's.
TRANSIENT = ("unavailable", "reconnecting", "try again", "evicted", "preempted", "could not be read", "internal server error")
NO_SANDBOX = "waiting for the runner socket"
TOO_LONG = "exceeded the execution timeout"
# A LayersimError that a kernel raised on the server, as the last line of a traceback shows it.
REFUSAL = re.compile(r"LayersimError: (?P<message>.+)")


class JobTooLong(Exception):
    """The server ended a job that took longer than its operator allows."""


class TransientFailure(Exception):
    """A failure of the network or the server that may not recur."""


class ModelNotRunning(TransientFailure):
    """The server has not loaded the model and cannot load it now."""


class ConnectionStalled(Exception):
    """The server has sent nothing for a long time and does not respond to /ping."""


@dataclass(frozen=True)
class FailureMap:
    """Maps a failure of the server or the network to a retry, to smaller requests, or to the error that ends the run.

    Attributes:
        host: address of the server, which may hold a login.
        name: address of the server without the login.
        model_key: the model's name on the server.
        status: function that returns the server's status. It is called only for messages that need the status.
    """

    host: str
    name: str
    model_key: str
    status: Callable[[], ServerStatus]

    def classify(self, error: Exception) -> Exception:
        """The class of a failure: `TransientFailure`, `JobTooLong`, or the error that ends the run."""
        import httpx
        import pydantic
        import websocket
        from nnsight.intervention.backends.remote import RemoteError

        text = redacted(str(error), self.host)
        broken = (websocket.WebSocketException, httpx.HTTPError, pydantic.ValidationError, json.JSONDecodeError)
        if isinstance(error, (*broken, ConnectionStalled, OSError, EOFError)):
            # The message may contain an address that gives access to a result.
            first = re.sub(r"https?://[^ ]*", self.name, text.splitlines()[0] if text else "")
            return TransientFailure(f"{type(error).__name__}: {first}")
        if not isinstance(error, RemoteError):
            return error
        lower = text.lower()
        if TOO_LONG in lower:
            return JobTooLong(text.strip())
        # The HTTP status, where there is one, belongs to the cause of nnsight's own error.
        code = getattr(getattr(error.__cause__, "response", None), "status_code", None)
        if refusal := self._refused_by_server(text, code):
            return refusal
        if "error provisioning" in lower or "error starting model" in lower:
            return ModelNotRunning(text)
        if ours := re.search(REFUSAL, text):
            return LayersimError(ours["message"])
        unreached = isinstance(error.__cause__, httpx.TransportError)
        words = (NO_SANDBOX,) if "traceback (most recent" in lower else TRANSIENT
        if unreached or code in (408, 429, 500, 502, 503, 504) or any(word in lower for word in words):
            return TransientFailure(text)
        return self._failed_on_server(text)

    def _refused_by_server(self, text: str, code: int | None) -> LayersimError | None:
        """The error for a request that the server rejected because of its API key or its package versions."""
        if code in (401, 403) or (code == 400 and "api key" in text.lower()):
            return LayersimError(
                f"{self.name} rejected the API key ({'a' if _has_key() else 'no'} key was sent): {last_line(text)}. Set "
                "NDIF_API_KEY before Python starts, or call nnsight.login()."
            )
        if code == 400 and "version" in text.lower():
            return LayersimError(
                f"{self.name} rejects requests from the installed versions: {last_line(text)}. It runs "
                f"{', '.join(f'{name} {version}' for name, version in self.status().versions.items())}."
            )
        return None

    def _failed_on_server(self, text: str) -> LayersimError:
        """The error for a request that failed while it ran."""
        if "out of memory" in text.lower():
            return LayersimError(
                f"A forward pass of this size does not fit into the free memory of the server: {last_line(text)}. Use a "
                "smaller batch_size= or seq_len=."
            )
        do = "Try remote='local', which simulates the server in this process"
        if self.status().differences:
            do += f"; if that works, versions matter: {'; '.join(self.status().differences)}"
        frames = re.findall(r'File "(?:\[[^]]*\] )?([^"]+)", line (\d+), in (\w+)', text)
        where = " (line {1} of {0}, in {2})".format(*frames[-1]) if frames else ""
        return LayersimError(f"The request failed on {self.name}: {last_line(text)}{where}. {do}.")

    def given_up(self, error: Exception, attempts: int) -> LayersimError:
        """The error that ends a run after this many attempts."""
        if isinstance(error, ModelNotRunning):
            running = ", ".join(self.status().running) or "none"
            return LayersimError(
                f"{self.name} does not run this model, and could not start it: {self.model_key.partition(':')[2]}: "
                f"{last_line(str(error))}. It runs {running}."
            )
        return LayersimError(
            f"{self.name} does not respond{f' in {attempts} attempts' if attempts > 1 else ''}: {last_line(str(error))}. The "
            "same call later continues a checkpoint= or a saved RemoteRun."
        )

    def no_server(self, given: str) -> LayersimError:
        """The error for an address at which no NDIF server responds."""
        return LayersimError(
            f"There is no NDIF server at this address: {self.name}: {redacted(given, self.host)}. Check `remote`, or "
            "NDIF_HOST, nnsight's default."
        )


def _has_key() -> bool:
    from nnsight.schema.config import CONFIG

    return bool(CONFIG.API.APIKEY)


def last_line(text: str) -> str:
    """The last line of a traceback or of a server's message. It names the failure."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:300].rstrip(".") if lines else "nothing"
