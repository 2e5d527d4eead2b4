"""The small server, for every test of this folder."""

from __future__ import annotations

import pytest

from tl_layersim.engine import submitted_runs
from tl_layersim.remote import client as ndif

from .helpers import Small


@pytest.fixture(scope="session")
def running(tmp_path_factory):
    small = Small(tmp_path_factory.mktemp("small"))
    yield small
    small.stop()


@pytest.fixture
def small(running, monkeypatch):
    monkeypatch.setattr(ndif, "WAITS", (0.02,) * 4)
    monkeypatch.setattr(submitted_runs, "PAUSE", 0.05)
    running.set()
    yield running
    running.set()
