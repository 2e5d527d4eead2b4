"""HTTP requests and websockets to an NDIF server, with limits on time and size."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from .failures import DamagedAnswer
from .result_reader import refuse_larger

T = TypeVar("T")
# Seconds in which a server accepts a connection.
CONNECT = 10.0
# Seconds in which a server names the session of a new connection.
SESSION = 20.0
# Seconds for a request with its answer, beside those for its bytes.
TRANSFER = 600.0
# Bytes per second of the slowest network.
SLOWEST = 20_000
# Seconds between two looks at an open connection.
REFRESH = 0.1
# Largest answer in JSON: the status of a server lists its models and all installed packages.
LARGEST_JSON = 16 * 2**20


def seconds_for(size: int) -> float:
    """Largest number of seconds in which so many bytes are sent or received."""
    return TRANSFER + size / SLOWEST


def within(seconds: float, action: Callable[[], T]) -> T:
    """Run an action in another thread, and return its result.

    Time-outs of sockets begin anew with each byte, so that a server that sends one byte at a time would never be given up.

    Raises:
        TimeoutError: the action takes longer. Its thread ends with the time-out of its socket.
    """
    answer = Future[T]()

    def run() -> None:
        try:
            answer.set_result(action())
        except BaseException as error:
            answer.set_exception(error)

    # A daemon, so that Python may end while a server is silent.
    threading.Thread(target=run, daemon=True, name="ndif-connection").start()
    end = time.monotonic() + seconds
    # On some systems, a long wait does not notice Ctrl-C.
    while not answer.done() and time.monotonic() < end:
        wait([answer], min(1.0, max(0.0, end - time.monotonic())))
    if not answer.done():
        raise TimeoutError(f"no complete answer in {seconds:g} s")
    return answer.result()


@dataclass(frozen=True)
class Answer:
    """The answer to an HTTP request.

    Attributes:
        code: HTTP status.
        content: the body.
    """

    code: int
    content: bytes

    @property
    def is_success(self) -> bool:
        """Whether the status is 200 to 299."""
        return 200 <= self.code < 300

    @property
    def text(self) -> str:
        """The body as text."""
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        """The body as JSON.

        Raises:
            DamagedAnswer: the body is no JSON.
        """
        try:
            return json.loads(self.content)
        except (ValueError, RecursionError):
            raise DamagedAnswer(f"an answer of {len(self.content)} bytes that is no JSON") from None


def fetched(method: str, url: str, *, largest: int = LARGEST_JSON, seconds: float | None = None, **request: Any) -> Answer:
    """Send an HTTP request and read the answer.

    Args:
        method: "GET" or "POST".
        url: the address.
        largest: largest number of bytes of the answer.
        seconds: largest number of seconds; None for those of `largest` bytes.
        **request: further arguments of `httpx.Client.stream`.

    Raises:
        httpx.HTTPError: the server cannot be reached, or the connection breaks.
        TimeoutError: the answer takes longer.
        UnsafeAnswer: the answer is larger.
    """
    import httpx

    limit = seconds_for(largest) if seconds is None else seconds

    def fetch() -> Answer:
        timeout = httpx.Timeout(limit, connect=min(CONNECT, limit))
        size = 0
        parts = []
        with httpx.Client(timeout=timeout) as client, client.stream(method, url, **request) as response:
            for part in response.iter_bytes():
                size += len(part)
                refuse_larger(size, largest)
                parts.append(part)
            return Answer(response.status_code, b"".join(parts))

    return within(limit, fetch)


@contextmanager
def subscription(url: str, headers: dict[str, str], largest: int) -> Iterator[Subscription]:
    """Context manager that opens a websocket, and closes it.

    Args:
        url: address of the websocket.
        headers: HTTP headers.
        largest: largest number of bytes of a message.

    Raises:
        websocket.WebSocketException: the server refuses the connection.
        OSError: the server cannot be reached, or does not respond.
    """
    import websocket

    class BoundedWebSocket(websocket.WebSocket):
        """A websocket with a limit on the size and the time of a message."""

        largest_message = largest
        # Bytes of the message so far, and the time at which it began.
        size = 0
        began = 0.0

        def _recv(self, bufsize: int) -> bytes:
            received: bytes = super()._recv(bufsize)  # type: ignore[no-untyped-call]  # the library's own has no types
            now = time.monotonic()
            if not self.size:
                self.began = now
            self.size += len(received)
            # Frames add a few bytes to each part of a message.
            refuse_larger(self.size // 2, self.largest_message)
            if now - self.began > seconds_for(self.size):
                raise TimeoutError(f"a message is not complete after {now - self.began:.0f} s")
            return received

    def connect() -> Any:
        return websocket.create_connection(url, timeout=CONNECT, header=headers or None, class_=BoundedWebSocket)

    connection = within(2 * CONNECT, connect)
    try:
        yield Subscription(connection)
    finally:
        # Without waiting for the other side, which may never answer.
        with suppress(Exception):
            connection.send_close()
        with suppress(Exception):
            connection.shutdown()


class Subscription:
    """A websocket on which a server reports the states of a job.

    Args:
        connection: the websocket.

    Attributes:
        pinged: whether a ping of the websocket was not answered yet.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.pinged = False

    def message(self, seconds: float = REFRESH) -> str | bytes | None:
        """The next message, or None if none arrives in time.

        Raises:
            ConnectionError: the server closed the connection.
            websocket.WebSocketException: the server breaks the protocol.
        """
        import websocket

        self._connection.settimeout(seconds)
        try:
            kind, content = self._connection.recv_data(control_frame=True)
        except websocket.WebSocketTimeoutException:
            return None
        if getattr(self._connection.cont_frame, "cont_data", None) is None:
            # A message is complete, or none has begun: pings may come between the parts of a message.
            self._connection.size = 0
        if kind == websocket.ABNF.OPCODE_CLOSE:
            raise ConnectionError("the server closed the connection")
        if kind == websocket.ABNF.OPCODE_TEXT:
            text: str = content.decode()
            return text
        if kind == websocket.ABNF.OPCODE_BINARY:
            return bytes(content)
        # Pings are answered by the library.
        self.pinged = self.pinged and kind != websocket.ABNF.OPCODE_PONG
        return None

    def ping(self) -> None:
        """Ask the other side of the websocket for a sign of life.

        Raises:
            ConnectionError: the ping before was not answered.
        """
        if self.pinged:
            raise ConnectionError("the connection does not respond")
        self.pinged = True
        self._connection.ping()

    def session(self) -> str:
        """The name of the session, which is the first message.

        Raises:
            DamagedAnswer: the message has another form.
            TimeoutError: no message arrives.
        """
        first = within(SESSION, lambda: self._first(time.monotonic() + SESSION))
        try:
            name = json.loads(first)["session_id"]
        except (ValueError, TypeError, KeyError, RecursionError):
            name = None
        if not isinstance(name, str) or not 0 < len(name) <= 200:
            raise DamagedAnswer("the connection began with a message that names no session")
        return name

    def _first(self, end: float) -> str | bytes:
        while time.monotonic() < end:
            message = self.message()
            if message is not None:
                return message
        raise TimeoutError(f"the connection named no session in {SESSION:g} s")
