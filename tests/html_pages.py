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
# A window so tall that every figure is in view, since the page draws those in view.
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--enable-logging=stderr",
    "--window-size=1280,30000", "--virtual-time-budget=20000", "--dump-dom",
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
    """The document after a browser has run its scripts; messages of the browser's console fail the test."""
    command = ["chromium", *FLAGS, f"--user-data-dir={profile}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr, re.findall(r".*CONSOLE.*", done.stderr)
    return done.stdout
