"""What an HTML report holds, as a test reads it: its packed figures, and the page as a browser draws it."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import zlib
from pathlib import Path
from typing import Any

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


def unpacked(page: str, name: str) -> str:
    """A compressed script of a page: "figures" or "plotly"."""
    text = re.search(rf'<script type="text/plain" id="{name}">([^<]*)</script>', page)[1]
    return zlib.decompress(base64.b64decode(text)).decode()


def figures(page: str) -> list[dict[str, Any]]:
    """The figures of a page, in the order of the page."""
    return json.loads(unpacked(page, "figures"))


def drawn(path: Path, profile: Path) -> str:
    """The document after a browser has run its scripts; messages of the browser's console fail the test."""
    command = ["chromium", *FLAGS, f"--user-data-dir={profile}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr, re.findall(r".*CONSOLE.*", done.stderr)
    return done.stdout
