"""The NDIF server that notebooks about servers are executed against, with the demo model as its only model.

A real server is started where its environment is at hand (`make .venv-ndif/server` builds it) and redis-server too, else the
small server of `tests/remote`, which speaks the same protocol in one process. Notebooks print which one it was.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL = "tl-layersim/demo"
DESCRIPTIONS = {
    "NDIF": "a real NDIF server on this machine",
    "stand-in": "the small server of the tests, which speaks NDIF's protocol",
}


def kind() -> str:
    """Kind of the server: "NDIF", or "stand-in" where no real server can be started."""
    return "NDIF" if _python() and shutil.which("redis-server") else "stand-in"


def _python() -> str:
    """The interpreter of the environment that holds the server; empty without one."""
    built = ROOT / ".venv-ndif"
    return os.environ.get("TL_LAYERSIM_NDIF_PYTHON") or (str(built / "bin/python") if (built / "server").exists() else "")


@contextlib.contextmanager
def running() -> Iterator[dict[str, str]]:
    """Start a hub and a server, give the environment of their clients, and stop both."""
    import tl_layersim as lsim
    from tests.ndif.hub import Hub
    from tests.ndif.server import Server

    # Ray puts sockets below this folder, whose name may not be long.
    with tempfile.TemporaryDirectory(prefix="ndif", dir="/tmp") as folder:
        demo = lsim.demo_model()
        demo.save_pretrained(Path(folder, "hub", MODEL))
        demo.tokenizer.save_pretrained(Path(folder, "hub", MODEL))
        hub = Hub(Path(folder, "hub"))
        client = {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HOME": str(Path(folder, "client")),
            "NDIF_API_KEY": "5e1f0000-1234-4321-abcd-00000000beef",
            "LAYERSIM_NDIF_MODEL": MODEL,
            "LAYERSIM_NDIF_KIND": DESCRIPTIONS[kind()],
        }
        try:
            if kind() == "NDIF":
                Path(folder, "a").mkdir()
                with Server(_python(), Path(folder, "a"), hub.url) as server:
                    yield client | {"NDIF_HOST": server.url}
            else:
                with _stand_in(client) as url:
                    yield client | {"NDIF_HOST": url}
        finally:
            hub.close()


@contextlib.contextmanager
def _stand_in(environment: dict[str, str]) -> Iterator[str]:
    from tests.ndif.server import free_ports

    [port] = free_ports(1)
    command = [sys.executable, str(ROOT / "tests/remote/small_ndif.py"), str(port)]
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 900
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/ping", timeout=1).close()
                break
            if time.monotonic() > end or process.poll() is not None:
                raise RuntimeError("the stand-in for an NDIF server did not come up")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
