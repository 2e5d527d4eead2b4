"""What an HTML report holds, as a test reads it: its figures, and the page as a browser draws it."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

needs_chromium = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="no chromium on this machine: apt-get install chromium"
)
# A page draws its figures as they come into view, which in a browser without a window happens at an uncertain time, and all at
# once before it is printed.
PRINT = '<script>window.dispatchEvent(new Event("beforeprint"))</script></body>'
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--enable-logging=stderr",
    "--window-size=1280,1000", "--virtual-time-budget=20000", "--dump-dom",
)  # fmt: skip


def figures(page: str) -> list[dict[str, Any]]:
    """The figures of a page, in the order of the page, with the arrays that plotly wrote in base 64."""
    [text] = re.findall(r'<script type="application/json" id="figures">([^<]*)</script>', page)
    return json.loads(text, object_hook=_array)


def _array(value: dict[str, Any]) -> Any:
    if "bdata" not in value:
        return value
    array = np.frombuffer(base64.b64decode(value["bdata"]), dtype=np.dtype(value["dtype"]))
    shape = value.get("shape")
    return array.reshape([int(size) for size in str(shape).split(",")]) if shape else array


def drawn(path: Path, profile: Path) -> str:
    """The document after a browser has drawn its figures for printing; messages of the browser's console fail the test."""
    page = path.with_suffix(".printed.html")
    page.write_text(PRINT.join(path.read_text().rsplit("</body>", 1)))
    command = ["chromium", *FLAGS, f"--user-data-dir={profile}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True)
    assert "CONSOLE" not in done.stderr, re.findall(r".*CONSOLE.*", done.stderr)
    return done.stdout
