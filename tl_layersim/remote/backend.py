"""nnsight's remote backend with limits on the time and the size of what a server answers, and checks of its results."""

from __future__ import annotations

import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any
from urllib.parse import quote

from ..core.errors import LayersimError
from ..sources.result_seals import seal_sum
from .connection import TRANSFER, Answer, Subscription, fetched, seconds_for, subscription
from .failures import DamagedAnswer, RequestFailed, TransientFailure, UnsafeAnswer, is_network_error, server_text
from .result_reader import decompressed, read_result, refuse_larger

# The local variable of every trace of this package that holds the result, sealed by `result_seals.sealed`.
RESULT = "found"
# Bytes of a result whose size its request does not know: numbers about the server, sizes and norms of a row.
SMALL_RESULT = 64 * 2**20
# Bytes of names, and of the states of a job.
OVERHEAD = 2**20
# Function that raises `UnsafeAnswer` for a result of another form than the request returns.
Form = Callable[[Any], None]


@dataclass(frozen=True)
class Expectation:
    """The result that a request must return.

    Attributes:
        form: checks names, dtypes and shapes.
        largest: largest number of bytes of its tensors.
        ticket: the ticket with which the server seals the result.
    """

    form: Form
    largest: int = SMALL_RESULT
    ticket: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True)
class PreparedRequest:
    """A serialised request.

    Attributes:
        payload: the bytes.
        expectation: the result that must return.
    """

    payload: bytes
    expectation: Expectation


def _nothing(value: Any) -> None:
    """The form of the result of a request that was not described."""
    raise UnsafeAnswer("was not expected")


def sending_backend() -> Any:
    """Return a subclass of nnsight's remote backend whose requests have limits on time and size.

    Results are checked before they are used: they are plain data and tensors (`result_reader`), sealed by the server.
    """
    # In a function, because nnsight is imported only when needed.
    from nnsight.intervention.backends.remote import RemoteBackend
    from nnsight.schema.request import RequestModel
    from nnsight.schema.response import ResponseModel, Status

    class SendingBackend(RemoteBackend):  # type: ignore[misc]  # nnsight has no types
        sent = 0
        received = 0
        # Whether a trace is serialised only; `exchange` sends it later.
        prepares = False
        payload: bytes | None = None
        expectation = Expectation(_nothing)

        @property
        def ticket(self) -> str:
            """Ticket of the request; traces seal their results with it."""
            return self.expectation.ticket

        def expecting(self, form: Form, largest: int = SMALL_RESULT) -> SendingBackend:
            """This backend, after it was told which result the request returns."""
            self.expectation = Expectation(form, largest)
            return self

        def __call__(self, tracer: Any = None) -> Any:
            if not self.prepares:
                return super().__call__(tracer)
            self.payload = self._serialize(tracer)
            return None

        def exchange(self) -> Any:
            """Send the serialised trace and return its result. Any thread may call this method."""
            return self.request(RequestModel(model_key=self.model_key, compress=self.compress, env=self.env), None)

        def request(self, request: Any, tracer: Any) -> Any:
            """Send a request, wait for its job and return its result."""
            blob = self._serialize(tracer)
            with (
                reading_results(),
                subscription(f"{self.ws_host}/subscribe", self._headers(), self._largest_message()) as states,
            ):
                # Subscribed before the request is sent, so that no message is missed.
                request.session_id = states.session()
                self.note(self._post(request, blob))
                return self._result(states)

        def _result(self, states: Subscription) -> Any:
            while True:
                message = states.message()
                if message is None:
                    if self.display.refresh():
                        states.ping()
                    continue
                response = self.parse(message)
                if self.note(response):
                    return self.download_result(response.data)

        def note(self, response: Any) -> bool:
            self.display.update(response)
            if response.status == Status.ERROR:
                raise RequestFailed(response.description)
            return bool(response.status == Status.COMPLETED)

        def _serialize(self, tracer: Any) -> bytes:
            if self.payload is not None:
                self.sent = len(self.payload)
                return self.payload
            try:
                payload: bytes = super()._serialize(tracer)
            except Exception as error:
                raise LayersimError(
                    f"The request cannot be serialized: {server_text(f'{type(error).__name__}: {error}')}. Options of the "
                    "analyzer and globals of its module must not hold models, locks or open files."
                ) from error
            self.sent = len(payload)
            return payload

        def _headers(self) -> dict[str, str]:
            return {"ndif-api-key": self.api_key} if self.api_key else {}

        def _largest_message(self) -> int:
            # Old protocols of pickle write some bytes as two.
            return 2 * self.expectation.largest + OVERHEAD

        def _post(self, request: Any, blob: bytes) -> Any:
            # As nnsight sends them, for servers that accept only some versions.
            facts = {"nnsight-version": version("nnsight"), "python-version": sys.version, "ndif-timestamp": repr(time.time())}
            answer = fetched(
                "POST",
                f"{self.host}/request",
                data={"data": request.metadata()},
                files={"blob": ("request", blob, "application/octet-stream")},
                headers=facts | self._headers(),
                largest=OVERHEAD,
                seconds=seconds_for(len(blob)),
            )
            if not answer.is_success:
                raise RequestFailed(f"Failed to send request: {_detail(answer)}", answer.code)
            return self.parse(answer.text)

        def submit(self, tracer: Any) -> None:
            """Send a request without waiting for its job, whose name becomes `job_id`."""
            blob = self._serialize(tracer)
            with reading_results():
                response = self._post(RequestModel(model_key=self.model_key, compress=self.compress, env=self.env), blob)
                if not re.fullmatch(r"[!-~]{1,200}", response.id):
                    raise DamagedAnswer("the answer to a request names no job")
                self.note(response)
                self.job_id = response.id
                self.status = response.status

        def poll(self, tracer: Any = None) -> Any:
            """Ask for the state of the job `job_id`, and return its result if it is complete, else None."""
            with reading_results():
                address = f"{self.host}/response/{quote(self.job_id, safe='')}"
                answer = fetched("GET", address, headers=self._headers(), largest=OVERHEAD, seconds=TRANSFER)
                if answer.code == 404:
                    return None
                if not answer.is_success:
                    raise TransientFailure(f"HTTP {answer.code}")
                response = self.parse(answer.text)
                self.status = response.status
                return self.download_result(response.data) if self.note(response) else None

        def parse(self, message: str | bytes) -> Any:
            """Read a message about the state of a job."""
            if not message:
                # A closed connection gives an empty message.
                raise ConnectionError("the server closed the connection")
            if isinstance(message, str):
                return ResponseModel.model_validate_json(message)
            fields = read_result(message, self._largest_message())
            if not isinstance(fields, dict):
                raise DamagedAnswer("the state of a job has another form")
            return ResponseModel.model_validate(fields)

        def download_result(self, data: Any) -> Any:
            """Read the result of a completed job, which its last message holds, or the address of which it names."""
            if not data:
                raise DamagedAnswer("the job is complete, but its last message has no result")
            if isinstance(data, bytes):
                return self.finalize(data)
            if not isinstance(data, str):
                raise DamagedAnswer("the last message of the job has a result of another form")
            answer = fetched("GET", data, largest=self._largest_message())
            if not answer.is_success:
                raise DamagedAnswer(f"the result cannot be downloaded: HTTP {answer.code}")
            return self.finalize(answer.content)

        def finalize(self, content: bytes) -> Any:
            """Read a result, and check its ticket and its checksum."""
            self.received = len(content)
            if not content:
                raise DamagedAnswer("the result is empty")
            largest = self.expectation.largest + OVERHEAD
            plain = decompressed(content, largest) if self.compress else content
            refuse_larger(len(plain), largest)
            return {RESULT: self._opened(read_result(plain, self.expectation.largest))}

        def _opened(self, result: Any) -> Any:
            sealed_value = result.get(RESULT) if isinstance(result, dict) and len(result) == 1 else None
            if not isinstance(sealed_value, tuple | list) or len(sealed_value) != 3:
                raise UnsafeAnswer("does not hold what the request returns")
            ticket, checksum, value = sealed_value
            if type(ticket) is not str or type(checksum) is not int:
                raise UnsafeAnswer("has no ticket and no checksum")
            if ticket != self.ticket:
                raise DamagedAnswer("the result belongs to another request")
            # Before the checksum, because the form names what is wrong.
            self.expectation.form(value)
            if checksum != seal_sum(value):
                kernels = getattr(self.expectation.form, "kernels", ())
                of_kernels = f" for {', '.join(map(repr, kernels))}" if kernels else ""
                raise UnsafeAnswer(f"has other numbers than the server computed{of_kernels}: its checksum differs")
            return value

    return SendingBackend


@contextmanager
def reading_results() -> Iterator[None]:
    """Context manager that turns every unforeseen error of reading a server's answers into `DamagedAnswer`."""
    try:
        yield
    except (LayersimError, TransientFailure, RequestFailed, UnsafeAnswer):
        raise
    except Exception as error:
        if is_network_error(error):
            raise
        raise DamagedAnswer(f"an answer that cannot be read ({type(error).__name__}: {server_text(error, most=100)})") from None


def _detail(answer: Answer) -> str:
    """The reason in the answer to a request that was refused."""
    try:
        body = answer.json()
    except DamagedAnswer:
        return answer.text or f"HTTP {answer.code}"
    detail = body.get("detail") if isinstance(body, dict) else body
    return str(detail) if detail else f"HTTP {answer.code}"
