"""The built site, once for all tests, and a browser to open it."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .browser import CHROMIUM, NO_CHROMIUM, Browser
from .helpers import ROOT


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site: `TL_LAYERSIM_SITE`, which `make docs` sets, or one built here by the first process that asks."""
    if built := os.environ.get("TL_LAYERSIM_SITE"):
        return Path(built).resolve()
    if not all(importlib.util.find_spec(name) for name in ("mkdocs", "material", "math_core", "font_roboto", "ziamath")):
        pytest.skip("no mkdocs here: make docs builds the site and runs this test")
    # The processes of one test run share the folder above their own.
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "site"
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "llms.txt").exists():
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
            subprocess.run(command, cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip(NO_CHROMIUM)
    with Browser() as opened:
        yield opened
