"""A headless Chromium that is told what to do over its debugging protocol, and that records every request."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.request import Request, urlopen

import websocket

CHROMIUM = shutil.which("chromium")
NO_CHROMIUM = "no chromium on this machine: apt-get install chromium"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-port=0",
    "--remote-allow-origins=*",
)  # fmt: skip
SECONDS = 600
TALLEST = 12000


class Browser:
    """One page of a browser, in which one address after another is opened."""

    def __init__(self) -> None:
        if CHROMIUM is None:
            raise RuntimeError(NO_CHROMIUM)
        self.requests: list[str] = []
        self._sent = 0
        self._events: list[dict[str, Any]] = []
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            new = Request(f"http://127.0.0.1:{self._port()}/json/new?about:blank", method="PUT")
            with urlopen(new, timeout=SECONDS) as answer:
                address = json.load(answer)["webSocketDebuggerUrl"]
            self._socket = websocket.create_connection(address, timeout=SECONDS)
            for domain in ("Page", "Network", "Runtime"):
                self.call(f"{domain}.enable")
            # A page remembers its colours; here every page begins anew.
            self.call("Page.addScriptToEvaluateOnNewDocument", source="try { localStorage.clear() } catch {}")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._socket.close()
        self.close()

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(SECONDS)
        self._profile.cleanup()

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Send one command and return its result; what happened meanwhile is kept."""
        self._sent += 1
        self._socket.send(json.dumps({"id": self._sent, "method": method, "params": parameters}))
        while True:
            message = self._receive()
            if message.get("id") == self._sent:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]

    def open(self, address: str) -> None:
        """Open a page and wait until it is loaded, with what its scripts ask for in the next moment."""
        self._events.clear()
        self.call("Page.navigate", url=address)
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._receive()
        self.evaluate("new Promise(done => setTimeout(done, 100))")

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def look(self, width: int, height: int = 900, dark: bool = False) -> None:
        """Set the size of the window, and whether the system is in dark mode."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path, whole: bool = False, clip: dict[str, float] | None = None) -> None:
        """Write what is seen as PNG, or the whole page, or a part of it."""
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], TALLEST), "scale": 1}
        beyond = {} if clip is None else {"clip": clip, "captureBeyondViewport": True}
        answer = self.call("Page.captureScreenshot", **beyond)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _receive(self) -> dict[str, Any]:
        message = json.loads(self._socket.recv())
        if "method" in message:
            self._events.append(message)
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        return message

    def _port(self) -> str:
        """The port that the browser chose, which it writes into its profile."""
        end = time.monotonic() + SECONDS
        file = Path(self._profile.name) / "DevToolsActivePort"
        while time.monotonic() < end:
            if file.exists() and (lines := file.read_text().splitlines()):
                return lines[0]
            time.sleep(0.05)
        raise TimeoutError("Chromium did not start.")
