"""A request that is serialised before it is sent, and whose result another thread receives."""

from __future__ import annotations

import threading
from typing import Any

# Seconds between two looks for Ctrl-C on systems whose locks do not notice it.
SECONDS_PER_LOOK = 1.0


class PreparedRequest:
    """A serialised request, which can be sent several times until its result arrives.

    Tracing and serialising belong to the thread of the caller, because nnsight reads frames and changes global state for them.
    The other thread posts bytes, receives the server's messages, and downloads and decodes the result.

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
        """Whether the request was sent, and its result or its failure was not taken yet."""
        return self._backend is not None

    @property
    def queue_position(self) -> int:
        """The highest place in the server's queue that the request had; 1 where no other request waited."""
        return 1 if self._backend is None else int(self._backend.display.queue_position)

    def start(self, backend: Any) -> None:
        """Send the request in another thread.

        Args:
            backend: as `NdifClient.backend` makes it, with the payload.
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
            Exception: as the other thread met it; the request counts as not sent then.
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
        """Close the connection of a request that was sent and whose result is not awaited any more."""
        if self._backend is not None:
            self._backend.display.abandoned = True
